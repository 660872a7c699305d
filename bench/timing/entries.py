"""The optimizers whose whole steps are timed for one set of weights: this package's, and torch's beside them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.optimizers import OPTIMIZERS, arguments
from bench.rivals import Float32Muon
from bench.shapes import ParameterSet
from prokl import ops
from prokl.backends.select import select

PERIOD = 10
"""Steps of a period, one of which refreshes: the default of both methods, and of the peers that have a period."""
EAGER = "without CUDA graphs"
"""Note of an optimizer whose steps are launched one by one."""


@dataclass(frozen=True)
class Entry:
    """One way to step.

    Attributes:
        optimizer: as recorded.
        make: builds it of a list of weights, with ``settings``.
        settings: by name.
        backend: of a matrix optimizer of this package, else empty.
        rank: of the tracked subspace, of the methods that have one.
        polar: dtype of Newton-Schulz, of the methods whose ratios depend on it.
        counted: True if :mod:`bench.costs` counts its operations.
        note: what a reader must know.
        eager: True of one whose steps could be replayed from CUDA graphs and are not.
    """

    optimizer: str
    make: Callable[..., Optimizer]
    settings: tuple[tuple[str, Any], ...] = ()
    backend: str = ""
    rank: int | None = None
    polar: torch.dtype | None = None
    counted: bool = False
    note: str = ""
    eager: bool = False

    def build(self, weights: list[Tensor], **changed: Any) -> Optimizer:
        """Build the optimizer; ``changed`` overrides settings that it has."""
        own = dict(self.settings)
        own |= {name: value for name, value in changed.items() if name in own}
        return self.make(weights, **(arguments(own) if "precision" in own else own))  # which prokl's have alone

    @property
    def key(self) -> tuple[str, str, int | None, torch.dtype | None, bool]:
        """Tell it from the others of a set."""
        return self.optimizer, self.backend, self.rank, self.polar, self.eager

    def precision(self, device: torch.device) -> str:
        """Return which of prokl's precisions its steps have there, by its own setting or by default."""
        found = select(self.backend, device, dict(self.settings)["precision"])
        return "balanced" if found.stages and found is select(self.backend, device, "balanced") else "faithful"

    @property
    def dtypes(self) -> str:
        """Name the dtype of the weights, and that of Newton-Schulz where it differs."""
        half = self.polar not in (None, torch.float32)
        return f"float32, Newton-Schulz {str(self.polar).removeprefix('torch.')}" if half else "float32"


def pro(backend: str, rank: int, polar: torch.dtype, name: str = "pro-klshampoo") -> Entry:
    """Return Pro-KLShampoo, or under another name a variant of it without Newton-Schulz."""
    settings = {"rank": rank, "precondition_frequency": PERIOD, "ns_dtype": polar, "backend": backend}
    settings["precision"] = None
    whole = name == "pro-klshampoo"
    own = polar if whole else None
    return Entry(name, OPTIMIZERS[name].make, tuple(settings.items()), backend, rank, own, counted=whole)


def kl(backend: str) -> Entry:
    """Return this package's KL-Shampoo."""
    settings = (("precondition_frequency", PERIOD), ("backend", backend), ("precision", None))
    return Entry("kl-shampoo", OPTIMIZERS["kl-shampoo"].make, settings, backend, counted=True)


def muon(polar: torch.dtype) -> Entry:
    """Return torch's Muon: as it is, with Newton-Schulz in bfloat16, or in float32."""
    kind, note = OPTIMIZERS["muon"].make, ""
    if polar != torch.bfloat16:
        kind, note = Float32Muon, "torch.optim.Muon, wrapped"
    return Entry("muon", kind, (("lr", 0.02),), polar=polar, counted=True, note=note)


def adamw() -> Entry:
    """Return torch's AdamW."""
    settings = (("lr", 1e-3), ("fused", True))
    return Entry("adamw", OPTIMIZERS["adamw"].make, settings, counted=True, note="fused")


def eager(entry: Entry) -> Entry:
    """Return the entry with its steps launched one by one."""
    return replace(entry, settings=(*entry.settings, ("cuda_graphs", False)), note=EAGER, eager=True)


def backends(device: torch.device) -> list[str]:
    """Return the batched backends that are fit for a device."""
    return ["torch", "triton"] if ops.explain(None, device).startswith("triton") else ["torch"]


def model_entries(s: ParameterSet, device: torch.device, polar: torch.dtype) -> list[Entry]:
    """Return all that step a model but for the peers.

    Args:
        s: the weights, and the ranks.
        device: where.
        polar: dtype of Newton-Schulz; the other one is measured at the middle rank alone.
    """
    middle = s.ranks[len(s.ranks) // 2]
    batched = backends(device)
    other = torch.float32 if polar == torch.bfloat16 else torch.bfloat16
    return [
        muon(polar),
        adamw(),
        *(pro(backend, rank, polar) for backend in batched for rank in s.ranks),
        pro("reference", s.ranks[-1], polar),
        *(pro(backend, middle, polar, "smok-hop") for backend in batched),
        *(kl(backend) for backend in batched),
        kl("reference"),
        muon(other),
        pro(batched[-1], middle, other),
        *([eager(pro(batched[-1], middle, polar))] if device.type == "cuda" else []),
    ]


def aspect_entries(s: ParameterSet, device: torch.device, polar: torch.dtype) -> list[Entry]:
    """Return what is compared by n/m: the batched steps, KL-Shampoo weight by weight, and Muon."""
    best = backends(device)[-1]
    return [muon(polar), pro(best, s.ranks[0], polar), kl(best), kl("reference")]
