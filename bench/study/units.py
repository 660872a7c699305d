"""The units of an experiment: one optimizer on one seed, each with a file of its own.

What trains side by side shares whatever else the machine does, so that times can be compared: it trains again, all of
it, where one is missing or was trained beside others.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import prokl
from bench import rows
from bench.optimizers import Hyper
from bench.study.scales import Scale
from bench.training import checkpoint
from bench.training.loop import train
from bench.training.processes import ALONE, Processes
from bench.training.run import Record, Run, Settings


@dataclass(frozen=True)
class Task:
    """Optimizers that one process trains side by side, on one seed."""

    folder: Path  # of the results
    settings: Settings  # of them all
    seed: int


@dataclass(frozen=True)
class Result:
    """The result of a unit."""

    record: Record  # what it did
    peak_bytes: int  # of memory on the GPU, with nothing else trained in the process; 0 otherwise
    environment: dict[str, str]  # where and with what it ran
    together: str  # digest of all that trained side by side with it


@dataclass
class Place:
    """Where tasks of one scale run, and on what."""

    scale: Scale
    data: Path | None  # None is the standard library's source
    checkpoint_seconds: float = 120.0
    processes: Processes = ALONE  # that run a task together

    def __post_init__(self) -> None:
        self.source = self.scale.open(self.data)

    def __reduce__(self) -> tuple[type["Place"], tuple[Any, ...]]:
        return Place, (self.scale, self.data, self.checkpoint_seconds)  # in another process data is opened there

    @property
    def origin(self) -> rows.Row:
        """What is trained on, as rows say it."""
        return {"data": self.source.name, "data_sha256": self.source.sha256}

    def call(self, task: Task) -> Callable[[], dict[str, Result]]:
        """Return what a process of its own calls for a task."""
        return partial(_run_alone, task, self)


def _run_alone(task: Task, place: Place) -> dict[str, Result]:
    # With two threads sums have another order, and losses differ from the first steps on by rounding.
    torch.set_num_threads(1)
    return run(task, place)


def fingerprint(task: Task, hyper: Hyper, place: Place) -> dict[str, Any]:
    """Return what decides a unit's losses: of the device its type, so that it is the same in all processes of a run."""
    versions = {"torch": str(torch.__version__), "prokl": prokl.__version__}
    data = {"seed": task.seed, "data": place.source.sha256, "processes": place.processes.count}
    device = {"device": torch.device(task.settings.device).type}
    return asdict(hyper) | task.settings.plan() | device | data | versions


def path_of(task: Task, hyper: Hyper, place: Place) -> Path:
    """Return the unit's file."""
    return task.folder / f"{hyper.method}-{_digest(fingerprint(task, hyper, place))}.pt"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read(task: Task, hyper: Hyper, place: Place) -> Result:
    """Return the result of a unit that was trained."""
    content = checkpoint.load(path_of(task, hyper, place), fingerprint(task, hyper, place))
    return Result(**content | {"record": Record.of(content["record"])})


def run(task: Task, place: Place) -> dict[str, Result]:
    """Train unless it was done; return the results of all by key.

    Raises:
        KeyboardInterrupt: it was asked to stop, and has left a checkpoint.
    """
    if not place.processes.from_first(lambda: _done(task, place)):
        _train(task, place)
    every = task.settings.hyper
    return place.processes.from_first(lambda: {key: read(task, hyper, place) for key, hyper in every.items()})


def _done(task: Task, place: Place) -> bool:
    """Return whether all have trained together."""
    every, together = task.settings.hyper.values(), _together(task, place)
    files = all(path_of(task, hyper, place).exists() for hyper in every)
    return files and all(read(task, hyper, place).together == together for hyper in every)


def _together(task: Task, place: Place) -> str:
    return _digest([fingerprint(task, hyper, place) for hyper in task.settings.hyper.values()])


def _train(task: Task, place: Place) -> None:
    """Train everything in the task, write the results and say so."""
    cuda = task.settings.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    training = Run(task.settings, task.seed, place.source, place.processes)
    together = _together(task, place)
    made_of = {key: fingerprint(task, hyper, place) for key, hyper in task.settings.hyper.items()}
    whole = {f"{name} {key}": value for key, found in made_of.items() for name, value in found.items()}
    unfinished = task.folder / f"unfinished-{together}.pt"
    shown = place.processes.first and multiprocessing.parent_process() is None
    train(training, unfinished, whole, place.checkpoint_seconds, shown)
    if not place.processes.first:
        return
    environment = rows.environment(torch.device(task.settings.device))
    peak = torch.cuda.max_memory_allocated() if cuda and len(task.settings.hyper) == 1 else 0
    for key, record in training.records().items():
        hyper = task.settings.hyper[key]
        checkpoint.save(path_of(task, hyper, place), made_of[key], asdict(Result(record, peak, environment, together)))
        tried = {"r": hyper.rank, "start": hyper.init_eigenvalue, "lr": hyper.lr, "alpha_kl": hyper.alpha_kl}
        given = "".join(f" {name} {value}" for name, value in tried.items() if value is not None)
        of = f"{place.scale.name}, {task.settings.steps} steps, seed {task.seed}"
        print(f"{of}, {key}{given}: {record.final_loss:.4f}", flush=True)
    unfinished.unlink(missing_ok=True)
