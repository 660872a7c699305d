"""The specification: Pro-KLShampoo for one weight in plain PyTorch, one function per line group of Algorithm 2.

For reading, and for checking the batched step. Nothing here is clever: explicit residuals, explicit
Newton-Schulz, Householder QR. Arithmetic in float32 or float64, as QR has no half-precision form; weights and state
may be stored in any floating dtype, and the caller converts.

Dimension key: m short side, n long side, r rank. All tensors are oriented, so m <= n.
State (one weight): M (m,n), U (n,r), L and Q_L (m,m), S and Q_S (r,r), inv_sqrt_lambda_L (m,),
inv_sqrt_lambda_S (r,), inv_sqrt_mu (), clipped (), and lambda_0 () when the start value is "auto".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prokl.algorithm.evidence import MOMENTUM_CLIP_FACTOR, UNITS
from prokl.algorithm.polynomials import Polynomial
from prokl.algorithm.qr import householder_qr
from prokl.algorithm.settings import POLAR_VARIANTS, SUBSPACE_VARIANTS, Hyper, ProHyper
from prokl.algorithm.shapes import State, ceiling, ceiling_factor


def in_weight_coordinates(state: State) -> State:
    """Return a step's state (B,...), or that of one matrix, with M, L and R in the place of M_Q, L_Q and R_Q.

    M_Q is Q_L^T M, of KL-Shampoo Q_L^T M Q_R; L_Q is Q_L^T L Q_L, and R_Q is Q_R^T R Q_R. All else is the same in both.
    """
    Q_L, Q_R, kept = state["Q_L"], state.get("Q_R"), {"M_Q", "L_Q", "R_Q"}
    new = {key: value for key, value in state.items() if key not in kept}
    M = Q_L @ state["M_Q"]
    new |= {"M": M if Q_R is None else M @ Q_R.mT, "L": Q_L @ state["L_Q"] @ Q_L.mT}
    return new if Q_R is None else new | {"R": Q_R @ state["R_Q"] @ Q_R.mT}


def in_eigenbases(state: State) -> State:
    """Undo :func:`in_weight_coordinates`, of orthonormal Q_L and Q_R."""
    Q_L, Q_R, kept = state["Q_L"], state.get("Q_R"), {"M", "L", "R"}
    new = {key: value for key, value in state.items() if key not in kept}
    M = Q_L.mT @ state["M"]
    new |= {"M_Q": M if Q_R is None else M @ Q_R, "L_Q": Q_L.mT @ state["L"] @ Q_L}
    return new if Q_R is None else new | {"R_Q": Q_R.mT @ state["R"] @ Q_R}


def damped(s: Tensor, state: State, eps: float) -> Tensor:
    """Damp (P2): 1/(sqrt(lambda) + eps) from s = lambda^-1/2; eps scales with sqrt(lambda_0) for "auto"."""
    start = state["lambda_0"].sqrt() if "lambda_0" in state else 1.0
    return s / (1 + eps * start * s)


def damped_roots(state: State, h: ProHyper) -> tuple[Tensor, Tensor, Tensor]:
    """Return the damped lambda_L^-1/2 (m,), lambda_S^-1/2 (r,) and mu_perp^-1/2 ()."""
    s_L, s_S, s_mu = (state[f"inv_sqrt_{key}"] for key in ("lambda_L", "lambda_S", "mu"))
    return damped(s_L, state, h.eps), damped(s_S, state, h.eps), damped(s_mu, state, h.eps)


def eigenvalue_ema(s: Tensor, statistic: Tensor, beta2: float, limit: Tensor | float) -> Tensor:
    """Return min((beta2 lambda + (1-beta2) statistic)^-1/2, limit) with lambda = s^-2 (eq. clamp_practical)."""
    ema = beta2 * s**-2 + (1 - beta2) * statistic
    return torch.minimum(ema.rsqrt(), torch.as_tensor(limit, dtype=s.dtype, device=s.device))


def newton_schulz(X: Tensor, polynomials: Sequence[Polynomial], dtype: torch.dtype | None = None) -> Tensor:
    """Do (P3): X <- aX + bXX^T X + c(XX^T)^2 X, once a polynomial, from X/||X||_F, in ``dtype``. X (m,n), m <= n.

    A zero X gives zero, as one whose squared norm underflows: what rounding leaves of it does not normalise X.
    """
    norm = torch.linalg.matrix_norm(X)
    if norm < torch.finfo(X.dtype).tiny ** 0.5:
        return torch.zeros_like(X)
    Y = (X / norm).to(dtype or X.dtype)
    for a, b, c in polynomials:
        A = Y @ Y.mT
        Y = a * Y + (b * A + c * A @ A) @ Y
    return Y.to(X.dtype)


def whitened_sizes(G: Tensor, state: State, h: ProHyper) -> tuple[Tensor, Tensor, float]:
    """Measure L^-1/2 G R^-1/2 of G (m,n) by root mean squares.

    Returns:
        Those of rows (m,), along Q_L, and of columns (r,), along Q_S; and the larger one of subspace and complement.
    """
    (m, n), U, Q_L, Q_S = G.shape, state["U"], state["Q_L"], state["Q_S"]
    r = U.shape[1]
    a_L, a_S, a_mu = (a.double() for a in damped_roots(state, h))
    Gt = G @ U
    G_perp = G - Gt @ U.mT
    inside = (a_L.diag() @ (Q_L.mT @ Gt @ Q_S).double() @ a_S.diag()).square()
    beside = (a_mu * a_L.diag() @ (Q_L.mT @ G_perp).double()).square()
    rows = ((inside.sum(dim=1) + beside.sum(dim=1)) / n).sqrt()
    overall = float(max(inside.sum() / (m * r), beside.sum() / (m * (n - r))) ** 0.5)
    return rows, inside.mean(dim=0).sqrt(), overall


def tempered(s: Tensor, sizes: Tensor, h: Hyper) -> tuple[Tensor, bool]:
    """Lower inverse roots (k,) of directions where c G has a size (k,) beyond the threshold; True if one is."""
    if h.clip_threshold is None or not math.isfinite(float(sizes.sum())):
        return s, False
    excess = sizes / h.clip_threshold
    return s / excess.clamp(min=1).to(s.dtype), bool((excess > 1).any())


def admit(size: float, rms: float, state: State, h: Hyper) -> tuple[float, bool, State]:
    """Decide, by its whitened size and its rms, what a gradient may do (:mod:`prokl.algorithm.evidence`).

    Returns:
        c, whether c G is evidence for factors, eigenvalues and bases, and the lambda_0 of an "auto" start.
    """
    kappa = h.clip_threshold
    if kappa is None:
        return 1.0, True, {}
    if not math.isfinite(size):
        return 0.0, False, {}
    changed = {}
    if "lambda_0" in state and rms > 0:
        changed["lambda_0"] = state["lambda_0"].clamp(max=max(h.beta2 * float(state["lambda_0"]), UNITS * rms))
    return min(1.0, kappa / size) if size > 0 else 1.0, True, changed


def bounded(whitened: Tensor, entries: int, h: Hyper) -> tuple[Tensor, bool]:
    """Scale a whitened part of the direction of so many entries to the norm that they may have; True where it was.

    One whose norm is beyond half the largest number of its dtype makes no step.
    """
    bound, norm = MOMENTUM_CLIP_FACTOR * h.gain * entries**0.5, float(torch.linalg.matrix_norm(whitened.double()))
    if h.clip_threshold is None or norm <= bound:
        return whitened, False
    held = norm < torch.finfo(whitened.dtype).max / 2
    return whitened * (bound / norm) if held else torch.zeros_like(whitened), True


def momentum_and_projection(
    G: Tensor, state: State, h: ProHyper, stored: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Do (1): M <- mu M + g G, G^ = a G + b M, G^par = G^ U, G^perp = G^ - G^par U^T. Returns M, G^par, G^perp."""
    g, a, b = h.gradient_weights
    M = h.momentum * state["M"] + g * G
    G_hat = a * G + b * M
    G_par = G_hat @ state["U"]
    G_perp = G_hat - G_par @ state["U"].mT
    noise = max(max(100, G.shape[1] / 64) * torch.finfo(G.dtype).eps, torch.finfo(stored or G.dtype).eps)
    if torch.linalg.matrix_norm(G_perp) <= noise * torch.linalg.matrix_norm(G_hat):
        G_perp = torch.zeros_like(G_perp)  # rounding noise; Newton-Schulz would inflate it to a full step
    return M, G_par, G_perp


