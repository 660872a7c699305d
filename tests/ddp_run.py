"""Trains all of the micro experiment twice, for torchrun: ``tests/ddp_run.py TEXT FOLDER``.

FOLDER/whole is of a run to its end, FOLDER/halves of one that the last process alone was asked to stop.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench.study import units
from bench.study.units import Place
from bench.training.processes import join, leave
from tests.experiments import MICRO, task


def main() -> None:
    text, folder = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    processes, device = join("cpu")
    assert device == "cpu"
    place = Place(MICRO.open(text), lambda: False, 60.0, processes)
    assert units.run(task(folder / "whole"), place) is not None
    asked = []

    def stop() -> bool:
        asked.append(True)
        return not processes.first and len(asked) > 11  # beyond the refresh of the eigenbases

    halves = task(folder / "halves")
    assert units.run(halves, replace(place, stop=stop)) is None
    assert len(asked) == 12
    if processes.first:
        assert len(list(halves.folder.iterdir())) == 1  # the checkpoint
    assert units.run(halves, place) is not None
    leave()


if __name__ == "__main__":
    main()
