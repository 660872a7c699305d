"""Tables of steps: what the recorded rows have no case of. ``bench.tables --check`` holds all others."""

from bench import rows, tables
from bench.shapes import PAPER, SMALL
from bench.timing.entries import EAGER

PRO = {"backend": "torch", "rank": 8}
HALF = {"dtype": "float32, Newton-Schulz bfloat16"}


def step(model, optimizer, median=None, **values):
    given = {"model": model, "optimizer": optimizer, "metric": "step", "unit": "ms", "median": median}
    empty = dict.fromkeys(("case", "backend", "rank", "q1", "q3", "ratio", "floor", "note"), "")
    return empty | given | {"dtype": "float32"} | values


def test_every_optimizer_that_ran_has_a_line(tmp_path, capsys):
    given = [
        step(SMALL[0], "muon", 10.04, ratio=1, floor=4),
        step(SMALL[0], "pro-klshampoo", 15.5, ratio=1.544, floor=5, **PRO),
        step(SMALL[1], "pro-klshampoo", 31, ratio=1.2, **PRO),
        step(SMALL[0], "pro-klshampoo", 30, ratio=3, rank=8, backend="reference"),
        step(SMALL[0], "pro-klshampoo", 20, ratio=2, note=EAGER, **PRO),
        step(SMALL[0], "muon", 99, ratio=1, floor=9, **HALF),
        step(SMALL[0], "emerging", note="needs Python 3.12"),
    ]
    rows.write(tmp_path / "rows.csv", given)
    assert tables.main(["--steps", str(tmp_path / "rows.csv")]) == 0
    said = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in said if line[:1] == "|"]
    assert [line[:3] for line in cells[2:7]] == [
        ["Muon", "10.0 (1.00)", "-"],
        ["Pro-KLShampoo, r = 8", "15.5 (1.54)", "31.0 (1.20)"],
        ["Pro-KLShampoo, r = 8, weight by weight", "30.0 (3.00)", "-"],
        ["Pro-KLShampoo, r = 8, without CUDA graphs", "20.0 (2.00)", "-"],
        ["Muon, Newton–Schulz in bfloat16", "99.0 (1.00)", "-"],
    ]


def test_rows_of_a_gpu_have_the_papers_own_sets_and_muon_may_have_failed(tmp_path, capsys):
    rows.write(
        tmp_path / "rows.csv", [step(PAPER[1], "pro-klshampoo", 31, **PRO), step(PAPER[0], "muon", note="no memory")]
    )
    assert tables.main(["--steps", str(tmp_path / "rows.csv")]) == 0
    head, _, line = [x for x in capsys.readouterr().out.splitlines() if x[:1] == "|"]
    assert PAPER[1] in head and PAPER[0] not in head and SMALL[1] not in head and "31.0 (-)" in line


def test_a_file_without_timed_steps_is_named(tmp_path, capsys):
    rows.write(tmp_path / "rows.csv", [step(SMALL[0], "muon", note="no memory")])
    for path in (tmp_path / "rows.csv", tmp_path / "none.csv"):
        assert tables.main(["--steps", str(path)]) == 2
        assert f"--steps {path} has no timed step" in capsys.readouterr().err
