"""The optimizers that are disturbed: this package's with their bound and in the paper's form, Muon and AdamW."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bench.optimizers import ADAMW_BETAS, CLIP, OPTIMIZERS, arguments
from bench.rows import Row
from bench.study.protocol import RANKED

OWN = ("pro-klshampoo", "kl-shampoo", "smok-hop", "subspace-only", "complement-only")
"""The methods that ``clip_threshold`` bounds."""


@dataclass(frozen=True)
class Form:
    """One optimizer, in one form."""

    optimizer: str  # a key of bench.optimizers.OPTIMIZERS
    clip_threshold: str = ""  # a number, or "none" for the paper's form; of OWN alone

    def build(self, weights: Sequence[Tensor], lr: float, rank: int | None = None, **settings: Any) -> Optimizer:
        """Build the optimizer of matrices: its defaults, no weight decay, the ``rank`` where it has one."""
        if rank is not None and self.optimizer in RANKED:
            settings["rank"] = rank
        if self.optimizer == "adamw":
            settings["betas"] = ADAMW_BETAS
        if self.optimizer in OWN:
            settings = arguments(settings | self.bound)
        return OPTIMIZERS[self.optimizer].make(weights, lr=lr, weight_decay=0.0, **settings)

    @property
    def bound(self) -> dict[str, float | None]:
        """The setting that makes the form."""
        if self.optimizer not in OWN:
            return {}
        return {"clip_threshold": None if self.clip_threshold == "none" else float(self.clip_threshold)}

    def row(self, case: str, value: str, metric: str, unit: str, figure: float, **more: Any) -> Row:
        """Return a row of the result file."""
        found = {"case": case, "value": value, "metric": metric, "unit": unit, "median": figure}
        return found | {"optimizer": self.optimizer, "clip_threshold": self.clip_threshold} | more


def bounded(method: str) -> Form:
    """Return a method of this package as it is by default."""
    return Form(method, f"{CLIP:g}")


def paper(method: str) -> Form:
    """Return a method of this package in the paper's form."""
    return Form(method, "none")


FORMS = (*(form(method) for method in OWN for form in (bounded, paper)), Form("muon"), Form("adamw"))
