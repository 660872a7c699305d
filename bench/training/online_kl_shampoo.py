"""Online KL-Shampoo (Zhang, Keigwin, Pai, Dewulf; Tilde Research, 2026), from its formulas, for comparison only.

https://blog.tilderesearch.com/blog/online-kl-shampoo: both factors whole, with inverse roots of this step's. Roots are
by eigenvalues in the weight's dtype; the authors' iteration in float16 is a GPU's.

Dimension key: m rows, n columns.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from bench.rivals import OneByOne


def inverse_root(S: Tensor, eps: float) -> Tensor:
    """Return S^(-1/2) of a symmetric S; eigenvalues below eps, or that may be rounding alone, count as that."""
    values, Q = torch.linalg.eigh(S)
    floor = max(eps, torch.finfo(S.dtype).eps * float(values[-1]))
    return (Q * values.clamp_min(floor).rsqrt()) @ Q.mT


def started(gram: Tensor, weight: float, eps: float) -> Tensor:
    """Return a factor from the first gradient: its Gram matrix times weight, and the rms eigenvalue of that on top."""
    S = weight * gram
    S.diagonal().add_(S.norm() / len(S) ** 0.5 + eps)
    return S


class OnlineKLShampoo(OneByOne):
    """Online KL-Shampoo for weights of two dimensions, one after another.

    The first gradient that is not zero begins the state: by its formulas a zero one, as behind projections that start
    at zero, would leave factors that some hundred steps are spent on.

    ``lr`` is the largest singular value of an update to independent gradients, over sqrt(m / n), ``momentum`` the
    weight of the EMA of gradients, which the direction takes, Nesterov's way, one step further, and ``beta2`` that of
    the factors' EMAs. State of a weight: M (m,n), S_a, P_a (m,m), S_b, P_b (n,n).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.09434,
        momentum: float = 0.9684,
        beta2: float = 0.9482,
        eps: float = 1e-9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        )

    def _step(self, W: Tensor, G: Tensor, group: dict) -> None:
        (m, n), s, eps = W.shape, self.state[W], group["eps"]
        if not s and not G.any():
            return
        beta1, beta2 = group["momentum"], group["beta2"]
        if not s:
            size = G.norm()
            s["M"] = torch.zeros_like(W)
            s["S_a"] = started(G @ G.mT, (m / n) ** 0.5 / size, eps)
            s["S_b"] = started(G.mT @ G, (n / m) ** 0.5 / size, eps)
            s.update(P_a=inverse_root(s["S_a"], eps), P_b=inverse_root(s["S_b"], eps))
        s["M"].lerp_(G, 1 - beta1)
        for S, whitened, count in (("S_a", G @ s["P_b"], n), ("S_b", (s["P_a"] @ G).mT, m)):
            s[S].addmm_(whitened, whitened.mT, beta=beta2, alpha=(1 - beta2) / count)
            s[S].diagonal().add_(eps)
        s.update(P_a=inverse_root(s["S_a"], eps), P_b=inverse_root(s["S_b"], eps))
        # The variance of the momentum of independent gradients of variance 1.
        variance = (1 - beta1) / (1 + beta1) * (1 + 2 * beta1 - 2 * beta1**3)
        scale = (m / n) ** 0.5 / (m**0.5 + n**0.5) / variance**0.5
        W.mul_(1 - group["lr"] * group["weight_decay"])
        W.sub_(s["P_a"] @ G.lerp(s["M"], beta1) @ s["P_b"], alpha=group["lr"] * scale)
