"""The primitives of a step, each beside its plain form and what KL-Shampoo needs in its place, for the microbenchmarks.

Those that are one kernel are cases of :mod:`bench.micro.kernel_cases`, with a plain form and a counterpart; the others
are the lines of prokl/update.py over a table. Plain forms are those of prokl/reference.py, batched.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.micro.case import FP32, Case, Draw, Dtypes, Inputs, Sizes, item
from bench.micro.kernel_cases import LR, MOMENTUM, WEIGHT_DECAY, WEIGHTS, apply_case
from bench.micro.kl_cases import BETA2, long_factor, spectra, two_sided
from bench.micro.product_cases import NS_COEFFICIENTS, NS_STEPS, newton_schulz_case, symmetric_case
from bench.micro.qr_cases import REFRESH, TRACKING
from prokl import ops
from prokl.torch_ops import damp

ALPHA = 0.01
EPS = 1e-8


def _plain_newton_schulz(i: Inputs) -> Tensor:
    X = i["X"] * i["inverse_norm"].to(i["X"].dtype)[:, None, None]
    a, b, c = NS_COEFFICIENTS
    for _ in range(NS_STEPS):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def _newton_schulz() -> Case:
    return replace(
        newton_schulz_case(None),
        name="Newton-Schulz",
        plain=_plain_newton_schulz,
        counterpart=two_sided(),
    )


def _symmetric_product() -> Case:
    return replace(
        symmetric_case("symmetric product", lambda s: (s.m, s.n), timed=(FP32,)),
        plain=lambda i: i["A"] @ i["A"].mT,
        counterpart=long_factor(),
    )


def _preconditioning() -> Case:
    keys = ("G", "M", "U", "Q_L", "Q_S", "a_L", "a_S")

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return {
            "G": draw(s.B, s.m, s.n, dtype=d.weights),
            "M": draw(s.B, s.m, s.n, dtype=d.momentum),
            "U": draw(s.B, s.n, s.r, dtype=d.arithmetic) / s.n**0.5,
            "Q_L": draw(s.B, s.m, s.m, dtype=d.arithmetic) / s.m**0.5,
            "Q_S": draw(s.B, s.r, s.r, dtype=d.arithmetic) / s.r**0.5,
            "a_L": draw(s.B, s.m, dtype=d.arithmetic).abs(),
            "a_S": draw(s.B, s.r, dtype=d.arithmetic).abs(),
        }

    def over(table: ops.Primitives, i: Inputs) -> Any:
        """(1) and the products of (2), as prokl/update.py has them."""
        G, M, U, Q_L, Q_S, a_L, a_S = (i[k] for k in keys)
        g, a, b = WEIGHTS
        Gt, Mt = table.project(G, M, U, None)
        G_par = (a + b * g) * Gt + b * MOMENTUM * Mt
        M, G_perp, G_hat_perp, _ = table.residuals(G, M, Gt, G_par, U, MOMENTUM, WEIGHTS, None)
        P = table.symmetric_product(Q_L * a_L.sqrt()[:, None, :])
        return M, G_perp, table.precondition(P, G_par, Q_S, a_S, ALPHA), table.product(P, G_hat_perp)

    def triton(i: Inputs, tile: Any) -> Any:
        from prokl.triton_ops import table

        return over(table(extended=False), i)

    def plain(i: Inputs) -> Any:
        G, M, U, Q_L, Q_S, a_L, a_S = (i[k] for k in keys)
        g, a, b = WEIGHTS
        M = MOMENTUM * M + g * G
        G_hat = a * G + b * M
        G_par = G_hat @ U
        subspace = Q_L @ torch.diag_embed(a_L) @ Q_L.mT @ G_par @ Q_S @ torch.diag_embed(a_S) @ Q_S.mT
        G_hat_perp = G_hat - G_par @ U.mT
        whitened = Q_L @ torch.diag_embed(a_L) @ Q_L.mT @ G_hat_perp
        return M, G - (G @ U) @ U.mT, ALPHA * subspace, whitened

    def flops(s: Sizes) -> float:
        projected = 8 * s.m * s.n * s.r  # G U, M U and both residuals
        return s.B * (projected + s.m**2 * (s.m + 1) + 2 * s.m * s.r * (s.m + 2 * s.r) + 2 * s.m**2 * s.n)

    def moved(s: Sizes, d: Dtypes) -> float:
        large = s.m * s.n * item(d.weights, d.momentum, d.momentum, d.arithmetic, d.arithmetic)
        return s.B * (large + (s.n * s.r + s.m * s.m + s.r * s.r + s.m * s.r) * d.arithmetic.itemsize)

    return Case(
        "projection and preconditioning",
        None,
        inputs,
        triton,
        lambda i: over(ops.TORCH, i),
        flops,
        moved,
        timed=(FP32,),
        plain=plain,
        counterpart=two_sided(),
    )


def _eigenvalue_ema() -> Case:
    state = ("inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_mu")
    limits = ("eps", "ceiling_L", "ceiling_S", "ceiling_mu")

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        def positive(*shape: int) -> Tensor:
            return draw(*shape, dtype=d.arithmetic).abs()

        spectrum = zip(state, ((s.B, s.m), (s.B, s.r), (s.B,)), strict=True)
        tensors = {k: positive(*shape) for k, shape in spectrum}
        tensors |= {"eps": EPS * positive(s.B)} | {k: 10 + positive(s.B) for k in limits[1:]}
        tensors |= {"A": draw(s.B, s.m, s.r, dtype=d.arithmetic)}  # Q_L^T G U Q_S
        # E Q_L and Q_L, of which the diagonal of Q_L^T E Q_L is made, a sum of squares.
        return tensors | {"EQ": positive(s.B, s.m, s.m), "Q_L": positive(s.B, s.m, s.m), "n": s.n}

    def over(table: ops.Primitives, i: Inputs) -> Any:
        A = i["A"]
        s_L, s_S, s_mu = (i[k] for k in state)
        a_L, a_S = damp(s_L, i["eps"]), damp(s_S, i["eps"])
        ell = (A * a_S[:, None, :]).square().sum(dim=-1)
        rho = (A * a_L[:, :, None]).square().mean(dim=-2)
        e_res = (i["EQ"] * i["Q_L"]).sum(dim=-2).clamp_(min=0)
        own = {k: i[k] for k in limits}
        return table.eigenvalue_ema(s_L, s_S, s_mu, ell, rho, e_res, beta2=BETA2, n=i["n"], **own)

    def triton(i: Inputs, tile: Any) -> Any:
        from prokl.triton_ops import table

        return over(table(extended=False), i)

    def plain(i: Inputs) -> Any:
        A, n = i["A"], i["n"]
        m, r = A.shape[1:]
        lambda_L, lambda_S, mu = (i[k] ** -2 for k in state)
        eps = i["eps"][:, None]
        a_L, a_S = (torch.diag_embed(1 / (x.sqrt() + eps)) for x in (lambda_L, lambda_S))
        e_res = (i["EQ"] * i["Q_L"]).sum(dim=-2)
        a_mu = 1 / (mu.sqrt() + i["eps"])[:, None]
        ldiag, rdiag = (A @ a_S).square().mean(dim=-1), (a_L @ A).square().mean(dim=-2)
        lambda_L = BETA2 * lambda_L + (1 - BETA2) * (r * ldiag + a_mu**2 * e_res) / n
        s_L = torch.minimum(lambda_L**-0.5, i["ceiling_L"][:, None])
        s_S = torch.minimum((BETA2 * lambda_S + (1 - BETA2) * rdiag) ** -0.5, i["ceiling_S"][:, None])
        tail = (e_res / (1 / s_L + eps) ** 2).sum(dim=-1) / (m * (n - r))
        return s_L, s_S, torch.minimum((BETA2 * mu + (1 - BETA2) * tail) ** -0.5, i["ceiling_mu"])

    return Case(
        "eigenvalue EMA",
        None,
        inputs,
        triton,
        lambda i: over(ops.TORCH, i),
        lambda s: s.B * (6 * s.m * s.r + 2 * s.m**2 + 12 * s.m + 6 * s.r),
        lambda s, d: s.B * (s.m * s.r + 2 * s.m**2 + 2 * (s.m + s.r)) * d.arithmetic.itemsize,
        timed=(FP32,),
        plain=plain,
        counterpart=spectra(),
    )


def _apply() -> Case:
    def plain(i: Inputs) -> Any:
        D = i["scale"][:, None, None] * i["X"] + i["B"] @ i["U"].mT
        for W, own in zip(i["matrices"], D, strict=True):
            W.copy_((1 - LR * WEIGHT_DECAY) * W - LR * own)
        return i["matrices"]

    return replace(
        apply_case(Q=False, B=True),
        name="apply",
        timed=(FP32,),
        plain=plain,
        counterpart=replace(apply_case(Q=False, B=False), name="apply of a dense direction"),
    )


PRIMITIVES: tuple[Case, ...] = (
    _preconditioning(),
    _newton_schulz(),
    _apply(),
    _symmetric_product(),
    _eigenvalue_ema(),
    TRACKING,
    REFRESH,
)
"""In the order of a step. Their ``call`` stands for several launches where they are several kernels."""
