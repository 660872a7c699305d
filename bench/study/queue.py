"""Runs that a policy asks for, one a process, until it asks for no more: one trainer, one pool, one way to go on.

A policy is asked again whenever a run has ended, with what is known by then. A run's rows are written when it ends and
what has rows is not trained again; one that was stopped goes on from its checkpoint. Every run has one thread: with
two, sums have another order, and losses differ from the first steps on by rounding.
"""

import re
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from bench import command, rows
from bench.optimizers import Hyper
from bench.study import units
from bench.study.scales import Scale
from bench.workers import asked_to_stop, one_run_each

CHECKPOINT_SECONDS = 120.0
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One run: what trains, under which name, for how many steps and with how many evaluations."""

    scale: Scale
    name: str
    hyper: Hyper
    seed: int
    steps: int
    evaluations: int


class Policy(Protocol[T]):
    """What is to be trained."""

    def wanted(self) -> Iterator[T]:
        """Yield what can be trained now and has no row yet, the most urgent first."""
        ...

    def job(self, unit: T) -> Job:
        """Return how a unit is trained."""
        ...

    def done(self, unit: T, result: units.Result, data: rows.Row) -> str:
        """Write the rows of a unit that has ended; return a line that says so."""
        ...


def train(job: Job, folder: Path) -> tuple[units.Result, rows.Row]:
    """Train on one thread, from the last checkpoint if there is one; return the result, and what it was trained on."""
    torch.set_num_threads(1)
    source = job.scale.open(None)
    settings = job.scale.settings({job.name: job.hyper}, source.vocabulary, "cpu", curve=True)
    settings = replace(settings, steps=job.steps, eval_every=max(1, job.steps // job.evaluations))
    task = units.Task(folder / re.sub(r"\W+", "-", job.name), settings, job.seed)
    found = units.run(task, units.Place(source, asked_to_stop(), CHECKPOINT_SECONDS))
    if found is None:
        raise KeyboardInterrupt
    return found[job.name], {"data": source.name, "data_sha256": source.sha256}


def work_off(policy: Policy[T], folder: Path, jobs: int) -> None:
    """Train what is wanted, ``jobs`` runs at a time, until nothing is."""
    busy: dict[Future[tuple[units.Result, rows.Row]], T] = {}
    with one_run_each(jobs) as pool:
        while True:
            for unit in policy.wanted():
                if len(busy) == jobs:
                    break
                if unit not in busy.values():
                    busy[pool.submit(train, policy.job(unit), folder)] = unit
            if not busy:
                return
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                print(policy.done(busy.pop(future), *future.result()), flush=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every study that is worked off."""

    out: Path = rows.RESULTS  # Folder of the results files
    folder: Path = Path("runs/study")  # Of checkpoints and of what has ended
    jobs: int = command.cores()  # Runs at a time, each on one thread

    def __post_init__(self) -> None:
        command.at_least(1, jobs=self.jobs)
