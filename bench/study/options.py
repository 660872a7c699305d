"""What the commands that train take; every wrong value ends in one line with the remedy."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from bench import rows
from bench.command import UsageError, at_least, cores, distinct, positive, some
from bench.optimizers import OPTIMIZERS
from bench.study.protocol import ABLATIONS
from bench.study.scales import AUTO, PAPER_START, SCALES, Scale


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of every command that trains."""

    seeds: Annotated[tuple[int, ...], tyro.conf.arg(aliases=("--seed",))] = (0,)
    """One final run for each; sweeps and spectra have the first."""
    lr: tuple[str, ...] = ()  # Learning rates by optimizer, as in muon=0.02 or muon=0.01,0.02
    data: Path | None = None  # Text or token shards; if not given, Python's standard library, as bytes
    out: Path  # Results folder
    steps: int | None = None  # Of every run; what is given from here to --micro-batch stands in place of the scale's
    batch: int | None = None  # Sequences a step
    evaluations: int | None = None  # Of the validation loss, along a run
    eval_windows: int | None = None  # Validation contexts
    micro_batch: int | None = None  # Sequences in one forward pass on one device
    checkpoint_seconds: float = 60.0  # Between checkpoints

    def __post_init__(self) -> None:
        at_least(0, seeds=self.seeds)
        at_least(1, **self.given)
        positive(checkpoint_seconds=self.checkpoint_seconds)
        some(seeds=self.seeds)
        for rates in self.rates.values():
            positive(lr=rates)
            distinct(lr=rates)

    @property
    def given(self) -> dict[str, int]:
        """Values in place of the scale's own."""
        names = ("steps", "batch", "evaluations", "eval_windows", "micro_batch")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @cached_property
    def rates(self) -> dict[str, tuple[float, ...]]:
        """Learning rates by optimizer.

        Raises:
            UsageError: If they are not written as in muon=0.01,0.02.
        """
        found: dict[str, tuple[float, ...]] = {}
        for text in self.lr:
            name, _, values = text.partition("=")
            if name not in OPTIMIZERS:
                raise UsageError(f"--lr {text}: unknown optimizer {name!r}; choose from {', '.join(OPTIMIZERS)}")
            try:
                found[name] = tuple(map(float, values.split(",")))
            except ValueError:
                raise UsageError(f"--lr {text}: {values!r} is no learning rate; write it as in muon=0.02") from None
        return found


@dataclass(frozen=True, kw_only=True)
class Options(Training):
    """Make one of the paper's tables or figures.

    What was trained is kept in OUT/runs and not trained again, except by main, which compares times: all of a seed
    train together again where one of them is new. Ctrl-C keeps what was done; the same command goes on. Rates that are
    given with --lr are searched in place of the paper's range; one alone is taken as it is.
    """

    seeds: Annotated[tuple[int, ...], tyro.conf.arg(aliases=("--seed",))] = (0, 1, 2)
    out: Path = Path("runs/experiments")  # Results folder
    scale: Literal["demo", "tiny", "small", "paper"] = "tiny"
    """demo: bench.pretrain's model; tiny: two cores; small: a GPU; paper: GPUs, days."""
    model: str = ""  # Only models whose name begins so: gpt2, llama, gpt2-350m
    starts: tuple[Literal["auto"] | float, ...] = ()
    """Of eigenvalues, auto 0.1 if not given (paper: 0.1); spectra and phi have the first."""
    tune: bool = False  # At scale paper, sweep again instead of taking the paper's values
    jobs: int | None = None  # Runs at a time, each on one thread; if not given, the cores, or 1 on a GPU
    device: Literal["cpu", "cuda"] | None = None  # If not given, cpu at scales demo and tiny, otherwise cuda

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, jobs=self.jobs)
        positive(starts=self.starts)
        distinct(starts=self.starts)
        if self.scale == "paper":
            if len({scale.config.family for scale in self.scales}) > 1:
                raise UsageError(
                    "--scale paper has other data for each family; give --model gpt2 or llama, with its --data"
                )
            if self.lr and not self.tune:
                raise UsageError("--lr: --scale paper takes the paper's rates; add --tune to search others")
        for name in ABLATIONS:
            if len(self.rates.get(name, ())) > 1:
                raise UsageError(f"--lr {name}: is not searched; give one rate, or none for 1.5 times Pro-KLShampoo's")
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        for scale in self.scales:
            if scale.batch % processes:  # some of its sequences would not be trained on
                raise UsageError(
                    f"a batch of {scale.batch} sequences, as {scale.name} has, is no multiple of WORLD_SIZE = "
                    f"{processes}, the processes that share it; give another --batch"
                )
        if self.place == "cuda" or processes > 1:
            if (self.jobs or 1) > 1:
                raise UsageError(
                    f"--jobs {self.jobs}: runs on GPUs or under torchrun are one after another; leave it out"
                )
            object.__setattr__(self, "jobs", 1)
        if self.place == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"no GPU is visible to torch for --scale {self.scale}; give --device cpu")

    @cached_property
    def scales(self) -> tuple[Scale, ...]:
        """The models, with what was given in place of their own.

        Raises:
            UsageError: no model's name begins as was asked.
        """
        every = SCALES[self.scale]
        if chosen := [scale for scale in every if scale.name.startswith(self.model)]:
            return tuple(replace(scale, **self.given, lr=self.rates) for scale in chosen)
        names = ", ".join(scale.name for scale in every)
        raise UsageError(f"--model {self.model} is the beginning of no model; there are {names}")

    @property
    def place(self) -> str:
        """The device that trains."""
        return self.device or ("cpu" if self.scale in ("demo", "tiny") else "cuda")

    @property
    def runs_at_a_time(self) -> int:
        """Number of processes, each with one run."""
        return self.jobs or cores()

    @property
    def compared_starts(self) -> tuple[str | float, ...]:
        """Starts of the eigenvalues."""
        return self.starts or ((PAPER_START,) if self.scale == "paper" else (AUTO, PAPER_START))


@dataclass(frozen=True, kw_only=True)
class WorkedOff:
    """Options of what goes on with the recorded rows."""

    out: Path = rows.RESULTS  # Folder of the results files
    folder: Path = Path("runs/study")  # Of checkpoints and of what has ended
    jobs: int = cores()  # Runs at a time, each on one thread

    def __post_init__(self) -> None:
        at_least(1, jobs=self.jobs)
