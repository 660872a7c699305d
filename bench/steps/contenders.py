"""The optimizers whose whole steps are timed: this package's, torch's and the peers, for one set of weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.shapes import ParameterSet
from prokl import KLShampoo, ProKLShampoo, ops
from prokl.polar import standard

PERIOD = 10
"""Steps of a period, one of which refreshes: the default of both methods, and of the peers that have a period."""

Make = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class Contender:
    """One way to step.

    Attributes:
        name: as recorded.
        make: the optimizer of a list of weights.
        backend: of a matrix optimizer of this package, else empty.
        rank: of the tracked subspace, of the methods that have one.
        polar: dtype of Newton-Schulz, of the methods whose ratios depend on it.
        method: whose operations :mod:`bench.costs` counts; None where they are not counted.
        own: class and settings of an optimizer of this package, else None.
        note: what a reader must know.
    """

    name: str
    make: Make
    backend: str = ""
    rank: int | None = None
    polar: torch.dtype | None = None
    method: str | None = None
    own: tuple[type[Optimizer], Mapping[str, Any]] | None = None
    note: str = ""

    @property
    def key(self) -> tuple[str, str, int | None, torch.dtype | None]:
        """What tells it from the others of a set."""
        return self.name, self.backend, self.rank, self.polar

    @property
    def dtypes(self) -> str:
        """Of the weights, and of Newton-Schulz where that differs."""
        half = self.polar not in (None, torch.float32)
        return f"float32, Newton-Schulz {str(self.polar).removeprefix('torch.')}" if half else "float32"


class Float32Muon(torch.optim.Muon):
    """torch's Muon with its Newton-Schulz in float32: torch has it in bfloat16 and no setting."""

    def step(self, closure: Any = None) -> Any:
        module = torch.optim._muon
        before = module._zeropower_via_newtonschulz
        module._zeropower_via_newtonschulz = orthogonalised  # type: ignore[assignment]
        try:
            return super().step(closure)
        finally:
            module._zeropower_via_newtonschulz = before


def orthogonalised(G: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """torch's Newton-Schulz of a matrix, in its own dtype."""
    X = G if G.shape[0] <= G.shape[1] else G.mT
    X = standard((X / X.norm().clamp_min(eps))[None], steps, coefficients)[0]
    return X if G.shape[0] <= G.shape[1] else X.mT


def pro(backend: str, rank: int, polar: torch.dtype, name: str = "pro-klshampoo", **settings: Any) -> Contender:
    """Pro-KLShampoo, or under another name a variant of it without Newton-Schulz."""
    settings = {"rank": rank, "precondition_frequency": PERIOD, "ns_dtype": polar, "backend": backend} | settings
    whole = name == "pro-klshampoo"
    return Contender(
        name,
        lambda ps: ProKLShampoo(ps, **settings),
        backend,
        rank,
        polar if whole else None,
        name if whole else None,
        (ProKLShampoo, settings),
    )


def kl(backend: str) -> Contender:
    """KL-Shampoo of this package."""
    settings = {"precondition_frequency": PERIOD, "backend": backend}
    return Contender(
        "klshampoo",
        lambda ps: KLShampoo(ps, **settings),
        backend,
        method="klshampoo",
        own=(KLShampoo, settings),
    )


def muon(polar: torch.dtype) -> Contender:
    """torch's: as it is, with Newton-Schulz in bfloat16, or in float32."""
    kind, note = (torch.optim.Muon, "") if polar == torch.bfloat16 else (Float32Muon, "torch.optim.Muon, wrapped")
    return Contender("muon", lambda ps: kind(ps, lr=0.02), polar=polar, method="muon", note=note)


def backends(device: torch.device) -> list[str]:
    """The batched ones that are fit for a device."""
    return ["torch", "triton"] if ops.explain(None, device).startswith("triton") else ["torch"]


def main_contenders(s: ParameterSet, device: torch.device, polar: torch.dtype) -> list[Contender]:
    """All but the peers.

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
        Contender("adamw", lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), method="adamw", note="fused"),
        *(pro(backend, rank, polar) for backend in batched for rank in s.ranks),
        pro("reference", s.ranks[-1], polar),
        *(pro(backend, middle, polar, "smok-hop", variant="smok-hop") for backend in batched),
        *(kl(backend) for backend in batched),
        kl("reference"),
        muon(other),
        pro(batched[-1], middle, other),
    ]


def sweep_contenders(rank: int, device: torch.device, polar: torch.dtype) -> list[Contender]:
    """What the sweeps compare: the batched steps, KL-Shampoo weight by weight, and Muon."""
    best = backends(device)[-1]
    return [muon(polar), pro(best, rank, polar), kl(best), kl("reference")]