def direction(
    G_par: Tensor, G_perp: Tensor, state: State, h: ProHyper, aspect_scale: float, rows: Tensor, columns: Tensor
) -> tuple[Tensor, bool]:
    """Do (2): Delta_res + alpha_kl Delta_sub (m,n), or the part of it that the variant keeps; True where bounded.

    Delta_res = c_a NS(L^-1/2 G^perp), Smok-Hop's mu_perp^-1/2 L^-1/2 G^perp; Delta_sub = L^-1/2 G^par S^-1/2 U^T.
    Under "match_rms_adamw" the whole is scaled to AdamW's size, the balance of its parts unchanged, and c_a is 1.

    Args:
        G_par, G_perp: the momentum gradient's two parts, (m,r) and (m,n).
        rows, columns: sizes of c G (m,), (r,); directions of a factor in which they are beyond the threshold shrink.
    """
    (m, n), r, Q_L, Q_S = G_perp.shape, G_par.shape[1], state["Q_L"], state["Q_S"]
    a_L, a_S, a_mu = damped_roots(state, h)
    (a_L, left), (a_S, right) = tempered(a_L, rows, h), tempered(a_S, columns, h)
    root_L, total, cut = Q_L @ a_L.diag() @ Q_L.mT, torch.zeros_like(G_perp), left or right
    if h.variant in POLAR_VARIANTS:
        polar_factor = newton_schulz(root_L @ G_perp, h.polynomials, h.ns_dtype)
        total = total + (aspect_scale if h.adjust_lr_fn == "original" else 1.0) * polar_factor
    elif h.variant == "smok-hop":
        whitened, beyond = bounded(a_mu * (root_L @ G_perp), m * (n - r), h)
        total, cut = total + whitened, cut or beyond
    if h.variant in SUBSPACE_VARIANTS:
        whitened, beyond = bounded(root_L @ G_par @ Q_S @ a_S.diag() @ Q_S.mT, m * r, h)
        total, cut = total + h.alpha_kl * (whitened @ state["U"].mT), cut or (beyond and h.alpha_kl > 0)
    return h.direction_scale * total, cut


