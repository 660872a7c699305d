"""The units of an experiment: one contender on one seed, each with a file of its own that no later run repeats."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import prokl
from bench import records
from bench.errors import UsageError
from bench.training import checkpoint
from bench.training.loop import train
from bench.training.processes import ALONE, Processes
from bench.training.run import Record, Run
from bench.training.settings import Hyper, Settings
from bench.training.sources import Source


@dataclass(frozen=True)
class Task:
    """Contenders that one process trains side by side, on one seed.

    Attributes:
        folder: of the results, so that a sweep's units, which may share a machine, are not those that are timed.
        settings: of them all.
        timed: whether their times are compared, so that results of other company do not count: where one is missing,
            or was trained beside others, all train.
    """

    folder: Path
    settings: Settings
    seed: int
    timed: bool = False


@dataclass(frozen=True)
class Result:
    """What a unit gave.

    Attributes:
        record: without spectra.
        peak_bytes: of memory on the GPU, with nothing else trained in the process; 0 otherwise.
        environment: where and with what it ran.
        company: digest of all that was trained beside it.
    """

    record: Record
    peak_bytes: int
    environment: dict[str, str]
    company: str


@dataclass(frozen=True)
class Place:
    """Where tasks run.

    Attributes:
        source: what they train on.
        stop: asked after every step.
        checkpoint_seconds: between two checkpoints.
        processes: that run them together.
    """

    source: Source
    stop: Callable[[], bool]
    checkpoint_seconds: float
    processes: Processes = ALONE


def fingerprint(task: Task, hyper: Hyper, place: Place) -> dict[str, Any]:
    """What decides a unit's losses: of the device its type, so that it is the same in all processes of a run."""
    versions = {"torch": str(torch.__version__), "prokl": prokl.__version__}
    data = {"seed": task.seed, "data": place.source.sha256, "processes": place.processes.count}
    device = {"device": torch.device(task.settings.device).type}
    return asdict(hyper) | task.settings.plan() | device | data | versions


def path_of(task: Task, hyper: Hyper, place: Place) -> Path:
    """The unit's file."""
    return task.folder / f"{hyper.method}-{_digest(fingerprint(task, hyper, place))}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read(path: Path) -> Result:
    """What :func:`write` wrote.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        record = Record(**content["record"])
        record.validation = [(step, loss) for step, loss in record.validation]
        return Result(record, content["peak_bytes"], content["environment"], content["company"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a readable result ({error.__class__.__name__}); remove it") from None


def write(path: Path, result: Result, made_of: dict[str, Any]) -> None:
    """All or nothing."""
    content = asdict(result)
    del content["record"]["spectra"]
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"fingerprint": made_of} | content), encoding="utf-8")
    os.replace(partial, path)


def run(task: Task, place: Place) -> dict[str, Result] | None:
    """Trains what has no result yet; the results of all by key, or None if it was stopped."""
    paths = {key: path_of(task, hyper, place) for key, hyper in task.settings.hyper.items()}
    missing = place.processes.from_first(_missing(task, paths, place) if place.processes.first else None)
    hyper = {key: task.settings.hyper[key] for key in missing}
    if hyper and not _train(replace(task, settings=replace(task.settings, hyper=hyper)), paths, place):
        return None
    results = {key: read(path) for key, path in paths.items()} if place.processes.first else {}
    return place.processes.from_first(results)


def _missing(task: Task, paths: dict[str, Path], place: Place) -> list[str]:
    """Keys of the contenders that have to train."""
    if task.timed:
        company = _company(task, place)
        whole = all(path.exists() and read(path).company == company for path in paths.values())
        return [] if whole else list(paths)
    return [key for key, path in paths.items() if not path.exists()]


def _company(task: Task, place: Place) -> str:
    return _digest([fingerprint(task, hyper, place) for hyper in task.settings.hyper.values()])


def _train(task: Task, paths: dict[str, Path], place: Place) -> bool:
    """Trains the contenders of the task and writes their results; False if it was stopped."""
    cuda = task.settings.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    training = Run(task.settings, task.seed, place.source, place.processes)
    task.folder.mkdir(parents=True, exist_ok=True)
    company = _company(task, place)
    made_of = {key: fingerprint(task, hyper, place) for key, hyper in task.settings.hyper.items()}
    whole = {f"{name} {key}": value for key, found in made_of.items() for name, value in found.items()}
    unfinished = task.folder / f"unfinished-{company}.pt"
    if unfinished.exists():
        training.load_state_dict(checkpoint.load(unfinished, whole))
    train(training, unfinished, whole, place.stop, place.checkpoint_seconds)
    if not training.finished:
        return False
    if place.processes.first:
        environment = records.environment(torch.device(task.settings.device))
        peak = torch.cuda.max_memory_allocated() if cuda and len(task.settings.hyper) == 1 else 0
        for key, record in training.records().items():
            result = Result(replace(record, spectra={}), peak, environment, company)
            write(paths[key], result, made_of[key])
        unfinished.unlink()
    return True
