"""What the commands of ``bench.study`` take; every wrong value ends in one line with the remedy."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from bench.command import UsageError, at_least, cores, distinct, positive, some
from bench.optimizers import OPTIMIZERS
from bench.study.protocol import ABLATIONS
from bench.study.scales import AUTO, PAPER_START, SCALES, Scale

STILL: dict[str, Sequence[str]] = {"alpha": ("paper", "small", "tiny"), "memory": ("paper",)}
"""Those that train nothing, with the scales that they have."""
WATCHING = ("spectra", "phi")
"""Those that train once, from one start on one seed, and look more than once."""
NAMES = {
    "main": "the main table, its sweeps, and loss against steps and seconds",
    "ablation": "the ablation table and its curves",
    "cosmos": "the comparison with COSMOS",
    "spectra": "spectra of KL-Shampoo's L and R",
    "phi": "spectra of Phi_L under Pro-KLShampoo over windows of 10 minibatches",
    "alpha": "the brackets on alpha_kl, without training",
    "memory": "state and operations of a step on the paper's models, without training",
    "lengths": "every method tuned at every length of a run",
    "size": "a model three times as wide, on a fixed grid",
}


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

    name: Annotated[
        tyro.conf.Positional[Literal[tuple(NAMES)]],  # type: ignore[valid-type]
        tyro.conf.arg(help="; ".join(f"{name}: {what}" for name, what in NAMES.items())),
    ]
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(aliases=("--seed",))] = (0, 1, 2)
    out: Path = Path("runs/experiments")  # Results folder
    scale: Literal["demo", "tiny", "small", "paper"] | None = None
    """demo: bench.pretrain's model; tiny: two cores; small: a GPU; paper: GPUs, days. Without it tiny or, where nothing
    trains, all there are."""
    model: str = ""  # Only models whose name begins so: gpt2, llama, gpt2-350m
    starts: tuple[Literal["auto"] | float, ...] = ()
    """Of eigenvalues, auto 0.1 if not given (paper: 0.1); spectra and phi have one, by default the first."""
    tune: bool = False  # At scale paper, sweep again instead of taking the paper's values
    jobs: int | None = None  # Runs at a time, each on one thread; if not given, the cores, or 1 on a GPU
    device: Literal["cpu", "cuda"] | None = None  # If not given, cpu at scales demo and tiny, otherwise cuda

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name in ("lengths", "size"):
            raise UsageError(
                f"{self.name} has options of its own: give it first, see python -m bench.study {self.name} --help"
            )
        at_least(1, jobs=self.jobs)
        positive(starts=self.starts)
        distinct(starts=self.starts)
        if self.name in STILL:
            self._check_still()
        else:
            self._check_training()

    def _check_still(self) -> None:
        if self.scale not in (None, *STILL[self.name]):
            having = " or ".join(STILL[self.name])
            raise UsageError(f"{self.name} has nothing on --scale {self.scale}; give --scale {having}")
        ignored = [f for f in fields(self) if f.name not in ("name", "scale", "model", "out")]
        if given := [f"--{f.name.replace('_', '-')}" for f in ignored if getattr(self, f.name) != f.default]:
            raise UsageError(f"{self.name} trains nothing; leave {' '.join(given)} out")

    def _check_training(self) -> None:
        if self.name in WATCHING:
            if len(self.starts) > 1 or self.seeds != Options.seeds and len(self.seeds) > 1:
                raise UsageError(f"{self.name} trains once; give one of --starts and one of --seeds")
            if self.steps == 1:
                raise UsageError(f"--steps 1: {self.name} looks at several steps; give at least 2")
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
        for scale in self.scales:
            _check_share(scale)
        if self.alone and (self.jobs or 1) > 1:
            raise UsageError(f"--jobs {self.jobs}: runs on GPUs or under torchrun are one after another; leave it out")
        if self.place == "cuda" and not torch.cuda.is_available():
            of = f"--device {self.device}" if self.device else f"--scale {self.scale}"
            raise UsageError(f"no GPU is visible to torch for {of}; give --device cpu")

    @cached_property
    def scales(self) -> tuple[Scale, ...]:
        """The models, with what was given in place of their own."""
        names = [self.scale] if self.scale else STILL.get(self.name, ["tiny"])
        having = [scale for name in names for scale in SCALES[name]]
        chosen = [scale for scale in having if scale.name.startswith(self.model)]
        if not chosen:
            where, have = " or ".join(names), ", ".join(scale.name for scale in having)
            raise UsageError(f"--model {self.model} is the beginning of no model of --scale {where}; it has {have}")
        return tuple(replace(scale, **self.given, lr=self.rates) for scale in chosen)

    @property
    def place(self) -> str:
        """The device that trains."""
        return self.device or ("cpu" if self.scale in (None, "demo", "tiny") else "cuda")

    @property
    def alone(self) -> bool:
        """True if runs go one after another."""
        return self.place == "cuda" or _processes() > 1

    @property
    def runs_at_a_time(self) -> int:
        """Number of processes, each with one run."""
        return self.jobs or (1 if self.alone else cores())

    @property
    def compared_starts(self) -> tuple[str | float, ...]:
        """Starts of the eigenvalues."""
        return self.starts or ((PAPER_START,) if self.scale == "paper" else (AUTO, PAPER_START))


def _processes() -> int:
    """Return how many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_share(scale: Scale) -> None:
    """Refuse a batch that the processes cannot share evenly, for some of its sequences would not be trained on."""
    count, low = _processes(), scale.batch // _processes() * _processes()
    if scale.batch != low:
        choice = " or ".join(str(batch) for batch in (low, low + count) if batch)
        raise UsageError(
            f"a batch of {scale.batch} sequences, as {scale.name} has, is no multiple of WORLD_SIZE = {count}, the "
            f"processes that share it; give --batch {choice}, or start another number of processes"
        )