def decayed(W: Tensor, D: Tensor, h: Hyper) -> Tensor:
    """Return (1 - lr weight_decay) W; cautiously only where a step along -D does not grow the weight. W, D (m,n)."""
    shrunk = (1 - h.lr * h.weight_decay) * W
    return torch.where(D * W >= 0, shrunk, W) if h.cautious_weight_decay else shrunk


def statistics(G: Tensor, state: State, h: ProHyper) -> State:
    """Do (3): eigenvalue and factor EMAs of the raw gradient; lambda_L, lambda_S, then mu_perp, L, S with the new."""
    (m, n), U, Q_L, Q_S = G.shape, state["U"], state["Q_L"], state["Q_S"]
    r, factor = U.shape[1], ceiling_factor(state)
    Gt = G @ U
    G_perp = G - Gt @ U.mT

    a_L, a_S, a_mu = damped_roots(state, h)
    ldiag = (Q_L.mT @ Gt @ Q_S @ a_S.diag()).square().mean(dim=1)
    rdiag = (a_L.diag() @ Q_L.mT @ Gt @ Q_S).square().mean(dim=0)
    e_res = (Q_L.mT @ G_perp).square().sum(dim=1)

    s_L = eigenvalue_ema(state["inv_sqrt_lambda_L"], (r * ldiag + a_mu**2 * e_res) / n, h.beta2, ceiling(m) * factor)
    s_S = eigenvalue_ema(state["inv_sqrt_lambda_S"], rdiag, h.beta2, ceiling(n) * factor)
    a_L, a_S = damped(s_L, state, h.eps), damped(s_S, state, h.eps)
    tail = (e_res * a_L**2).sum() / (m * (n - r))
    s_mu = eigenvalue_ema(state["inv_sqrt_mu"], tail, h.beta2, ceiling(n) * factor)  # mu_perp
    a_mu = damped(s_mu, state, h.eps)

    X = Gt @ Q_S @ a_S.diag()
    Z = a_L.diag() @ Q_L.mT @ Gt
    L = h.beta2 * state["L"] + (1 - h.beta2) / n * (X @ X.mT + a_mu**2 * G_perp @ G_perp.mT)
    S = h.beta2 * state["S"] + (1 - h.beta2) / m * Z.mT @ Z
    return {"inv_sqrt_lambda_L": s_L, "inv_sqrt_lambda_S": s_S, "inv_sqrt_mu": s_mu, "L": L, "S": S}


