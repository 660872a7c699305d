"""Check a QR in float64: orthogonality, backward error, R's diagonal, spans and the same Q.

With eps of the dtype and A the exact product of the inputs (``factored``), R = triu(Q^T A) has to satisfy

    ||Q^T Q - I||_F <= 100 k eps,    ||A - Q R||_F <= 20 k eps ||A||_F,    diag(R) >= -20 k eps ||A||_F.

The factors are a choice, not a derivation: LAPACK's Householder QR was measured at up to 2.5 and 3.6 k eps on these
classes (both for k = 1), and an algorithm that loses digits to the condition exceeds the bounds by that. A shift of V
by delta U with ||delta U||_F <= 4 k eps ||V||_F stays inside.

The last two follow from the first where A has full rank, and are checked against Householder in float64 instead of
trusting that. Let A + E = Q R with ||E||_F <= e, s the smallest singular value of A (or of its leading j columns,
with their part of E), x = e / s < 1:

* Spans. (I - Q Q^T) A = -(I - Q Q^T) E for Q made orthonormal, so the sine of the largest angle between the spans is
  at most x.
* The same Q. Without rounding of Q, A + tE = Q(t) R(t) gives Q^T Q' = W skew with the strictly lower part of
  Q^T E R^-1, and (I - Q Q^T) Q' = (I - Q Q^T) E R^-1; so ||Q'||_F <= sqrt(2) e / (s - t e), in all
  -sqrt(2) log(1 - x). Columns that are not orthonormal, Q = P (I + H) with ||H||_F = d / 2, add d: d / 2 to P, and
  d / 2 from P to the Q of P (I + H) R, which does not depend on R's condition.

Both are checked where x <= 1/2; that includes R's diagonal being positive, as -Q would be 2 away. Where e is too large
for that and the condition is at most 0.01 / eps, the sine of the spans' angle has to be at most
8 sqrt(k) eps ||A||_F / s, twice the largest that was measured over all forms and classes: 4.1, of a shift.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.qr_problems import Inputs

ORTHOGONALITY = 100
BACKWARD = 20
"""Bound of the backward error in units of k eps; see above."""
SPAN = 8
"""Bound of the spans' distance in units of sqrt(k) eps ||A||_F / s; see above."""
FULL = 0.5
"""Largest x at which spans and Q are determined well enough to be compared."""


def factored(operation: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """A (B,n,k) in float64, exact up to its rounding, and the norm (B,) that its backward error is relative to.

    That norm is ||A||_F but for coordinates: S Q is formed with an error relative to ||S|| ||Q||, which is larger
    where Q is skewed. In "qr" A's columns are scaled to unit length, which does not change Q: neither Householder nor
    Cholesky QR of scaled columns loses a short column's digits beside long ones.
    """
    wide = [t.double() for t in inputs]
    if operation == "qr":
        A = wide[0] / _nonzero(wide[0].abs().amax(dim=-2, keepdim=True))
        A = A / _nonzero(torch.linalg.vector_norm(A, dim=-2, keepdim=True))
    elif operation != "coordinates":
        A = wide[0]
    else:
        A = wide[0] @ wide[1]
    size = _norm(A)
    if operation == "coordinates":
        finite = torch.where(wide[1].isfinite(), wide[1], 0.0)
        size = _norm(wide[0]) * torch.linalg.matrix_norm(finite, ord=2)
    return A, size


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)


def _norm(A: Tensor) -> Tensor:
    """||A||_F (B,), also where the squares of A's elements are no numbers of float64."""
    largest = _nonzero(A.abs().amax(dim=(-2, -1)))
    return largest * torch.linalg.matrix_norm(A / largest[:, None, None])


def leading(k: int) -> list[int]:
    """Numbers of leading columns whose spans are compared."""
    return sorted({1, (k + 1) // 2, k})


def positive_householder(A: Tensor) -> Tensor:
    """Q of A (n,k) by LAPACK, with R's diagonal non-negative."""
    Q, R = torch.linalg.qr(A)
    return Q * torch.where(R.diagonal() < 0, -1.0, 1.0)


def _of_one(A: Tensor, size: float, Q: Tensor, eps: float) -> dict[str, float]:
    if not Q.isfinite().all():
        return {"finite": math.nan}
    n, k = A.shape
    # To the same size, as squares of 1e-200 are zero.
    scale = size or 1.0
    A, size = A / scale, size / scale
    Q_exact = positive_householder(A)
    R = (Q.mT @ A).triu()
    orthogonality, backward = ORTHOGONALITY * k * eps, BACKWARD * k * eps
    e = backward * size
    found = {
        "orthogonality": float(torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(k, dtype=Q.dtype))) / orthogonality,
        "backward error": float(torch.linalg.matrix_norm(A - Q @ R)) / e if e else 0.0,
        "diagonal": -float(R.diagonal().min()) / e if e else 0.0,
    }
    basis, _ = torch.linalg.qr(Q)
    for j in leading(k):
        s = float(torch.linalg.svdvals(A[:, :j])[-1])
        X, wide = basis[:, :j], Q_exact[:, :j]
        sine = float(torch.linalg.matrix_norm(wide - X @ (X.mT @ wide), ord=2))
        if e < FULL * s:
            found[f"span of {j}"] = sine / (e / s)
        elif s * 0.01 > eps * size:  # neither singular nor too near for what any QR may do
            found[f"span of {j} as measured"] = sine / (SPAN * k**0.5 * eps * size / s)
        if e < FULL * s and j == k:
            allowed = -math.sqrt(2) * math.log1p(-e / s) + orthogonality
            found["same Q"] = float(torch.linalg.matrix_norm(Q - Q_exact)) / allowed
    return found


def ratios(operation: str, inputs: Inputs, Q: Tensor) -> dict[str, float]:
    """Largest measured value of each property over the matrices with finite inputs, in units of what it may be.

    Above 1, or nan, is a failure.
    """
    eps = torch.finfo(Q.dtype).eps
    A, size = factored(operation, tuple(t.detach().cpu() for t in inputs))
    largest: dict[str, float] = {}
    for b in range(len(A)):
        if not (A[b].isfinite().all() and size[b].isfinite()):
            continue
        for name, value in _of_one(A[b], float(size[b]), Q[b].detach().cpu().double(), eps).items():
            largest[name] = value if math.isnan(value) else max(value, largest.get(name, -math.inf))
    return largest


def assert_is_qr(operation: str, inputs: Inputs, Q: Tensor) -> None:
    """Q of the exact product of the inputs within all bounds; the message says which are exceeded and by how much."""
    found = ratios(operation, inputs, Q)
    exceeded = {name: f"{value:.3g} of its bound" for name, value in found.items() if not value <= 1}
    assert not exceeded, str(exceeded)
