"""What a run is made of."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from bench.models import ModelConfig
from bench.optimizers import Hyper


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run; a checkpoint is continued only when all of it is equal.

    Attributes:
        hyper: by key, which names an optimizer among those of the run.
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
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.model.context

    def plan(self) -> dict[str, Any]:
        """Return what the optimizers of the run share, of types that a checkpoint and a CSV file can hold."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["hyper"], own["model"]
        return asdict(self.model) | own
