"""The README's tables of steps: every row that has a figure, and why the others have none."""

from bench import records
from bench.shapes import SMALL
from bench.steps import report as step_report


def row(set_, contender, **values):
    return dict.fromkeys(records.COLUMNS, "") | {"set": set_, "contender": contender, "metric": "step", **values}


SINGLE, HALF = {"dtype": "float32"}, {"dtype": "float32, Newton-Schulz bfloat16"}
ROWS = [
    row(SMALL[0], "muon", median="10.04", ratio="1", floor="4", **SINGLE),
    row(SMALL[0], "pro-klshampoo", backend="torch", rank="8", median="15.5", ratio="1.544", floor="5", **SINGLE),
    row(SMALL[1], "pro-klshampoo", backend="torch", rank="8", median="31", ratio="1.2", **SINGLE),
    row(SMALL[0], "pro-klshampoo", backend="reference", rank="8", median="30", ratio="3", **SINGLE),
    row(SMALL[0], "muon", median="99", ratio="1", floor="9", **HALF),
    row(SMALL[0], "pro-klshampoo", backend="torch", rank="8", median="98", ratio="0.99", floor="9", **HALF),
    row(SMALL[0], "heavyball.KLShampoo", median="70", ratio="7", **SINGLE),
    row(SMALL[0], "emerging", note="needs Python 3.12", **SINGLE),
    row(SMALL[1], "heavyball.KLShampoo", note="too slow", **SINGLE),
    row("n", "muon", median="0.5", note="n from 1 to 9", **SINGLE) | {"metric": "exponent of n"},
    row("n", "muon", median="1", note="n from 1 to 9", **SINGLE) | {"metric": "exponent of n, paper's count"},
    row("n", "klshampoo", backend="reference", median="2", note="", **SINGLE) | {"metric": "exponent of n"},
    row("n/m=2", "pro-klshampoo", backend="torch", median="3", ratio="2", **SINGLE),
    row("n/m=16", "pro-klshampoo", backend="torch", median="3", ratio="1.25", **SINGLE),
    row("n/m=16", "pro-klshampoo", backend="torch", **SINGLE)
    | {"metric": "step over klshampoo reference", "median": "0.07"},
]


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


def test_every_contender_has_a_line_and_whoever_has_no_figure_a_reason():
    table = step_report.steps(ROWS)
    assert [line[:3] for line in cells(table)] == [
        ["Muon", "10.0 (1.00)", "-"],
        ["Pro-KLShampoo, r = 8", "15.5 (1.54)", "31.0 (1.20)"],
        ["Pro-KLShampoo, r = 8, weight by weight", "30.0 (3.00)", "-"],
        ["Muon, Newton–Schulz in bfloat16", "99.0 (1.00)", "-"],
        ["Pro-KLShampoo, r = 8, Newton–Schulz in bfloat16", "98.0 (0.99)", "-"],
        ["heavyball.KLShampoo", "70.0 (7.00)", "-"],
    ]
    reasons = [f"- emerging on {SMALL[0]}: needs Python 3.12.", f"- heavyball.KLShampoo on {SMALL[1]}: too slow."]
    assert table.splitlines()[-2:] == reasons


def test_floors_are_those_of_the_usual_newton_schulz():
    assert [line[:2] for line in cells(step_report.floors(ROWS))] == [
        ["Muon", "4.0 (2.5)"],
        ["Pro-KLShampoo, r = 8", "5.0 (3.1)"],
    ]


def test_measured_exponents_stand_beside_the_papers():
    assert cells(step_report.growth(ROWS)) == [
        ["n", "Muon", "n from 1 to 9", "0.50", "1.00"],
        ["n", "KL-Shampoo, weight by weight", "", "2.00", "-"],
    ]


def test_aspects_are_in_the_order_of_numbers():
    head, _, over_muon, over_kl, _ = step_report.aspects(ROWS).splitlines()
    assert [cell.strip() for cell in head.split("|")[2:4]] == ["n/m=2", "n/m=16"]
    assert [cell.strip() for cell in over_muon.split("|")[2:4]] == ["2.00", "1.25"]
    assert [cell.strip() for cell in over_kl.split("|")[2:4]] == ["-", "0.07"]


def test_the_plot_is_drawn(tmp_path):
    step_report.plot(tmp_path / "steps.png", ROWS)
    assert (tmp_path / "steps.png").stat().st_size > 1000
