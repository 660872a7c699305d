"""The README's tables of steps: every row that has a figure, and why the others have none."""

from bench import records, step_report
from bench.shapes import SMALL


def row(set_, contender, **values):
    return dict.fromkeys(records.COLUMNS, "") | {"set": set_, "contender": contender, "metric": "step", **values}


SINGLE, HALF = {"dtype": "float32"}, {"dtype": "float32, Newton-Schulz bfloat16"}
ROWS = [
    row(SMALL[0], "muon", median="10.04", ratio="1", floor="4", **SINGLE),
    row(SMALL[0], "pro-klshampoo", backend="torch", rank="8", median="15.5", ratio="1.544", floor="5", **SINGLE),
    row(SMALL[1], "pro-klshampoo", backend="torch", rank="8", median="31", ratio="1.2", **SINGLE),
    row(SMALL[0], "pro-klshampoo", backend="reference", rank="8", median="30", ratio="3", **SINGLE),
    row(SMALL[0], "muon", median="99", ratio="1", **HALF),
    row(SMALL[0], "pro-klshampoo", backend="torch", rank="8", median="98", ratio="1", **HALF),
    row(SMALL[0], "heavyball.KLShampoo", median="70", ratio="7", **SINGLE),
    row(SMALL[0], "emerging", note="needs Python 3.12", **SINGLE),
    row("n/m=2", "pro-klshampoo", backend="torch", median="3", ratio="2", **SINGLE),
    row("n/m=16", "pro-klshampoo", backend="torch", median="3", ratio="1.25", **SINGLE),
    row("n/m=16", "pro-klshampoo", backend="torch", **SINGLE)
    | {"metric": "step over klshampoo reference", "median": "0.07"},
]


def test_every_contender_has_a_line_and_the_other_newton_schulz_none():
    lines = step_report.steps(ROWS).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:6]]
    assert [line[:3] for line in cells] == [
        ["Muon", "10.0 (1.00)", "-"],
        ["Pro-KLShampoo, r = 8", "15.5 (1.54)", "31.0 (1.20)"],
        ["Pro-KLShampoo, r = 8, weight by weight", "30.0 (3.00)", "-"],
        ["heavyball.KLShampoo", "70.0 (7.00)", "-"],
    ]
    assert lines[-1] == "Not run: emerging: needs Python 3.12."


def test_aspects_are_in_the_order_of_numbers():
    head, _, over_muon, over_kl, _ = step_report.aspects(ROWS).splitlines()
    assert [cell.strip() for cell in head.split("|")[2:4]] == ["n/m=2", "n/m=16"]
    assert [cell.strip() for cell in over_muon.split("|")[2:4]] == ["2.00", "1.25"]
    assert [cell.strip() for cell in over_kl.split("|")[2:4]] == ["-", "0.07"]


def test_the_plot_is_drawn(tmp_path):
    step_report.plot(tmp_path / "steps.png", ROWS)
    assert (tmp_path / "steps.png").stat().st_size > 1000
