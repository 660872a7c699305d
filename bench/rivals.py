"""Optimizers of other packages for matrices, as they are trained beside this one's: ``pip install -e .[peers]``.

Each has its package's own settings but for the rate; those with a period refresh every tenth step, as prokl's do. The
package is imported when one is built. On a CPU that would emulate bfloat16, in twenty times the time of a step, and
where a comparison asks for it, their Newton-Schulz multiplies in float32, as prokl's does there.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.command import UsageError
from prokl.algorithm.settings import cpu_has_bfloat16

CAUTIOUS_DECAY = 0.1
"""Weight decay of AdamW with cautious decay: AdamW's usual one for language models; without decay it would be AdamW."""


class OneByOne(Optimizer):
    """An optimizer of weights of two dimensions, one after another."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for W in group["params"]:
                if W.grad is not None:
                    self._step(W, W.grad, group)

    def _step(self, W: Tensor, G: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


def package(name: str, distribution: str) -> Any:
    """Import a package; raise UsageError where it is not installed, or fails."""
    try:
        return import_module(name)
    except Exception as error:  # another package may fail in any way
        raise UsageError(f"{name} cannot be imported ({error}); pip install {distribution}") from error


def soap(weights: list[Tensor], lr: float, weight_decay: float) -> Optimizer:
    """Return pytorch_optimizer's SOAP."""
    made = package("pytorch_optimizer", "pytorch-optimizer").SOAP
    return made(weights, lr=lr, weight_decay=weight_decay, precondition_frequency=10)


def muon(name: str, weights: list[Tensor], lr: float, weight_decay: float, float32: bool, **more: Any) -> Optimizer:
    """Return one of pytorch_optimizer's Muons; ``float32`` holds for all Muons of this process from then on."""
    made = getattr(package("pytorch_optimizer", "pytorch-optimizer"), name)
    base = package("pytorch_optimizer.optimizer.muon.base", "pytorch-optimizer")
    if float32 and not isinstance(base.zero_power_via_newton_schulz_5, partial):
        base.zero_power_via_newton_schulz_5 = partial(base.zero_power_via_newton_schulz_5, dtype=torch.float32)
    return made([{"params": weights, "use_muon": True}], lr=lr, weight_decay=weight_decay, **more)


def cautious_adamw(weights: list[Tensor], lr: float, weight_decay: float) -> Optimizer:
    """Return heavyball's AdamW with cautious decay (arXiv:2510.12402), of CAUTIOUS_DECAY where none is given."""
    heavyball = package("heavyball", "heavyball")
    heavyball.utils.compile_mode = None  # else it compiles each of its functions, for minutes
    decay = weight_decay or CAUTIOUS_DECAY
    return heavyball.AdamW(weights, lr=lr, betas=(0.9, 0.95), weight_decay=decay, cautious_weight_decay=True)


def in_pieces(make: Callable[..., Optimizer], groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """Return an optimizer of the pieces of the weights' rows, which share their memory, as prokl's groups say."""
    own, held = [], []
    for group in groups:
        count = group.get("split") or 1
        its = [(W, [torch.nn.Parameter(piece) for piece in W.detach().chunk(count)]) for _, W in group["params"]]
        own.append({"params": [piece for _, pieces in its for piece in pieces], "lr": group["lr"]})
        held += its
    made = make(own, **settings)

    def take_gradients(*_: Any) -> None:
        for W, pieces in held:
            assert W.grad is not None
            for piece, gradient in zip(pieces, W.grad.chunk(len(pieces)), strict=True):
                piece.grad = gradient

    made.register_step_pre_hook(take_gradients)
    return made


def emulated(device: torch.device) -> bool:
    """Return True if products in bfloat16 would be emulated on a device."""
    return device.type == "cpu" and not cpu_has_bfloat16()


class Captured:
    """Beside an optimizer: its step is replayed from one CUDA graph, which costs no host that launches a lot.

    Gradients must stay where they are, and settings as they are.
    """

    PLAIN = 2
    """Steps before the capture, which make the momentum and the libraries' workspaces."""

    def __init__(self, weights: list[Tensor], **settings: Any) -> None:
        super().__init__(weights, **settings)  # type: ignore[call-arg]
        self._taken, self._graph = 0, torch.cuda.CUDAGraph() if weights[0].is_cuda else None

    def step(self) -> None:
        if self._taken < self.PLAIN or self._graph is None:
            super().step()  # type: ignore[misc]
        elif self._taken == self.PLAIN:
            with torch.cuda.graph(self._graph):
                super().step()  # type: ignore[misc]
        if self._taken >= self.PLAIN and self._graph is not None:
            self._graph.replay()
        self._taken += 1


class BatchedMuon(torch.optim.Muon):
    """torch's Muon with all weights of a shape in one batch of products: what it costs in plain PyTorch at least."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights, momentum, decay = group["params"], group["momentum"], 1 - group["lr"] * group["weight_decay"]
            gradients = [W.grad for W in weights]
            buffers = [self.state[W].setdefault("momentum_buffer", torch.zeros_like(W)) for W in weights]
            torch._foreach_lerp_(buffers, gradients, 1 - momentum)
            ahead = torch._foreach_lerp(gradients, buffers, momentum)
            torch._foreach_mul_(weights, decay)
            for shape in dict.fromkeys(W.shape for W in weights):
                own = [i for i, W in enumerate(weights) if W.shape == shape]
                X = torch.stack([ahead[i] for i in own]).bfloat16()
                X = batched(X, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(weights[0].dtype)
                rate = group["lr"] * max(1, shape[0] / shape[1]) ** 0.5
                torch._foreach_add_([weights[i] for i in own], [*X.unbind()], alpha=-rate)


class CapturedMuon(Captured, torch.optim.Muon):  # type: ignore[misc]
    """torch's Muon from a CUDA graph."""


class CapturedBatchedMuon(Captured, BatchedMuon):  # type: ignore[misc]
    """Muon in batches from a CUDA graph."""


def batched(X: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Orthogonalise matrices (B,m,n) as torch's Muon does one."""
    a, b, c = coefficients
    tall = X.shape[1] > X.shape[2]
    X = X.mT if tall else X
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(eps)
    for _ in range(steps):
        A = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


class Float32Muon(torch.optim.Muon):
    """torch's Muon with its Newton-Schulz in float32: torch has it in bfloat16 and no setting."""

    def step(self, closure: Any = None) -> Any:
        module = torch.optim._muon
        before = module._zeropower_via_newtonschulz
        module._zeropower_via_newtonschulz = lambda G, *how: batched(G[None], *how)[0]
        try:
            return super().step(closure)
        finally:
            module._zeropower_via_newtonschulz = before