def track_subspace(G: Tensor, state: State, h: ProHyper) -> State:
    """Do (4): U_+ = qr(beta2 U S + (1-beta2)/m G^T L^-1 G U); S and Q_S turn with T = U^T U_+."""
    U, S, Q_L, a_L = state["U"], state["S"], state["Q_L"], damped_roots(state, h)[0]
    sample = G.mT @ Q_L @ (a_L**2).diag() @ Q_L.mT @ G @ U / G.shape[0]
    U_new = householder_qr(h.beta2 * U @ S + (1 - h.beta2) * sample)
    T = U.mT @ U_new
    return {"U": U_new, "S": T.mT @ S @ T, "Q_S": T.mT @ state["Q_S"]}


def refresh_eigenbases(state: State) -> State:
    """Do (5): Q_L <- qr(L Q_L), Q_S <- qr(S Q_S); of KL-Shampoo Q_R <- qr(R Q_R)."""
    return {f"Q_{key}": householder_qr(state[key] @ state[f"Q_{key}"]) for key in ("L", "S", "R") if key in state}


def step(
    W: Tensor, G: Tensor, state: State, h: ProHyper, *, aspect_scale: float, stored: torch.dtype | None = None
) -> tuple[Tensor, State]:
    """Do (1) to (4) of Algorithm 2 after the initialising step, on c G for G, for one oriented weight.

    Without ``clip_threshold`` c is 1: the algorithm as printed, but for what docs/algorithm.md names.
    :func:`refresh_eigenbases` follows where the method ``refreshes``.

    Args:
        W, G: weight and finite gradient (m,n), m <= n, in the arithmetic dtype (float32 or float64).
        state: as in the module docstring, in the arithmetic dtype.
        aspect_scale: c_a, from the weight's original rows and columns.
        stored: dtype that the state is kept in between steps, if not W's: what U loses there is no complement.

    Returns:
        The new weight and the new state. Nothing is modified in place.
    """
    rows, columns, size = whitened_sizes(G, state, h)
    c, evident, decided = admit(size, float(G.double().square().mean().sqrt()), state, h)
    M, G_par, G_perp = momentum_and_projection(c * G, state, h, stored)
    delta, cut = direction(G_par, G_perp, state, h, aspect_scale, c * rows, c * columns)
    W = decayed(W, delta, h) - h.lr * delta
    new = state | {"M": M}
    if evident:
        new |= statistics(c * G, state, h)
        new |= track_subspace(c * G, new, h)
    return W, new | decided | {"clipped": state["clipped"] + float(c < 1 or cut)}
