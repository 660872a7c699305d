"""The runs of a study: each in a process of its own, and in rows as soon as it has ended, which say what is done."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

import prokl
from bench import rows
from bench.command import at_least, cores
from bench.optimizers import Hyper
from bench.study.scales import open_data
from bench.training.loop import train
from bench.training.run import Record, Run, Scale
from bench.training.sources import Source
from bench.workers import work_off

T = TypeVar("T")
SETTINGS = ("lr", "alpha_kl", "weight_decay", "adamw_lr", "adamw_weight_decay")  # columns of a method's settings


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of what goes on with the recorded rows."""

    out: Path = rows.RESULTS  # Folder of the results files
    folder: Path = Path("runs/study")  # Folder of checkpoints
    jobs: int = cores()  # Runs at a time, each on one thread

    def __post_init__(self) -> None:
        at_least(1, jobs=self.jobs)


def checkpoint(
    folder: Path, name: str, scale: Scale, hypers: Sequence[Hyper], seed: int, source: Source, device: str
) -> Path:
    """Return the file of the checkpoint of runs side by side, another one for all but threads that decides losses."""
    of = {"seed": seed, "data": source.sha256, "device": torch.device(device).type}
    of |= {"torch": str(torch.__version__), "prokl": prokl.__version__}
    text = json.dumps([asdict(scale), [asdict(hyper) for hyper in hypers], of], sort_keys=True)
    digest, name = hashlib.sha256(text.encode()).hexdigest()[:16], re.sub(r"\W+", "-", name)
    return folder / f"{name}-{digest}.pt"


@dataclass(frozen=True)
class Task:
    """One run, as a process of its own calls it."""

    scale: Scale
    data: Path | None  # None is the standard library's source
    name: str  # of its method
    hyper: Hyper
    seed: int  # of weights and batches
    folder: Path  # of its checkpoint
    device: str = "cpu"
    shown: bool = False  # whether a bar says how far it is

    def checkpoint(self, source: Source) -> Path:
        """Return the file of the checkpoint."""
        return checkpoint(self.folder, self.name, self.scale, [self.hyper], self.seed, source, self.device)

    def __call__(self) -> tuple[Record, rows.Row, Path]:
        """Train, from the checkpoint on if there is one; return what was done, where and on what, and the last one."""
        # With two threads sums have another order, and losses differ from the first steps on by rounding.
        torch.set_num_threads(1)
        device, source = torch.device(self.device), open_data(self.scale, self.data)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        run, path = Run(self.scale, self.hyper, self.seed, source, self.device), self.checkpoint(source)
        train([run], path, self.shown)
        of = f"{self.scale.name}, {self.scale.steps} steps, seed {self.seed}"
        print(f"{of}, {self.name}, lr {self.hyper.lr}: {run.record.final_loss:.4f}", flush=True)
        where = source.row | rows.environment(device)
        if device.type == "cuda":
            where["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        return run.record, where, path


def work(
    wanted: Callable[[], Iterable[T]],
    task: Callable[[T], Task],
    done: Callable[[T, Record, rows.Row], object],
    jobs: int,
) -> None:
    """Make the runs that are wanted, ``jobs`` at a time, until none is; ``done`` writes the rows of one of them."""

    def ended(unit: T, found: tuple[Record, rows.Row, Path]) -> None:
        record, where, checkpoint = found
        done(unit, record, where)
        checkpoint.unlink(missing_ok=True)

    work_off(wanted, lambda unit: replace(task(unit), shown=jobs == 1), ended, jobs)


def of_scale(scale: Scale, vocabulary: int, device: str) -> rows.Row:
    """Return what a run was made of, as rows say it: the model has the vocabulary of its data."""
    own = ("steps", "eval_windows", "batch", "micro_batch", "state_dtype")
    row = asdict(scale.config) | {name: getattr(scale, name) for name in own}
    return row | {"vocabulary": vocabulary, "autocast": scale.autocast and device == "cuda"}


def figures(record: Record) -> rows.Row:
    """Return the loss, the costs of a step, of the optimizer's without the first, which initialises, and the state."""
    steps = len(record.losses)
    own = {"validation_loss": record.final_loss, "state_mb": record.state_bytes / 1e6}
    own["model_ms"] = 1e3 * sum(record.model_seconds) / steps if steps else None
    own["optimizer_ms"] = 1e3 * sum(record.optimizer_seconds[1:]) / (steps - 1) if steps > 1 else None
    return own | {"diverged_at": record.diverged_at}


def curve(record: Record) -> list[rows.Row]:
    """Return validation loss and seconds of training by step."""
    own = record.validation
    return [{"step": step, "validation_loss": loss, "seconds": record.seconds(step)} for step, loss in own]


def keep(path: Path, curves: Path, row: rows.Row, along: Sequence[rows.Row], key: Sequence[str]) -> None:
    """Put the row of a run and those of its curve into their files."""
    own = {name: row.get(name) for name in key}
    rows.upsert(curves, [own | point for point in along], key)
    rows.upsert(path, [row], key)  # last: this says that the run is done
