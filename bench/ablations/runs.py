"""One unit, in whatever process: a module that such a process can import, as it cannot a package's ``__main__``."""

import torch

from bench import rows
from bench.ablations.studies import STUDIES
from bench.ablations.study import Unit


def measure(unit: Unit) -> list[rows.Row]:
    """Run a unit on one thread; return its rows with where that was."""
    torch.set_num_threads(1)
    found = STUDIES[unit.study].rows(unit)
    return [row | rows.environment(torch.device("cpu")) for row in found]
