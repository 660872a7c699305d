"""What KL-Shampoo needs where Pro-KLShampoo has its primitives: the counterparts of :mod:`bench.micro.primitive_cases`.

The PyTorch forms are the lines of prokl/update_kl.py over the table that a step takes here; the plain ones are
prokl/reference_kl.py, weight by weight.

Dimension key: B matrices, m short side, n long side.
"""

from typing import Any

import torch
from torch import Tensor

from bench.micro.case import Case, Draw, Dtypes, Inputs, Sizes, best
from prokl import reference_kl
from prokl.shapes import ceiling
from prokl.torch_ops import clipped_ema

MOMENTUM, BETA2, EPS = 0.95, 0.95, 1e-8


def each(f: Any, *stacked: Tensor) -> tuple[Tensor, ...]:
    """``f`` of every matrix's own tensors, stacked again."""
    return tuple(map(torch.stack, zip(*[f(*own) for own in zip(*stacked, strict=True)], strict=True)))


def two_sided() -> Case:
    """Momentum, and Q_L [(Q_L^T M Q_R) * s/(1 + eps s)] Q_R^T."""
    keys = ("G", "M", "Q_L", "Q_R", "s_L", "s_R")

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return {
            "G": draw(s.B, s.m, s.n, dtype=d.weights).to(d.arithmetic),
            "M": draw(s.B, s.m, s.n, dtype=d.momentum),
            "Q_L": draw(s.B, s.m, s.m, dtype=d.arithmetic) / s.m**0.5,
            "Q_R": draw(s.B, s.n, s.n, dtype=d.arithmetic) / s.n**0.5,
            "s_L": draw(s.B, s.m, dtype=d.arithmetic).abs(),
            "s_R": draw(s.B, s.n, dtype=d.arithmetic).abs(),
        }

    def batched(i: Inputs) -> Any:
        G, M, Q_L, Q_R, s_L, s_R = (i[k] for k in keys)
        mm = best(G.device).product
        M = torch.lerp(M.to(G.dtype), G, 1 - MOMENTUM)
        s = s_L[:, :, None] * s_R[:, None, :]
        return M, mm(mm(Q_L, mm(mm(Q_L.mT, M), Q_R) * (s / (1 + EPS * s))), Q_R.mT)

    def one(G: Tensor, M: Tensor, Q_L: Tensor, Q_R: Tensor, s_L: Tensor, s_R: Tensor) -> tuple[Tensor, Tensor]:
        M = MOMENTUM * M + (1 - MOMENTUM) * G
        state = {"Q_L": Q_L, "Q_R": Q_R, "inv_sqrt_lambda_L": s_L, "inv_sqrt_lambda_R": s_R}
        return M, reference_kl.direction(M, state, EPS)

    return Case(
        "two-sided preconditioning",
        None,
        inputs,
        None,
        batched,
        lambda s: 4 * s.B * (s.m**2 * s.n + s.m * s.n**2),
        lambda s, d: s.B * (4 * s.m * s.n + s.m**2 + s.n**2) * d.arithmetic.itemsize,
        plain=lambda i: each(one, *(i[k] for k in keys)),
    )


def long_factor() -> Case:
    """R <- beta2 R + (1 - beta2)/m Y^T Y, for Y = Lambda_L^-1/2 Q_L^T G (m,n)."""

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        X = draw(s.B, s.n, s.n, dtype=d.arithmetic)
        return {"Y": draw(s.B, s.m, s.n, dtype=d.arithmetic), "R": X + X.mT}

    def batched(i: Inputs) -> Tensor:
        Y = i["Y"]
        return best(Y.device).symmetric_product(Y.mT, C=i["R"], beta=BETA2, alpha=(1 - BETA2) / Y.shape[1])

    return Case(
        "symmetric product of the long side",
        None,
        inputs,
        None,
        batched,
        lambda s: s.B * s.n * (s.n + 1) * s.m,
        lambda s, d: s.B * (s.m * s.n + 2 * s.n**2) * d.arithmetic.itemsize,
        plain=lambda i: BETA2 * i["R"] + (1 - BETA2) / i["Y"].shape[1] * i["Y"].mT @ i["Y"],
    )


def spectra() -> Case:
    """The statistics of A = Q_L^T G Q_R (m,n), and the EMA of both spectra."""
    keys = ("A", "s_L", "s_R")

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return {
            "A": draw(s.B, s.m, s.n, dtype=d.arithmetic),
            "s_L": draw(s.B, s.m, dtype=d.arithmetic).abs(),
            "s_R": draw(s.B, s.n, dtype=d.arithmetic).abs(),
        }

    def batched(i: Inputs) -> Any:
        A, s_L, s_R = (i[k] for k in keys)
        ell = (A * s_R[:, None, :]).square().mean(dim=-1)
        rho = (A * s_L[:, :, None]).square().mean(dim=-2)
        limits = [torch.full_like(A[:, :1, 0], ceiling(k)) for k in A.shape[1:]]
        return clipped_ema(s_L, ell, BETA2, limits[0]), clipped_ema(s_R, rho, BETA2, limits[1])

    def one(A: Tensor, s_L: Tensor, s_R: Tensor) -> tuple[Tensor, Tensor]:
        m, n = A.shape
        ell, rho = (A @ s_R.diag()).square().mean(dim=1), (s_L.diag() @ A).square().mean(dim=0)
        ema = reference_kl.eigenvalue_ema
        return ema(s_L, ell, BETA2, ceiling(m)), ema(s_R, rho, BETA2, ceiling(n))

    return Case(
        "eigenvalue EMA of both factors",
        None,
        inputs,
        None,
        batched,
        lambda s: 6 * s.B * s.m * s.n,
        lambda s, d: s.B * (s.m * s.n + 2 * (s.m + s.n)) * d.arithmetic.itemsize,
        plain=lambda i: each(one, *(i[k] for k in keys)),
    )
