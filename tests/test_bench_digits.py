"""The task of digits: its images, its training, its table."""

import pytest
import torch
from pandas import DataFrame

from bench import digits
from bench.lengths.protocol import FORMS
from bench.rows import read

pytest.importorskip("sklearn", reason="the digits are scikit-learn's")


def test_images_move_by_at_most_a_pixel_and_background_comes_in():
    images = torch.zeros(200, 8, 8)
    images[:, 3, 5] = 1.0
    moved = digits.shifted(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape and torch.equal(moved.sum((1, 2)), torch.ones(200))
    places = {tuple(at[1:].tolist()) for at in moved.nonzero()}
    assert places == {(row, column) for row in (2, 3, 4) for column in (4, 5, 6)}


def test_patches_are_squares_of_the_image():
    model, image = digits.Model(), torch.arange(64.0).reshape(1, 8, 8)
    seen = []
    model.patches.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(image)
    assert seen[0].shape == (1, 16, 4) and seen[0][0, 1].tolist() == [2, 3, 10, 11]


OF_OTHER_PACKAGES = ("soap", "normuon", "muon-polar-express", "adamw-cautious")


@pytest.mark.parametrize("form", [form for form in FORMS if form not in OF_OTHER_PACKAGES])
def test_every_optimizer_learns_the_same_again(form):
    lr = FORMS[form].default.lr
    begun = digits.trained(form, lr, 0, 1)
    loss, errors = digits.trained(form, lr, 0, 30)
    assert loss < begun[0] and errors < 0.9
    assert digits.trained(form, lr, 0, 30) == (loss, errors)


def test_what_the_file_has_is_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "trained", lambda form, lr, seed, steps: (lr, 0.5))
    arguments = [f"--out={tmp_path / 'rows.csv'}", "--forms", "muon", "adamw", "--seeds", "0", "1"]
    assert digits.main(arguments) == 0
    found = read(tmp_path / "rows.csv")
    assert len(found) == 2 * 2 * 2 * len(digits.FACTORS)
    assert {row["median"] for row in found if row["optimizer"] == "muon" and row["factor"] == "0.5"} == {"0.01", "0.5"}
    with monkeypatch.context() as within:
        within.setattr(digits, "trained", lambda *_: pytest.fail("trained again"))
        assert digits.main(arguments) == 0 and read(tmp_path / "rows.csv") == found
    assert digits.main([*arguments, "--steps", "7"]) == 0  # other runs, which replace none
    assert read(tmp_path / "rows.csv")[: len(found)] == found and len(read(tmp_path / "rows.csv")) == 2 * len(found)


def test_the_table_pairs_the_default_with_the_best_over_the_seeds_with_every_rate():
    unfinished = {"seed": 2, "factor": "1", "metric": "test loss", "median": 9.0}
    rows = [{"optimizer": "muon"} | unfinished, {"optimizer": "adamw"} | unfinished] + [
        {"optimizer": "muon", "seed": seed, "factor": f"{factor:g}", "metric": metric, "median": value}
        for seed, offset in ((0, 0.0), (1, 0.5))
        for factor in digits.FACTORS
        for metric, value in (("test loss", offset + abs(factor - 2)), ("test errors", 0.01))
    ]
    (line,) = digits.losses_table(DataFrame(rows).assign(steps=digits.STEPS)).splitlines()[2:]
    assert line.split("|")[1].strip() == "Muon"
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [
        "2.000",
        "1.750",
        "1.250",
        "0.250",
        "2.250",
        "1.000 ± 0.000",
        "1.0 ± 0.0",
        "2",
    ]
