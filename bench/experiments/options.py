"""What the commands of ``bench.experiments`` take; every wrong value ends in one line with the remedy."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from bench.command import UsageError, at_least, cores, distinct, positive
from bench.experiments.scales import AUTO, PAPER_START, SCALES, Scale
from bench.optimizers import OPTIMIZERS

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
}
NAME = Literal["main", "ablation", "cosmos", "spectra", "phi", "alpha", "memory"]


@dataclass(frozen=True)
class Options:
    """Make one of the paper's tables or figures.

    What was trained is kept in OUT/runs and not trained again, except by main, which compares times: all of a seed
    train together again where one of them is new. Ctrl-C keeps what was done; the same command goes on.
    """

    name: Annotated[
        tyro.conf.Positional[NAME], tyro.conf.arg(help="; ".join(f"{name}: {what}" for name, what in NAMES.items()))
    ]
    scale: Literal["demo", "tiny", "small", "paper"] | None = None
    """demo: bench.pretrain's model; tiny: two cores; small: a GPU; paper: GPUs, days. Without it tiny or, where nothing
    trains, all there are."""
    model: str = ""
    """Only models whose name begins so: gpt2, llama, gpt2-350m."""
    seeds: tuple[int, ...] = ()
    """Of the final runs, 0 1 2 if not given; sweeps and spectra have the first."""
    starts: tuple[Literal["auto"] | float, ...] = ()
    """Of eigenvalues, auto 0.1 if not given (paper: 0.1); spectra and phi have one, by default the first."""
    lr: tuple[str, ...] = ()
    """Learning rates to search in place of the paper's range, as in muon=0.01,0.02; one alone is taken as it is."""
    tune: bool = False
    """At scale paper, sweep again instead of taking the paper's values."""
    jobs: int | None = None
    """Runs at a time, each on one thread; if not given, the cores, or 1 on a GPU."""
    device: Literal["cpu", "cuda"] | None = None
    """If not given, cpu at scales demo and tiny, otherwise cuda."""
    data: Path | None = None
    """Text or token shards; if not given, Python's standard library, as bytes."""
    out: Path = Path("runs/experiments")
    """Results folder."""
    steps: int | None = None
    """Of every run, in place of the scale's."""
    batch: int | None = None
    """Sequences a step, in place of the scale's."""
    micro_batch: int | None = None
    """Sequences in one forward pass on one device."""
    eval_windows: int | None = None
    """Validation contexts, in place of the scale's."""
    checkpoint_seconds: float = 60.0
    """Between checkpoints."""

    def __post_init__(self) -> None:
        at_least(0, seeds=self.seeds)
        counts = {name: getattr(self, name) for name in ("jobs", "steps", "batch", "micro_batch", "eval_windows")}
        at_least(1, **counts)
        positive(starts=self.starts, checkpoint_seconds=self.checkpoint_seconds)
        distinct(seeds=self.seeds, starts=self.starts)
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
            if len(self.starts) > 1 or len(self.seeds) > 1:
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
        for scale in self.scales:
            check_share(scale)
        alone = self.place == "cuda" or processes() > 1
        if alone and (self.jobs or 1) > 1:
            where = "under torchrun" if processes() > 1 else "on a GPU"
            raise UsageError(f"--jobs {self.jobs}: runs {where} go one after another; leave --jobs out")
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
        given = {name: getattr(self, name) for name in ("steps", "batch", "micro_batch", "eval_windows")}
        given = {name: value for name, value in given.items() if value is not None}
        return tuple(replace(scale, **given, lr=rates(self.lr)) for scale in chosen)

    @property
    def place(self) -> str:
        """The device that trains."""
        return self.device or ("cpu" if self.scale in (None, "demo", "tiny") else "cuda")

    @property
    def runs_at_a_time(self) -> int:
        """How many."""
        return self.jobs or (1 if self.place == "cuda" or processes() > 1 else cores())

    @property
    def compared_starts(self) -> tuple[str | float, ...]:
        """Starts of the eigenvalues."""
        return self.starts or ((PAPER_START,) if self.scale == "paper" else (AUTO, PAPER_START))


def rates(given: Sequence[str]) -> Mapping[str, tuple[float, ...]]:
    """Read learning rates by method, written as in muon=0.01,0.02.

    Raises:
        UsageError: If one is not written so, or not a rate.
    """
    found: dict[str, tuple[float, ...]] = {}
    for text in given:
        name, _, values = text.partition("=")
        if name not in OPTIMIZERS:
            raise UsageError(f"--lr {text}: unknown optimizer {name!r}; choose from {', '.join(OPTIMIZERS)}")
        try:
            found[name] = tuple(map(float, values.split(",")))
        except ValueError:
            raise UsageError(f"--lr {text}: {values!r} is no learning rate; write it as in muon=0.02") from None
        if not all(0 < lr < math.inf for lr in found[name]):
            raise UsageError(f"--lr {text}: must be finite numbers > 0")
        distinct(lr=found[name])
    return found


def processes() -> int:
    """Return how many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_share(scale: Scale) -> None:
    """Refuse a batch that the processes cannot share evenly, for some of its sequences would not be trained on."""
    count = processes()
    if scale.batch % count:
        below, above = scale.batch // count * count, (scale.batch // count + 1) * count
        choice = f"--batch {below} or {above}" if below else f"--batch {above}"
        raise UsageError(
            f"a batch of {scale.batch} sequences, as {scale.name} has, is no multiple of WORLD_SIZE = {count}, the "
            f"processes that share it; give {choice}, or start another number of processes"
        )
