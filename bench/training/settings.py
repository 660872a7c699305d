"""What a run is made of."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.models import ModelConfig


@dataclass(frozen=True)
class Hyper:
    """What one contender is built with; what its method does not take is None.

    Attributes:
        method: a row of ``bench.training.contenders.CONTENDERS``.
        lr: of the matrices; under AdamW, of everything.
        adamw_lr: of embedding, head and norms under every other method.
        weight_decay: of the matrices; under AdamW, also of embedding and head.
        adamw_weight_decay: of embedding and head under every other method.
        rank: of the tracked subspace.
        alpha_kl: Pro-KLShampoo's mixing weight.
        init_eigenvalue: start of the preconditioner's eigenvalues, a number or "auto".
    """

    method: str
    lr: float
    adamw_lr: float | None = None
    weight_decay: float = 0.0
    adamw_weight_decay: float = 0.0
    rank: int | None = None
    alpha_kl: float | None = None
    init_eigenvalue: str | float | None = None


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run; a checkpoint is continued only when all of it is equal.

    Attributes:
        hyper: by key, which is a contender's name, with what tells it from others of its method ("muon@0.02").
        batch: sequences a step, of all processes together.
        micro_batch: sequences that a process takes through the model at once; None takes all of its share.
        device: torch's name of the device that trains.
        autocast: whether the model runs under bfloat16 autocast.
        state_dtype: in which KL-Shampoo and Pro-KLShampoo keep their state; None is the weights' own.
    """

    hyper: dict[str, Hyper]
    model: ModelConfig
    steps: int
    eval_every: int
    eval_windows: int
    batch: int
    threads: int
    micro_batch: int | None = None
    device: str = "cpu"
    autocast: bool = False
    state_dtype: str | None = None

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The contenders' keys."""
        return tuple(self.hyper)

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.model.context

    def plan(self) -> dict[str, Any]:
        """What the contenders share, of types that a checkpoint and a CSV file can hold."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["hyper"], own["model"]
        return asdict(self.model) | own

    def flat(self) -> dict[str, Any]:
        """All settings, likewise.

        A contender's learning rate is under "lr KEY". Its other hyper-parameters are under their own names where all
        contenders share them, and otherwise likewise by key.
        """
        values: dict[str, Any] = {"optimizers": " ".join(self.hyper)}
        for name in (field.name for field in fields(Hyper)):
            by_key = {key: getattr(hyper, name) for key, hyper in self.hyper.items()}
            shared = name not in ("lr", "method") and len(set(by_key.values())) == 1
            values |= {name: next(iter(by_key.values()))} if shared else {f"{name} {k}": v for k, v in by_key.items()}
        return values | self.plan()

    def shared(self) -> dict[str, Any]:
        """What :meth:`flat` gives without what is of single contenders."""
        return {k: v for k, v in self.flat().items() if " " not in k and k != "optimizers"}


@dataclass(frozen=True)
class Job:
    """What ``bench.pretrain`` is to run, on which text, and where to put the results."""

    settings: Settings
    seeds: tuple[int, ...]
    data: Path | None
    out: Path
    resume: bool
    overwrite: bool
    checkpoint_seconds: float
    sweep: bool
