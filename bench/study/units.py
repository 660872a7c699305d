"""The units of an experiment: one optimizer on one seed, each with a file of its own that no later run repeats."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import prokl
from bench import rows
from bench.optimizers import Hyper
from bench.training import checkpoint
from bench.training.loop import train
from bench.training.processes import ALONE, Processes
from bench.training.run import Record, Run, Watch, nothing
from bench.training.settings import Settings
from bench.training.sources import Source


@dataclass(frozen=True)
class Task:
    """Optimizers that one process trains side by side, on one seed."""

    folder: Path  # of the results, so that a sweep's units, which may share a machine, are not those that are timed
    settings: Settings  # of them all
    seed: int
    # whether their times are compared, so that results count only of those that trained together: where one
    # is missing, or was trained beside others, all train
    timed: bool = False
    watch: Watch = nothing  # what is collected along the run


@dataclass(frozen=True)
class Result:
    """The result of a unit."""

    record: Record  # what it did
    peak_bytes: int  # of memory on the GPU, with nothing else trained in the process; 0 otherwise
    environment: dict[str, str]  # where and with what it ran
    together: str  # digest of all that trained side by side with it


@dataclass(frozen=True)
class Place:
    """The circumstances under which tasks run."""

    source: Source  # what they train on
    stop: Callable[[], bool]  # asked after every step
    checkpoint_seconds: float  # between two checkpoints
    processes: Processes = ALONE  # that run them together
    shown: bool = False  # whether to show how far a run is


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
    return Result(**content | {"record": Record(**content["record"])})


def run(task: Task, place: Place) -> dict[str, Result] | None:
    """Train what has no result yet; return the results of all by key, or None if it was stopped."""
    missing = place.processes.from_first(_missing(task, place) if place.processes.first else None)
    hyper = {key: task.settings.hyper[key] for key in missing}
    if hyper and not _train(replace(task, settings=replace(task.settings, hyper=hyper)), place):
        return None
    wanted = task.settings.hyper if place.processes.first else {}
    return place.processes.from_first({key: read(task, hyper, place) for key, hyper in wanted.items()})


def _missing(task: Task, place: Place) -> list[str]:
    """Return the keys of those that have to train."""
    missing = [key for key, hyper in task.settings.hyper.items() if not path_of(task, hyper, place).exists()]
    if not task.timed:
        return missing
    together = _together(task, place)
    whole = not missing and all(read(task, h, place).together == together for h in task.settings.hyper.values())
    return [] if whole else list(task.settings.hyper)


def _together(task: Task, place: Place) -> str:
    return _digest([fingerprint(task, hyper, place) for hyper in task.settings.hyper.values()])


def _train(task: Task, place: Place) -> bool:
    """Train everything in the task and write the results; return False if it was stopped."""
    cuda = task.settings.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    training = Run(task.settings, task.seed, place.source, place.processes, task.watch)
    task.folder.mkdir(parents=True, exist_ok=True)
    together = _together(task, place)
    made_of = {key: fingerprint(task, hyper, place) for key, hyper in task.settings.hyper.items()}
    whole = {f"{name} {key}": value for key, found in made_of.items() for name, value in found.items()}
    unfinished = task.folder / f"unfinished-{together}.pt"
    if unfinished.exists():
        training.load_state_dict(checkpoint.load(unfinished, whole))
    train(training, unfinished, whole, place.stop, place.checkpoint_seconds, place.shown and place.processes.first)
    if not training.finished:
        return False
    if place.processes.first:
        environment = rows.environment(torch.device(task.settings.device))
        peak = torch.cuda.max_memory_allocated() if cuda and len(task.settings.hyper) == 1 else 0
        for key, record in training.records().items():
            result = asdict(Result(record, peak, environment, together))
            checkpoint.save(path_of(task, task.settings.hyper[key], place), made_of[key], result)
        unfinished.unlink()
    return True
