"""The batched step of KL-Shampoo, both factors whole; same front end and same batching as Pro-KLShampoo.

Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.hyper import Hyper
from prokl.ops import Primitives
from prokl.shapes import ceiling
from prokl.torch_ops import Direction, clipped_ema
from prokl.update import Call, State, refresh_rows


def workspace(m: int, n: int, r: int) -> int:
    """Elements of temporary memory that a step needs for one matrix at most, whatever the state's dtype."""
    return 8 * m * n + 9 * n * n + 8 * m * m


def step(G: Tensor, state: State, h: Hyper, call: Call, ops: Primitives) -> tuple[Direction, State]:
    """One step after the initialising one; arguments and results as in :func:`prokl.update.step`.

    The direction already carries the factor 1 - lr * weight_decay that makes the common weight update decay
    after the step, on the updated weight, as the authors' code does.
    """
    _, m, n = G.shape
    mm = ops.product
    Q_L, Q_R = state["Q_L"], state["Q_R"]
    s_L, s_R = state["inv_sqrt_lambda_L"], state["inv_sqrt_lambda_R"]
    scale = state["lambda_0"].rsqrt() if "lambda_0" in state else torch.ones_like(s_L[:, 0])
    eps = (h.eps / scale**2)[:, None, None]

    G = ops.silence(G, call.live).to(s_L.dtype)
    M = torch.lerp(state["M"].to(G.dtype), G, 1 - h.momentum)
    s = s_L[:, :, None] * s_R[:, None, :]
    delta = mm(mm(Q_L, mm(mm(Q_L.mT, M), Q_R) * (s / (1 + eps * s))), Q_R.mT)

    GQ, QtG = mm(G, Q_R), mm(Q_L.mT, G)
    A = mm(QtG, Q_R)
    ell = (A * s_R[:, None, :]).square().mean(dim=-1)
    rho = (A * s_L[:, :, None]).square().mean(dim=-2)
    X, Y = GQ * s_R[:, None, :], QtG * s_L[:, :, None]
    gain = 1 - h.beta2
    new = {
        "M": M,
        "L": ops.symmetric_product(X, C=state["L"], beta=h.beta2, alpha=gain / n),
        "R": ops.symmetric_product(Y.mT, C=state["R"], beta=h.beta2, alpha=gain / m),
        "Q_L": Q_L,
        "Q_R": Q_R,
        "inv_sqrt_lambda_L": clipped_ema(s_L, ell, h.beta2, (ceiling(m) * scale)[:, None]),
        "inv_sqrt_lambda_R": clipped_ema(s_R, rho, h.beta2, (ceiling(n) * scale)[:, None]),
    }
    if "lambda_0" in state:
        new["lambda_0"] = state["lambda_0"]
    refresh_rows(new, "Q_L", call.refresh, lambda i: ops.refresh_basis(new["L"][i], new["Q_L"][i]))
    refresh_rows(new, "Q_R", call.refresh, lambda i: ops.refresh_basis(new["R"][i], new["Q_R"][i]))
    return Direction(call.decay * delta), new
