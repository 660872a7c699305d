"""What is compared: methods with their rank and start of the eigenvalues, and what the paper selected for them."""

from dataclasses import dataclass

from bench.optimizers import Hyper
from bench.presets import preset

PRO = "pro-klshampoo"
RANKED = (PRO, "smok-hop", "cosmos", "subspace-only", "complement-only")
STARTED = ("kl-shampoo", PRO, "smok-hop", "subspace-only", "complement-only")  # whose eigenvalues start somewhere


@dataclass(frozen=True)
class Kind:
    """A trainee without its hyper-parameters; rank and start are None where the method has none."""

    method: str
    rank: int | None = None
    start: str | float | None = None

    @property
    def key(self) -> str:
        """Its name among the trainees of a run."""
        return self.method + (f"-r{self.rank}" if self.rank else "") + (f"-{self.start}" if self.start else "")


def kind(method: str, rank: int, start: str | float) -> Kind:
    """Return the method with those of the two that it has."""
    return Kind(method, rank if method in RANKED else None, start if method in STARTED else None)


def of_paper(k: Kind, model: str) -> Hyper:
    """Return what the paper selected.

    Raises:
        UsageError: the paper has no such run.
    """
    found = preset(k.method, model, k.rank)
    decay = found.weight_decay, found.adamw_weight_decay
    return Hyper(k.method, found.lr, found.adamw_lr, *decay, k.rank, found.alpha_kl, k.start, "paper", bounded=False)
