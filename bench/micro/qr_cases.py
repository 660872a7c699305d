"""The batched QR of a step as cases: tracking and refresh, and KL-Shampoo's refresh of both factors.

Dimension key: B matrices, m short side, n long side, r rank, k columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import prokl.qr
from bench.costs import cholesky_qr
from bench.micro.case import FP32, Case, Draw, Dtypes, Inputs, Sizes, best
from prokl import extension
from prokl.qr import householder_qr

TRACKING_CONDITION = 1e3
REFRESH_CONDITION = 1e4
DRIFT = 0.1
"""Of V, of L and S, and of the bases from the eigenvectors: what tests/data/captured_factors.npz has, roughly."""
ORTHOGONALITY, BACKWARD = 100, 20
"""Largest ||Q^T Q - I||_F and ||A - Q R||_F / ||A||_F in units of k eps, R = triu(Q^T A), as in the tests."""


def bases(n: int, k: int, B: int, draw: Draw, orthonormal: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvectors X (B,n,k), and a basis that has drifted from them, both float64.

    The matrices of a batch are one, its rows in other orders. ``orthonormal=False``: the basis has shorter columns,
    no longer at right angles, as Q_S has between refreshes.
    """

    def normal(*size: int) -> Tensor:
        return draw(*size, dtype=torch.float64)

    X = torch.linalg.qr(normal(n, k))[0]
    basis = householder_qr(X + DRIFT * normal(n, k) / n**0.5)
    if not orthonormal:
        basis = basis + DRIFT * normal(n, k) / n**0.5
    order = normal(B, n).argsort(dim=-1)
    return X[order], basis[order]


def spectrum(condition: float, k: int, like: Tensor) -> Tensor:
    """k eigenvalues from 1 down to 1/condition, evenly in logarithms."""
    return condition ** -torch.linspace(0, 1, k, dtype=like.dtype, device=like.device)


def factor(k: int, B: int, draw: Draw, orthonormal: bool = True) -> tuple[Tensor, Tensor]:
    """A symmetric factor (B,k,k) and the basis that it is refreshed from, in float32."""
    X, Q = bases(k, k, B, draw, orthonormal)
    L = (X * spectrum(REFRESH_CONDITION, k, X)) @ X.mT
    return ((L + L.mT) / 2).float(), Q.float().contiguous()


