"""Trains all of the micro experiment twice, for torchrun: ``tests/ddp_run.py TEXT FOLDER``.

FOLDER/whole is of a run to its end, FOLDER/halves of one that the last process alone was asked to stop.
"""

import signal
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch

from bench.study import units
from bench.study.units import Place
from bench.training.processes import join, leave
from bench.training.run import Run
from tests.experiments import MICRO, task


def main() -> None:
    text, folder = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    processes, device = join("cpu")
    assert device == "cpu"
    place = Place(MICRO, text, processes=processes)
    units.run(task(folder / "whole"), place)
    halves, advance = task(folder / "halves"), Run.advance

    def interrupted(run: Run) -> None:
        advance(run)
        if not processes.first and run.done == 11:  # beyond the refresh of the eigenbases
            signal.raise_signal(signal.SIGINT)

    with suppress(KeyboardInterrupt), mock.patch.object(Run, "advance", interrupted):
        units.run(halves, place)
        raise AssertionError("not stopped")
    if processes.first:
        assert len(list(halves.folder.iterdir())) == 1  # the checkpoint
    units.run(halves, place)
    leave()


if __name__ == "__main__":
    main()
