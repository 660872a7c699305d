"""Tables and figures of steps, primitives and memory: every row that has a figure, and why the others have none."""

import pytest

from bench import rows, tables
from bench.shapes import SMALL
from bench.timing import tables as timing
from bench.timing.entries import EAGER

SINGLE, HALF = {"dtype": "float32"}, {"dtype": "float32, Newton-Schulz bfloat16"}
AGAINST = "step over klshampoo reference"


def step(model, optimizer, median=None, **values):
    given = {"model": model, "optimizer": optimizer, "metric": "step", "unit": "ms", "median": median, **SINGLE}
    return dict.fromkeys(("case", "backend", "rank", "q1", "q3", "ratio", "floor", "note"), "") | given | values


PRO = {"backend": "torch", "rank": 8}
STEPS = [
    step(SMALL[0], "muon", 10.04, ratio=1, floor=4),
    step(SMALL[0], "pro-klshampoo", 15.5, ratio=1.544, floor=5, **PRO),
    step(SMALL[1], "pro-klshampoo", 31, ratio=1.2, **PRO),
    step(SMALL[0], "pro-klshampoo", 30, ratio=3, rank=8, backend="reference"),
    step(SMALL[0], "pro-klshampoo", 20, ratio=2, note=EAGER, **PRO),
    step(SMALL[0], "muon", 99, ratio=1, floor=9, **HALF),
    step(SMALL[0], "pro-klshampoo", 98, ratio=0.99, floor=9, **PRO, **HALF),
    step(SMALL[0], "heavyball.KLShampoo", 70, ratio=7),
    step(SMALL[0], "emerging", note="needs Python 3.12"),
    step(SMALL[1], "heavyball.KLShampoo", note="too slow"),
    step("n/m=2", "muon", 1, ratio=1, q1=1, q3=1),
    step("n/m=2", "pro-klshampoo", 3, ratio=2, q1=2, q3=4, **PRO),
    step("n/m=16", "pro-klshampoo", 3, ratio=1.25, q1=2, q3=4, **PRO),
    step("n/m=16", "pro-klshampoo", 0.07, **PRO) | {"metric": AGAINST, "unit": "1"},
]


@pytest.fixture
def frame(tmp_path):
    def of(given, name="step-cpu.csv"):
        rows.write(tmp_path / name, given)
        return rows.frame(tmp_path / name)

    return of


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


def test_every_optimizer_has_a_line_and_whoever_has_no_figure_a_reason(frame):
    table = timing.steps(frame(STEPS))
    assert [line[:3] for line in cells(table)] == [
        ["Muon", "10.0 (1.00)", "-"],
        ["Pro-KLShampoo, r = 8", "15.5 (1.54)", "31.0 (1.20)"],
        ["Pro-KLShampoo, r = 8, weight by weight", "30.0 (3.00)", "-"],
        ["Pro-KLShampoo, r = 8, without CUDA graphs", "20.0 (2.00)", "-"],
        ["Muon, Newton–Schulz in bfloat16", "99.0 (1.00)", "-"],
        ["Pro-KLShampoo, r = 8, Newton–Schulz in bfloat16", "98.0 (0.99)", "-"],
        ["heavyball.KLShampoo", "70.0 (7.00)", "-"],
    ]
    reasons = [f"- emerging on {SMALL[0]}: needs Python 3.12.", f"- heavyball.KLShampoo on {SMALL[1]}: too slow."]
    assert table.splitlines()[-2:] == reasons


def test_floors_are_those_of_the_usual_newton_schulz(frame):
    found = [line[:2] for line in cells(timing.floors(frame(STEPS)))]
    assert found == [["Muon", "4.0 (2.5)"], ["Pro-KLShampoo, r = 8", "5.0 (3.1)"]]


def test_aspects_are_in_the_order_of_numbers(frame):
    head, _, over_muon, over_kl, _ = timing.aspects(frame(STEPS)).splitlines()
    assert [cell.strip() for cell in head.split("|")[2:4]] == ["n/m=2", "n/m=16"]
    assert [cell.strip() for cell in over_muon.split("|")[2:4]] == ["2.00", "1.25"]
    assert [cell.strip() for cell in over_kl.split("|")[2:4]] == ["-", "0.07"]


def test_primitives_stand_beside_the_plain_form_and_memory_is_in_megabytes(frame, tmp_path, capsys):
    def time(case, optimizer, median, backend="torch"):
        given = {"case": case, "optimizer": optimizer, "backend": backend, "median": median, "note": ""}
        return given | {"metric": "time", "unit": "ms", "shapes": "2x3x4"}

    micro = [time("g", "plain", 4.0, ""), time("g", "pro-klshampoo", 2.0), time("g", "kl-shampoo", 40.0)]
    micro += [time("h", "plain", 4.0, ""), time("h", "pro-klshampoo", None)]
    found = frame(micro, "micro-cpu.csv")
    assert cells(timing.primitives(found)) == [
        ["g", "4.00", "2.00 (0.50)", "40.00 (10.00)"],
        ["h", "4.00", "-", "-"],
    ]
    assert cells(timing.primitives(found, ["9x9x9"])) == []
    memory = {"model": "tiny/4", "optimizer": "pro-klshampoo", "backend": "torch", "rank": 32, "metric": "state"}
    memory |= {"unit": "bytes", "dtype": "float32"}
    given = [memory | {"median": 2_500_001}, memory | {"median": 7, "unit": "elements"}]
    given += [memory | {"median": 1, "dtype": "bfloat16"}, memory | {"median": 9e6, "metric": "workspace"}]
    table = timing.memory(frame(given, "memory.csv"), "state", ["tiny/4", "other"])
    assert cells(table) == [["Pro-KLShampoo, r = 32", "3", "-"]]
    timing.plot_aspects(frame(STEPS), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert tables.main(["--show", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("4.00", "10.0 (1.00)", "n/m=16", "workspace, MB"))