def tracked(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
    """V = Phi U (B,n,r), K = U^T V and U, in float32."""
    X, U = bases(s.n, s.r, s.B, draw)
    V = X @ (spectrum(TRACKING_CONDITION, s.r, X)[:, None] * (X.mT @ U))
    K = U.mT @ V
    return {"V": V.float().contiguous(), "K": ((K + K.mT) / 2).float(), "U": U.float().contiguous()}


def refreshed(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
    """L, Q_L (B,m,m) and S, Q_S (B,r,r)."""
    return dict(zip(("L", "Q_L", "S", "Q_S"), factor(s.m, s.B, draw) + factor(s.r, s.B, draw, False), strict=True))


def both_sides(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
    """L, Q_L (B,m,m) and R, Q_R (B,n,n)."""
    return dict(zip(("L", "Q_L", "R", "Q_R"), factor(s.m, s.B, draw) + factor(s.n, s.B, draw), strict=True))


def long_side(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
    """R, Q_R (B,n,n)."""
    return dict(zip(("R", "Q_R"), factor(s.n, s.B, draw), strict=True))


def deviations(A: Tensor, Q: Tensor) -> str:
    """Why Q (B,n,k) is no QR of A (B,n,k) in float64, signs included; empty where it is one within the bounds."""
    if Q.shape != A.shape:
        return f"shape {tuple(Q.shape)}, must be {tuple(A.shape)}"
    k = A.shape[-1]
    unit = k * torch.finfo(Q.dtype).eps
    eye = torch.eye(k, dtype=A.dtype, device=A.device)
    found = []
    for a, q in zip(A, Q.double(), strict=True):  # one at a time: all of them may not fit in float64
        R = (q.mT @ a).triu()
        size = torch.linalg.matrix_norm(a)
        errors = torch.linalg.matrix_norm(q.mT @ q - eye), torch.linalg.matrix_norm(a - q @ R) / size
        found.append(torch.stack([*errors, (-R.diagonal().min() / size).clamp_min(0)]) / unit)
    worst = torch.stack(found).amax(dim=0).tolist()
    bounds = {"orthogonality": ORTHOGONALITY, "backward error": BACKWARD, "diagonal": BACKWARD}
    return ", ".join(
        f"{name} {value:.2g} k eps, may be {bound}"
        for (name, bound), value in zip(bounds.items(), worst, strict=True)
        if not value <= bound  # nan is wrong
    )


def verify_refresh(*pairs: tuple[str, str]) -> Callable[[Inputs, Any], str]:
    """Checks bases against qr(L Q) for the names of every factor L and its old basis Q."""

    def verify(i: Inputs, results: Any) -> str:
        found = [
            f"{Q}: {why}"
            for (L, Q), fresh in zip(pairs, results, strict=True)
            if (why := deviations(i[L].double() @ i[Q].double(), fresh))
        ]
        return "; ".join(found)

    return verify


def plain_refresh(*pairs: tuple[str, str]) -> Callable[[Inputs], Any]:
    """Householder's QR of L Q for every factor."""
    return lambda i: [householder_qr(i[L] @ i[Q]) for L, Q in pairs]


def _refresh_flops(k: int) -> float:
    return 2 * k**3 + cholesky_qr(k, k)


def _with_extension(i: Inputs, tile: Any) -> Any:
    from prokl import cuda_qr

    mm = best(i["L"].device).product
    return cuda_qr.refresh_basis(i["L"], i["Q_L"], mm), cuda_qr.refresh_coordinates(i["S"], i["Q_S"], mm)


def _track_with_extension(i: Inputs, tile: Any) -> Tensor:
    from prokl import cuda_qr

    return cuda_qr.track(**i)


def _with_torch(i: Inputs) -> Any:
    mm = best(i["L"].device).product
    return prokl.qr.refresh_basis(i["L"], i["Q_L"], mm), prokl.qr.refresh_coordinates(i["S"], i["Q_S"], mm)


def _kl_refresh(*pairs: tuple[str, str]) -> Callable[[Inputs], Any]:
    return lambda i: [best(i[L].device).refresh_basis(i[L], i[Q]) for L, Q in pairs]


def _kl(name: str, inputs: Any, sides: Callable[[Sizes], tuple[int, ...]], *pairs: tuple[str, str]) -> Case:
    return Case(
        name,
        None,
        inputs,
        None,
        _kl_refresh(*pairs),
        lambda s: s.B * sum(map(_refresh_flops, sides(s))),
        lambda s, d: 4 * s.B * sum(3 * k**2 for k in sides(s)),
        plain=plain_refresh(*pairs),
        verify=verify_refresh(*pairs),
    )


TRACKING = Case(
    "tracking QR",
    None,
    tracked,
    _track_with_extension,
    lambda i: prokl.qr.tracking_qr(**i, mm=best(i["V"].device).product),
    lambda s: s.B * cholesky_qr(s.n, s.r),
    lambda s, d: 4 * s.B * (2 * s.n * s.r + s.r**2),
    timed=(FP32,),
    plain=lambda i: householder_qr(i["V"]),
    counterpart=_kl("refresh of the long side, once in tau steps", long_side, lambda s: (s.n,), ("R", "Q_R")),
    verify=lambda i, Q: deviations(i["V"].double(), Q),
    obstacle=extension.obstacle,
    plain_on_cpu=True,
)
"""KL-Shampoo tracks no basis every step; it refreshes one of n x n once in tau steps, which stands beside this."""

REFRESH = Case(
    "refresh",
    None,
    refreshed,
    _with_extension,
    _with_torch,
    lambda s: s.B * (_refresh_flops(s.m) + _refresh_flops(s.r)),
    lambda s, d: 4 * s.B * 3 * (s.m**2 + s.r**2),
    timed=(FP32,),
    plain=plain_refresh(("L", "Q_L"), ("S", "Q_S")),
    counterpart=_kl("refresh of both sides", both_sides, lambda s: (s.m, s.n), ("L", "Q_L"), ("R", "Q_R")),
    verify=verify_refresh(("L", "Q_L"), ("S", "Q_S")),
    obstacle=extension.obstacle,
    plain_on_cpu=True,
)
