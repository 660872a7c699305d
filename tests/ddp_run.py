"""Trains a few contenders of the micro experiment, for torchrun: ``tests/ddp_run.py TEXT FOLDER``."""

import sys
from pathlib import Path

import torch

from bench.experiments import units
from bench.experiments.units import Place
from bench.processes import join, leave
from tests.experiments import MICRO, task


def main() -> None:
    text, folder = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    processes, device = join("cpu")
    assert device == "cpu"
    units.run(task(folder), Place(MICRO.open(text), lambda: False, 60.0, processes))
    leave()


if __name__ == "__main__":
    main()
