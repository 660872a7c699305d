"""Every task for every peer: ``python -m bench.tasks [--checkout NAME=DIR ...] [--out bench/results/tasks.csv]``.

On one thread of a CPU, seeded, every task in a process of its own; nothing here is timed.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from bench import rows
from bench.command import UsageError, command, options, some
from bench.steps.peers import CannotRun
from bench.tasks import TASKS
from bench.tasks.guard import Broken, guarded
from bench.tasks.peers import CONTENDERS, Contender, Peer
from bench.tasks.problem import Failed

CPU, SECONDS = 120, 1200
"""Longest that a task may take of a core, and to its end, which other work on the machine puts off; the usual one takes
a second, torch.compile of some peers thirty."""
PEERS = tuple(contender.name for contender in CONTENDERS)
CHECKOUTS = tuple(contender.checkout for contender in CONTENDERS if contender.checkout)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Put every task to every peer that is here; six minutes on one core."""

    peers: tuple[Literal[PEERS], ...] = PEERS  # type: ignore[valid-type]
    """Which; those that are not installed are left out."""
    tasks: tuple[Literal[tuple(TASKS)], ...] = tuple(TASKS)  # type: ignore[valid-type]
    """What."""
    checkout: tuple[str, ...] = ()
    """NAME=DIR: folders with the peers that live in repositories alone: dion (github.com/microsoft/dion), muon
    (github.com/KellerJordan/Muon), soap (github.com/nikhilvyas/SOAP)."""
    out: Path | None = None  # CSV file; its rows of the same peers and tasks are replaced

    def __post_init__(self) -> None:
        some(peers=self.peers, tasks=self.tasks)
        if self.out is not None and self.out.is_dir():
            raise UsageError(f"--out {self.out}: must be a file; name one in it")
        for given in self.checkout:
            name, _, folder = given.partition("=")
            if name not in CHECKOUTS:
                raise UsageError(f"--checkout {given}: must be NAME=DIR with a NAME of {', '.join(CHECKOUTS)}")
            if not Path(folder).is_dir():
                raise UsageError(f"--checkout {given}: there is no folder {folder}; name one")

    @property
    def checkouts(self) -> dict[str, Path]:
        """The folders by name."""
        return {given.partition("=")[0]: Path(given.partition("=")[2]) for given in self.checkout}


def attempt(peer: Peer, task: str) -> tuple[str, str]:
    """Return the outcome of a task, and what happened."""
    try:
        return "yes", guarded(partial(_silently, peer, task), SECONDS, CPU)
    except Failed as failed:
        return "no", str(failed)
    except Broken as broken:
        return "error", str(broken)


def _silently(peer: Peer, task: str) -> str:
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    return TASKS[task](peer)


def measure(contender: Contender, version: str, o: Options) -> list[rows.Row]:
    """Put the tasks to a peer, in a process that is its own; print and return the rows."""
    torch.set_num_threads(1)
    peer = contender.load(o.checkouts)
    here = rows.environment(torch.device("cpu"))
    found = []
    for task in o.tasks:
        outcome, detail = attempt(peer, task)
        print(f"{contender.name}, {task}: {outcome}; {detail}", flush=True)
        found.append({"peer": contender.name, "task": task, "version": version, "outcome": outcome, "detail": detail})
    return [row | here for row in found]


def run(o: Options) -> None:
    """Measure, print and write."""
    if o.out is not None:
        rows.read(o.out)  # now, not after measuring
    for contender in CONTENDERS:
        if contender.name not in o.peers:
            continue
        try:
            version = contender.version(o.checkouts)
            found = guarded(partial(measure, contender, version, o))
        except (CannotRun, Broken) as missing:
            print(f"{contender.name} is left out: {missing}", flush=True)
            continue
        if o.out is not None:
            rows.upsert(o.out, found, key=("peer", "task"))


@command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    run(options(Options, argv, "bench.tasks"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
