"""The task of digits: its images, its training, its table."""

import pytest
import torch
from pandas import DataFrame

from bench import digits

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


@pytest.mark.parametrize("method", digits.DEFAULTS)
def test_every_optimizer_learns_the_same_again(method):
    begun = digits.trained(method, digits.DEFAULTS[method], 0, 1)
    loss, errors = digits.trained(method, digits.DEFAULTS[method], 0, 30)
    assert loss < begun[0] and errors < 0.9
    assert digits.trained(method, digits.DEFAULTS[method], 0, 30) == (loss, errors)


def test_the_table_pairs_the_default_with_the_best_by_seed():
    rows = [
        {"optimizer": "muon", "seed": seed, "factor": f"{factor:g}", "metric": metric, "median": value}
        for seed, offset in ((0, 0.0), (1, 0.5))
        for factor in digits.FACTORS
        for metric, value in (("test loss", offset + abs(factor - 2)), ("test errors", 0.01))
    ]
    line = digits.losses_table(DataFrame(rows)).splitlines()[2]
    assert line.split("|")[1].strip() == "Muon"
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [
        "2.000",
        "1.750",
        "1.250",
        "0.250",
        "2.250",
        "1.000 ± 0.000",
        "1.0 ± 0.0",
    ]
