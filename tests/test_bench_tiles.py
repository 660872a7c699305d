"""The benchmark of other tiles: that each row is of the tile that it names, and what is said of one that fails."""

import itertools
import re
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from bench.shapes import ParameterSet
from bench.timing import tiles
from prokl.kernels import launch

SMALL = ParameterSet("small", ((2, 32, 48), (1, 48, 32)), (4, 16))  # one oriented shape
CPU = torch.device("cpu")


def test_every_row_is_of_the_tile_that_it_names():
    launched = []

    def start(kernel, grid, device, *arguments, **constants):
        sides = {value for name, value in constants.items() if name.startswith("TILE")}
        launched.append((sides, constants["num_warps"], constants["num_stages"]))

    def timer(run, device, seconds):
        launched.clear()
        run()
        seen.append([*launched])
        return [1e-3]

    seen: list[list[tuple[set[int], int, int]]] = []
    with patch.multiple(launch, start=start, DEVICES=(*launch.DEVICES, "cpu")):
        found = list(tiles.measure(SMALL, CPU, 1.0, timer))
    assert len(found) == sum(1 + len(tried) for tried in tiles.TRIED.values())
    assert [row["kernel"] for row in found if row["value"] == "its own"] == [*tiles.TRIED]
    assert {(row["median"], row["ratio"], row["shapes"]) for row in found} == {(1.0, 1.0, "3x32x48")}
    for row, of_launches in zip(found, seen, strict=True):
        if row["value"] != "its own":
            *sides, warps, stages = map(int, re.findall(r"\d+", row["value"]))
            assert ({*sides}, warps, stages) in of_launches, row


def test_a_tile_that_does_not_fit_gets_a_row_that_says_why():
    def timer(run, device, seconds):
        if next(calls):
            raise RuntimeError("out of resource: shared memory\nmore")
        return [1e-3]

    calls = iter([0, 1, 1])
    own, *others = itertools.islice(tiles.measure(SMALL, CPU, 1.0, timer), 3)
    assert own["ratio"] == 1.0
    assert all(row["note"] == "RuntimeError: out of resource: shared memory" and "median" not in row for row in others)
    calls = iter([1])
    with pytest.raises(RuntimeError, match="shared memory"):  # of its own: the others would have no ratio
        next(tiles.measure(SMALL, CPU, 1.0, timer))
