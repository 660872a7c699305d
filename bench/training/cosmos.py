"""COSMOS, written from its published description, for comparison only: SOAP on a tracked subspace, Muon outside it.

Dimension key: m rows, n columns, r rank. The subspace is one of the columns' side, whichever side is longer.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from bench.rivals import OneByOne
from prokl.algorithm.algebra import Algebra
from prokl.algorithm.newton_schulz import newton_schulz
from prokl.algorithm.polynomials import MUON

NS_STEPS = 5


def orthogonalised(X: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute Newton-Schulz with products in ``dtype``, scaled to a root mean square of 1."""
    wide = X if X.shape[0] <= X.shape[1] else X.mT
    start = (wide / wide.norm().clamp_min(1e-7)).to(dtype)[None]
    ops, one = Algebra(X.device.type == "cpu"), torch.ones(1, device=X.device)
    Y = newton_schulz(start, None, one, (MUON,) * NS_STEPS, ops, gram=False)[0][0].to(X.dtype)
    Y = Y if wide is X else Y.mT
    return Y * (X.numel() ** 0.5 / Y.norm().clamp_min(1e-7))


class Cosmos(OneByOne):
    """COSMOS for weights of two dimensions, one after another as its authors step them.

    ``lr`` is the root mean square of an update, ``betas`` are those of the momentum and of the second moments, ``eps``
    is added to the root of these, and ``gamma`` is the weight of the orthogonalised part, as in the paper's appendix
    "Comparison with COSMOS". State of a weight: step, M (m,n), P (n,r), S (r,r), V (m,r).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        rank: int = 64,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        gamma: float = 0.25,
        weight_decay: float = 0.0,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {"lr": lr, "rank": rank, "betas": betas, "eps": eps, "gamma": gamma, "weight_decay": weight_decay}
        defaults["ns_dtype"] = ns_dtype
        super().__init__(params, defaults)

    def _step(self, W: Tensor, G: Tensor, group: dict) -> None:
        (m, n), (beta1, beta2), s = W.shape, group["betas"], self.state[W]
        if not s:
            P = torch.linalg.svd(G, full_matrices=False).Vh.mT[:, : group["rank"]].contiguous()
            GP = G @ P
            s.update(step=0, M=torch.zeros_like(W), P=P, S=(1 - beta2) * (GP.mT @ GP), V=GP.new_zeros(GP.shape))
        else:
            P = torch.linalg.qr(beta2 * (s["P"] @ s["S"]) + (1 - beta2) * (G.mT @ (G @ s["P"]))).Q
            T, GP = s["P"].mT @ P, G @ P
            s.update(P=P, S=beta2 * (T.mT @ s["S"] @ T) + (1 - beta2) * (GP.mT @ GP))
        s["step"] += 1
        t, M, V = s["step"], s["M"].mul_(beta1).add_(G), s["V"].mul_(beta2).addcmul_(GP, GP, value=1 - beta2)
        weights = (1 - beta1**t) / (1 - beta1)  # sum of the weights of the gradients in M
        ahead = (G + beta1 * M) / (1 + beta1 * weights)
        inside = ahead @ P
        outside = orthogonalised(torch.addmm(ahead, inside, P.mT, alpha=-1), group["ns_dtype"])
        update = torch.addmm(outside, inside / ((V / (1 - beta2**t)).sqrt() + group["eps"]), P.mT, beta=group["gamma"])
        W.mul_(1 - group["lr"] * group["weight_decay"])
        W.sub_(update * (group["lr"] * (m * n) ** 0.5 / (update.norm() + group["eps"])))
