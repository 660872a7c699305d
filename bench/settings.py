"""What a run is made of."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run; ``--resume`` goes on only when all of it is equal."""

    optimizers: tuple[str, ...]  # keys: a contender's name, with the learning rate in a sweep ("muon@0.02")
    lr: dict[str, float]  # by key
    adamw_lr: float  # of embedding, head and norms under every optimizer
    init_eigenvalue: str | float
    rank: int
    alpha_kl: float
    steps: int
    eval_every: int
    eval_windows: int
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    threads: int

    def flat(self) -> dict[str, Any]:
        """One entry per setting and learning rate, of types that a checkpoint and a CSV file can hold."""
        values = asdict(self) | {"optimizers": " ".join(self.optimizers)}
        rates = values.pop("lr")
        return values | {f"lr {key}": rate for key, rate in rates.items()}


@dataclass(frozen=True)
class Job:
    """What to run, on which text, and where to put the results."""

    settings: Settings
    seeds: tuple[int, ...]
    data: Path | None
    out: Path
    resume: bool
    overwrite: bool
    checkpoint_seconds: float
    sweep: bool
