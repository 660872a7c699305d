"""The primitives of the batched step as Triton launches; the arguments are those of :mod:`prokl.torch_ops`.

Products of float32 are split into three of TF32 (``tf32x3``), about as exact as float32 and several times as fast on
a GPU; torch's own TF32 switches touch none of them.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from prokl import cuda_qr, qr
from prokl.hyper import Hyper, ProHyper
from prokl.kernels.apply import apply as apply_kernel
from prokl.kernels.eigenvalue_ema import eigenvalue_ema
from prokl.kernels.newton_schulz import newton_schulz_factors
from prokl.kernels.precondition import can_use_precondition
from prokl.kernels.precondition import precondition as precondition_kernel
from prokl.kernels.product import product
from prokl.kernels.project import project as project_kernel
from prokl.kernels.residuals import residuals as residuals_kernel
from prokl.kernels.stack import stack as stack_kernel
from prokl.kernels.symmetric_product import symmetric_product
from prokl.links import Links
from prokl.ops import Primitives
from prokl.torch_ops import Direction


def stack(gradients: Sequence[Tensor | None], links: Links, negate: bool) -> tuple[Tensor, Tensor]:
    """G (B,m,n) in the weights' dtype and ||G||_F^2 (B,), through the table of addresses."""
    return stack_kernel(links.gradients.table, links.m, links.n, dtype=links.weight_dtype, negate=negate)


def silence(G: Tensor, live: Tensor | None) -> Tensor:
    """G as it is: project and residuals mask it, and what else reads it is thrown away where it is not finite."""
    return G


def project(G: Tensor, M: Tensor, U: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """G U and M U (B,m,r)."""
    return project_kernel(G, M, U, live=live)


def residuals(
    G: Tensor,
    M: Tensor,
    G_tilde: Tensor,
    G_par: Tensor | None,
    U: Tensor,
    momentum: float,
    weights: tuple[float, float, float],
    live: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Both residuals; M is updated in place and returned."""
    G_perp, G_hat_perp, size, whole = residuals_kernel(
        G, M, G_tilde, G_par, U, momentum=momentum, weights=weights, live=live, hat=G_par is not None
    )
    if size is None or whole is None:
        return M, G_perp, None, None
    return M, G_perp, G_hat_perp, size <= (100 * torch.finfo(G_perp.dtype).eps) ** 2 * whole


def precondition(P: Tensor, G_par: Tensor, Q_S: Tensor, a_S: Tensor, alpha: float) -> Tensor:
    """alpha P G_par S^-1/2 (B,m,r): one launch, or four products where r x r does not fit one program."""
    if can_use_precondition(P, G_par, Q_S, a_S):
        return precondition_kernel(P, G_par, Q_S, a_S, alpha=alpha)
    return product(P, product(product(G_par, Q_S) * a_S[:, None, :], Q_S.mT), alpha=alpha)


def polar(P: Tensor, G_perp: Tensor, negligible: Tensor, h: ProHyper) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Newton-Schulz of X = P G_perp as (Q, Y, scale); its norm comes with the product and is divided by in the next."""
    dtype = h.polar_dtype(P.dtype)
    X, energy = product(P, G_perp, out_dtype=torch.bfloat16 if dtype == torch.bfloat16 else None, energy=True)
    # Below the smallest normal number the square of the inverse norm, which the first product takes, overflows.
    vanishing = energy < torch.finfo(energy.dtype).tiny
    inverse = torch.where(negligible | vanishing, 0.0, energy.rsqrt())
    if X.dtype == dtype:
        return newton_schulz_factors(X, inverse, h.ns_steps, h.ns_coefficients)
    X = (X * inverse[:, None, None]).to(dtype)
    return newton_schulz_factors(X, None, h.ns_steps, h.ns_coefficients)


def apply(weights: Sequence[Tensor | None], links: Links, direction: Direction, h: Hyper, live: Tensor | None) -> None:
    """W <- (1 - lr weight_decay) W - lr D in one launch, straight into the weights that the table points at."""
    apply_kernel(
        links.weights.table,
        direction.X,
        dtype=links.weight_dtype,
        lr=links.lr,
        weight_decay=links.weight_decay,
        scale=direction.scale,
        Q=direction.Q,
        B=direction.B,
        U=direction.U,
        live=live,
    )


def table(extended: bool) -> Primitives:
    """The table of ``backend="triton"``; its QR is the CUDA extension's if ``extended``, PyTorch's otherwise."""
    return Primitives(
        "triton",
        linked=True,
        stack=stack,
        silence=silence,
        product=product,
        symmetric_product=symmetric_product,
        project=project,
        residuals=residuals,
        precondition=precondition,
        polar=polar,
        eigenvalue_ema=eigenvalue_ema,
        tracking_qr=cuda_qr.track if extended else partial(qr.tracking_qr, mm=product),
        refresh_basis=partial(cuda_qr.refresh_basis if extended else qr.refresh_basis, mm=product),
        refresh_coordinates=partial(cuda_qr.refresh_coordinates if extended else qr.refresh_coordinates, mm=product),
        apply=apply,
    )
