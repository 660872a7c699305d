"""The optimizers whose whole steps are timed for one set of weights: this package's, torch's, and other packages'.

Other packages' (``pip install -e .[peers]``) are imported when they are built. All refresh every tenth step, as this
package does, where they have such a period. Nothing is compiled: torch.compile takes minutes, and the steps beside
which these are timed are not compiled either.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench import rows
from bench.optimizers import OPTIMIZERS
from bench.rivals import CapturedBatchedMuon, CapturedMuon, Float32Muon, package
from bench.shapes import ParameterSet
from prokl import ops

PERIOD = 10
"""Steps of a period, one of which refreshes: the default of both methods, and of the peers that have a period."""
CAPTURED, BATCHED = "Muon in a CUDA graph", "batched Muon in a CUDA graph"
"""torch's Muon with its step captured by hand, as the host bounds it on a GPU; and the same in batches, which takes
least: ratios of a GPU are to it."""
EAGER = "without CUDA graphs"  # note of an optimizer whose steps are launched one by one
HEADS = "q, k by heads"  # note of one that steps query and key weights by heads, as groups of ``param_groups`` do


@dataclass(frozen=True)
class Entry:
    """One way to step."""

    optimizer: str  # as recorded
    make: Callable[..., Optimizer]  # builds it of a list of weights, with ``settings``
    settings: tuple[tuple[str, Any], ...] = ()
    backend: str = ""  # of a matrix optimizer of this package
    rank: int | None = None  # of the tracked subspace, of the methods that have one
    polar: torch.dtype | None = None  # dtype of Newton-Schulz, of the methods whose ratios depend on it
    note: str = ""  # what a reader must know

    def build(self, weights: list[Tensor], **changed: Any) -> Optimizer:
        """Build the optimizer; ``changed`` overrides settings that it has."""
        own = dict(self.settings)
        own |= {name: value for name, value in changed.items() if name in own}
        return self.make(weights, **own)

    @property
    def key(self) -> tuple[str, str, int | None, torch.dtype | None, str]:
        """Tell it from the others of a set."""
        return self.optimizer, self.backend, self.rank, self.polar, self.note if self.note in (EAGER, HEADS) else ""

    @property
    def dtypes(self) -> str:
        """Name the dtype of the weights, and that of Newton-Schulz where it differs."""
        half = self.polar not in (None, torch.float32)
        return f"float32, Newton-Schulz {str(self.polar).removeprefix('torch.')}" if half else "float32"


def pro(backend: str, rank: int, polar: torch.dtype, name: str = "pro-klshampoo") -> Entry:
    """Return Pro-KLShampoo, or under another name a variant of it without Newton-Schulz."""
    settings = (("rank", rank), ("precondition_frequency", PERIOD), ("ns_dtype", polar), ("backend", backend))
    own = polar if name == "pro-klshampoo" else None
    return Entry(name, OPTIMIZERS[name].make, (*settings, ("precision", None)), backend, rank, own)


def by_heads(heads: int, weights: list[Tensor], **settings: Any) -> Optimizer:
    """Build Pro-KLShampoo of weights of which the later half of a model's square ones, or one or two, are split."""
    square = [W for W in weights if W.shape[0] == W.shape[1]]
    split = square[len(square) // 2 :] if len(square) > 2 else square
    whole = [W for W in weights if not any(W is own for own in split)]
    groups: list[dict[str, Any]] = [{"params": split, "split": heads, "rank": "auto"}]
    return OPTIMIZERS["pro-klshampoo"].make(groups + [{"params": whole}] * bool(whole), **settings)


def by_heads_of(whole: Entry, s: ParameterSet) -> Entry:
    """Return an entry of Pro-KLShampoo whose query and key weights are by the heads of a set."""
    return replace(whole, make=partial(by_heads, s.heads), note=HEADS)


def kl(backend: str) -> Entry:
    """Return this package's KL-Shampoo."""
    settings = (("precondition_frequency", PERIOD), ("backend", backend), ("precision", None))
    return Entry("kl-shampoo", OPTIMIZERS["kl-shampoo"].make, settings, backend)


def muon(polar: torch.dtype) -> Entry:
    """Return torch's Muon: as it is, with Newton-Schulz in bfloat16, or in float32."""
    kind, note = OPTIMIZERS["muon"].make, ""
    if polar != torch.bfloat16:
        kind, note = Float32Muon, "torch.optim.Muon, wrapped"
    return Entry("muon", kind, (("lr", 0.02),), polar=polar, note=note)


def backends(device: torch.device) -> list[str]:
    """Return the batched backends that are fit for a device."""
    return ["torch", "triton"] if ops.explain(None, device).startswith("triton") else ["torch"]


def model_entries(s: ParameterSet, device: torch.device, polar: torch.dtype) -> list[Entry]:
    """Return all that step a model but for the peers.

    ``polar`` is the dtype of Newton-Schulz; where it is bfloat16, float32 is measured too, at the middle rank.
    """
    middle = s.ranks[len(s.ranks) // 2]
    batched = backends(device)
    if device.type == "cuda":  # no one would take another there
        batched = batched[-1:]
    found = [
        muon(polar),
        Entry("adamw", OPTIMIZERS["adamw"].make, (("lr", 1e-3), ("fused", True)), note="fused"),
        *(pro(backend, rank, polar) for backend in batched for rank in s.ranks),
        *(by_heads_of(pro(backend, s.ranks[-1], polar), s) for backend in batched if s.heads > 1),
        *(pro(backend, middle, polar, "smok-hop") for backend in batched),
        *(kl(backend) for backend in batched),
    ]
    if device.type == "cpu":
        found += [pro("reference", s.ranks[-1], polar), kl("reference")]
    if polar == torch.bfloat16:
        found += [muon(torch.float32), pro(batched[-1], middle, torch.float32)]
    if device.type == "cuda":
        graphed = pro(batched[-1], middle, polar)
        found.append(replace(graphed, settings=(*graphed.settings, ("cuda_graphs", False)), note=EAGER))
        note = "torch.optim.Muon, its step captured in a CUDA graph by hand"
        found.append(replace(muon(torch.bfloat16), optimizer=CAPTURED, make=CapturedMuon, note=note))
        note = "torch.optim.Muon's step of all weights of a shape at once, captured in a CUDA graph by hand"
        found.append(replace(muon(torch.bfloat16), optimizer=BATCHED, make=CapturedBatchedMuon, note=note))
    return found


def _gram(module: Any, weights: list[Tensor]) -> Optimizer:
    # Its own kernels are for GPUs; restarting after two of five iterations is what it tunes itself to, printing.
    restarts = [2]
    return module.Muon(weights, ns_use_kernels=weights[0].is_cuda, gram_newton_schulz_restart_iterations=restarts)


PEERS: dict[str, tuple[str, str, Callable[[Any, list[Tensor]], Optimizer], str]] = {
    "heavyball.KLShampoo": (
        "heavyball", "heavyball", lambda module, W: module.KLShampoo(W, precondition_frequency=PERIOD),
        "torch.compile off",
    ),
    "pytorch_optimizer.SOAP": (
        "pytorch-optimizer", "pytorch_optimizer", lambda module, W: module.SOAP(W, precondition_frequency=PERIOD), "",
    ),
    "pytorch_optimizer.Shampoo": (
        "pytorch-optimizer", "pytorch_optimizer",
        lambda module, W: module.Shampoo(W, preconditioning_compute_steps=PERIOD), "",
    ),
    "gram_newton_schulz.Muon": (
        "gram-newton-schulz", "gram_newton_schulz", _gram, "torch.compile off, Newton-Schulz in float16",
    ),
    "emerging_optimizers.SOAP": (
        "emerging-optimizers", "emerging_optimizers.soap",
        lambda module, W: module.SOAP(W, lr=1e-3, use_kl_shampoo=True),
        "use_kl_shampoo=True; QR in every step, it has no period",
    ),
}  # fmt: skip
"""By name: the distribution as pip knows it, the module, what builds it of module and weights, and a note."""


def peer(name: str) -> Entry:
    """Return an optimizer of another package, with its version; building it raises UsageError where it cannot."""
    distribution, module, make, note = PEERS[name]

    def build(weights: list[Tensor]) -> Optimizer:
        torch.compiler.set_stance("force_eager")
        return make(package(module, distribution), weights)

    version = rows.version(distribution)
    return Entry(name, build, note="; ".join(filter(None, [f"{distribution} {version}" if version else "", note])))


def peers(rank: int, polar: torch.dtype) -> list[Entry]:
    """Return those of other packages, and COSMOS at this rank with Newton-Schulz in ``polar``."""
    note = "written from its description, weight by weight; QR in every step"
    settings = (("rank", rank), ("ns_dtype", polar))
    cosmos = Entry("cosmos", OPTIMIZERS["cosmos"].make, settings, rank=rank, polar=polar, note=note)
    return [*map(peer, PEERS), cosmos]
