"""The specification of KL-Shampoo for one weight, as its authors coded it (Lin et al., "KL-Methods").

Dimension key: m short side, n long side. All tensors are oriented, so m <= n.
State (one weight): M (m,n), L and Q_L (m,m), R and Q_R (n,n), inv_sqrt_lambda_L (m,), inv_sqrt_lambda_R (n,),
clipped (), and lambda_0 () when the start value is "auto".
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm.reference import admit, bounded, decayed, eigenvalue_ema, tempered
from prokl.algorithm.settings import Hyper
from prokl.algorithm.shapes import State, ceiling, ceiling_factor


def whitened_sizes(G: Tensor, state: State) -> tuple[Tensor, Tensor, float]:
    """Measure L^-1/2 G R^-1/2 (m,n): its rows (m,), its columns (n,) and all of it."""
    s = state["inv_sqrt_lambda_L"].double().outer(state["inv_sqrt_lambda_R"].double())
    squares = ((state["Q_L"].mT @ G @ state["Q_R"]).double() * s).square()
    return squares.mean(dim=1).sqrt(), squares.mean(dim=0).sqrt(), float(squares.mean().sqrt())


def direction(M: Tensor, state: State, h: Hyper, rows: Tensor, columns: Tensor) -> tuple[Tensor, bool]:
    """Compute Q_L [(Q_L^T M Q_R) * s/(1 + eps s)] Q_R^T with s = lambda_L^-1/2 (x) lambda_R^-1/2. M (m,n) -> (m,n).

    The damping acts once, on the product of both sides; for "auto" it scales with lambda_0. Under "match_rms_adamw"
    the direction is scaled to AdamW's size. True where bounded, as by the sizes (m,) and (n,) of c G.
    """
    Q_L, Q_R = state["Q_L"], state["Q_R"]
    start = state["lambda_0"] if "lambda_0" in state else 1.0
    s_L, left = tempered(state["inv_sqrt_lambda_L"], rows, h)
    s_R, right = tempered(state["inv_sqrt_lambda_R"], columns, h)
    s = s_L.outer(s_R)
    whitened, cut = bounded((Q_L.mT @ M @ Q_R) * (s / (1 + h.eps * start * s)), M.numel(), h)
    return h.direction_scale * (Q_L @ whitened @ Q_R.mT), cut or left or right


def statistics(G: Tensor, state: State, beta2: float) -> State:
    """Update the EMAs of both factors and both spectra, each side whitened by the other side's old eigenvalues."""
    (m, n), Q_L, Q_R, factor = G.shape, state["Q_L"], state["Q_R"], ceiling_factor(state)
    s_L, s_R = state["inv_sqrt_lambda_L"], state["inv_sqrt_lambda_R"]
    X = G @ Q_R @ s_R.diag()
    Y = G.mT @ Q_L @ s_L.diag()
    A = Q_L.mT @ G @ Q_R
    ell = (A * s_R).square().mean(dim=1)
    rho = (A * s_L[:, None]).square().mean(dim=0)
    return {
        "L": beta2 * state["L"] + (1 - beta2) / n * X @ X.mT,
        "R": beta2 * state["R"] + (1 - beta2) / m * Y @ Y.mT,
        "inv_sqrt_lambda_L": eigenvalue_ema(s_L, ell, beta2, ceiling(m) * factor),
        "inv_sqrt_lambda_R": eigenvalue_ema(s_R, rho, beta2, ceiling(n) * factor),
    }


def step(
    W: Tensor, G: Tensor, state: State, h: Hyper, *, aspect_scale: float, stored: torch.dtype | None = None
) -> tuple[Tensor, State]:
    """Do one step after the initialising one, on c G; weight decay comes after the step, on the updated weight.

    Cautiously it then acts where the updated weight still has the direction's sign: not where the step went past zero.
    Without ``clip_threshold`` c is 1: the authors' form. The refresh is :mod:`prokl.algorithm.reference`'s.

    Args:
        W, G: weight and finite gradient (m,n), m <= n, in the arithmetic dtype.
        state: as in the module docstring, in the arithmetic dtype.
        aspect_scale, stored: not read, as the method has no c_a and no subspace.

    Returns:
        The new weight and the new state. Nothing is modified in place.
    """
    rows, columns, size = whitened_sizes(G, state)
    c, evident, decided = admit(size, float(G.double().square().mean().sqrt()), state, h)
    M = h.momentum * state["M"] + (1 - h.momentum) * (c * G)
    delta, cut = direction(M, state, h, c * rows, c * columns)
    W = W - h.lr * delta
    W = decayed(W, delta, h)
    new = state | {"M": M} | (statistics(c * G, state, h.beta2) if evident else {})
    return W, new | decided | {"clipped": state["clipped"] + float(c < 1 or cut)}
