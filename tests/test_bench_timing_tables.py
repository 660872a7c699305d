"""Tables of steps: what the recorded rows have no case of. ``bench.tables --check`` holds all others."""

from bench import rows, tables
from bench.shapes import SMALL
from bench.timing import tables as timing
from bench.timing.entries import EAGER

PRO = {"backend": "torch", "rank": 8}
HALF = {"dtype": "float32, Newton-Schulz bfloat16"}


def step(model, optimizer, median=None, **values):
    given = {"model": model, "optimizer": optimizer, "metric": "step", "unit": "ms", "median": median}
    empty = dict.fromkeys(("case", "backend", "rank", "q1", "q3", "ratio", "floor", "note"), "")
    return empty | given | {"dtype": "float32"} | values


def test_every_optimizer_has_a_line_and_whoever_has_no_figure_a_reason(tmp_path, capsys):
    given = [
        step(SMALL[0], "muon", 10.04, ratio=1, floor=4),
        step(SMALL[0], "pro-klshampoo", 15.5, ratio=1.544, floor=5, **PRO),
        step(SMALL[1], "pro-klshampoo", 31, ratio=1.2, **PRO),
        step(SMALL[0], "pro-klshampoo", 30, ratio=3, rank=8, backend="reference"),
        step(SMALL[0], "pro-klshampoo", 20, ratio=2, note=EAGER, **PRO),
        step(SMALL[0], "muon", 99, ratio=1, floor=9, **HALF),
        step(SMALL[0], "emerging", note="needs Python 3.12"),
        step("n/m=2", "muon", 1, ratio=1, q1=1, q3=1),
        step("n/m=2", "pro-klshampoo", 3, ratio=2, q1=2, q3=4, **PRO),
    ]
    rows.write(tmp_path / "step-cpu.csv", given)
    assert tables.main(["--show", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in said if line[:1] == "|"]
    assert [line[:3] for line in cells[2:7]] == [
        ["Muon", "10.0 (1.00)", "-"],
        ["Pro-KLShampoo, r = 8", "15.5 (1.54)", "31.0 (1.20)"],
        ["Pro-KLShampoo, r = 8, weight by weight", "30.0 (3.00)", "-"],
        ["Pro-KLShampoo, r = 8, without CUDA graphs", "20.0 (2.00)", "-"],
        ["Muon, Newton–Schulz in bfloat16", "99.0 (1.00)", "-"],
    ]
    assert f"- emerging on {SMALL[0]}: needs Python 3.12." in said
    assert ["Pro-KLShampoo over Muon", "2.00"] in cells
    timing.plot_aspects(rows.frame(tmp_path / "step-cpu.csv"), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
