"""Matrices that break QR algorithms, for every form of the batched QR; what a form owes on them is in qr_bounds.

The operations, in all of which R's diagonal is positive:

    qr             A         Q of A
    tracking       V, K, U   Q of V = Phi U, Phi positive semi-definite, U with orthonormal columns, K = U^T V
    refresh        L         Q of L, positive semi-definite, as a basis that drifted from its eigenvectors shows it
    coordinates    S, Q      Q of S Q, S positive semi-definite, Q invertible

``CLASSES[operation][name](B, n, k, dtype, generator)`` gives the inputs as a tuple; square operations do not use n.
All is drawn in float64 and rounded once, each input for itself, as the products that make them in a step round them.

Dimension key: B matrices, n rows, k columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

Inputs = tuple[Tensor, ...]
Draw = Callable[[Generator, int, int, int], Inputs]
"""(g, B, n, k) -> inputs in float64."""
Make = Callable[[int, int, int, torch.dtype, Generator], Inputs]

CONDITIONS = (1e2, 1e4, 1e6, 1e8)
BASES = {"settled": 1e-3, "moving": 0.1, "fresh": None}
"""Distances of a basis from the eigenvectors: a random matrix times this is added; None is a random basis."""
EXTREMES = {torch.float32: {"tiny": 1e-20, "huge": 1e15}, torch.float64: {"tiny": 1e-160, "huge": 1e120}}
"""Squares of the first are subnormal numbers, those of the second large and still finite."""


def normal(g: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def orthonormal(g: Generator, B: int, n: int, k: int) -> Tensor:
    return torch.linalg.qr(normal(g, B, n, k))[0]


def log_spaced(k: int, cond: float) -> Tensor:
    """k values from 1 down to 1/cond; a single one is 1."""
    return cond ** -torch.linspace(0, 1, k, dtype=torch.float64)


def clusters(k: int) -> Tensor:
    """Half of the values at 1 and half at 1e-3, those of a cluster apart by 1e-9 of them."""
    index = torch.arange(k, dtype=torch.float64)
    return torch.where(index < (k + 1) // 2, 1.0, 1e-3) * (1 - 1e-9 * index)


def truncated(k: int) -> Tensor:
    """Ones, but half of them zero; of a single one nothing is left."""
    return (torch.arange(k) < k // 2).double()


def dominated(k: int) -> Tensor:
    """One value of 1 above others of 1e-5."""
    return torch.where(torch.arange(k) == 0, 1.0, 1e-5).double()


SPECTRA: dict[str, Callable[[int], Tensor]] = {
    **{f"condition {c:.0e}": lambda k, c=c: log_spaced(k, c) for c in CONDITIONS},
    "clustered": clusters,
    "dominated": dominated,
    "rank-deficient": truncated,
}


def shuffled(g: Generator, values: Tensor) -> Tensor:
    return values[torch.randperm(len(values), generator=g)]


def collinear(g: Generator, B: int, n: int, k: int) -> Tensor:
    """One random column, and 1e-3 of another added to each copy."""
    return normal(g, B, n, 1) + 1e-3 * normal(g, B, n, k)


def unequal_rows(g: Generator, B: int, n: int, k: int) -> Tensor:
    return shuffled(g, log_spaced(n, 1e12))[:, None] * normal(g, B, n, k)


def unequal_columns(g: Generator, B: int, n: int, k: int) -> Tensor:
    return normal(g, B, n, k) * shuffled(g, log_spaced(k, 1e12))


# qr


def _with_spectrum(values: Callable[[int], Tensor]) -> Draw:
    return lambda g, B, n, k: ((orthonormal(g, B, n, k) * values(k)) @ orthonormal(g, B, k, k).mT,)


def _with_zero_column(g: Generator, B: int, n: int, k: int) -> Inputs:
    A = normal(g, B, n, k)
    A[:, :, k // 2] = 0
    return (A,)


def _late_rows(g: Generator, B: int, n: int, k: int) -> Inputs:
    """Columns whose largest element is in no row of the first warp's; the Cholesky passes give up on one of zeros."""
    A = 1e25 * normal(g, B, n, k)
    A[:, ::8] *= 1e-45
    A[:, :, k // 2] = 0
    return (A,)


def _nearly_unit(g: Generator, B: int, n: int, k: int) -> Inputs:
    """Columns from whose first element subtracting their length would cancel all but a digit."""
    A = normal(g, B, n, k)
    return (1e-4 * A / A.abs().max() + torch.eye(n, k, dtype=torch.float64),)


PLAIN: dict[str, Draw] = {
    "random": lambda g, B, n, k: (normal(g, B, n, k),),
    **{name: _with_spectrum(values) for name, values in SPECTRA.items()},
    "nearly collinear": lambda g, B, n, k: (collinear(g, B, n, k),),
    "row scales": lambda g, B, n, k: (unequal_rows(g, B, n, k),),
    "column scales": lambda g, B, n, k: (unequal_columns(g, B, n, k),),
    "zero column": _with_zero_column,
    "late rows": _late_rows,
    "nearly unit": _nearly_unit,
    "zero": lambda g, B, n, k: (torch.zeros(B, n, k, dtype=torch.float64),),
    "identity": lambda g, B, n, k: (torch.eye(n, k, dtype=torch.float64).repeat(B, 1, 1),),
}


# tracking, factors: of a semi-definite X diag(d) X^T + tail I and a basis U, given as (X, d, tail, U)

Semidefinite = tuple[Tensor, Tensor, float, Tensor]


def near(g: Generator, X: Tensor, drift: float | None) -> Tensor:
    """A basis (B,n,k) this far from X (B,n,k)."""
    if drift is None:
        return orthonormal(g, *X.shape)
    # It has the size of X's columns, so that a drift means the same for every n.
    Q, R = torch.linalg.qr(X + drift * normal(g, *X.shape) / X.shape[-2] ** 0.5)
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]


def _near_a_spectrum(values: Callable[[int], Tensor], drift: float | None) -> Callable[..., Semidefinite]:
    def draw(g: Generator, B: int, n: int, k: int) -> Semidefinite:
        X, d = orthonormal(g, B, n, k), values(k)
        return X, d, 0.3 * d.min().item() if k < n else 0.0, near(g, X, drift)

    return draw


def _of(
    factor: Callable[[Generator, int, int, int], Tensor], size: float = 1.0, tail: float = 0.0
) -> Callable[..., Semidefinite]:
    """size X X^T + tail I for such an X, and a random basis."""
    return lambda g, B, n, k: (
        factor(g, B, n, k), torch.full((k,), size, dtype=torch.float64), tail, orthonormal(g, B, n, k)
    )  # fmt: skip


SEMIDEFINITE: dict[str, Callable[..., Semidefinite]] = {
    **{
        f"{name}, {basis}": _near_a_spectrum(values, drift)
        for name, values in SPECTRA.items()
        for basis, drift in BASES.items()
    },
    "random": _of(normal),
    "nearly collinear": _of(collinear),
    "row scales": _of(unequal_rows),
    "zero": _of(orthonormal, size=0.0),
    "identity": _of(orthonormal, size=0.0, tail=1.0),
}


def _symmetric(X: Tensor) -> Tensor:
    return (X + X.mT) / 2


def tracked(X: Tensor, d: Tensor, tail: float, U: Tensor) -> Inputs:
    """(V, K, U); Phi is never formed."""
    V = X @ (d[:, None] * (X.mT @ U)) + tail * U
    return V, _symmetric(U.mT @ V), U


def whole(X: Tensor, d: Tensor, tail: float, Q: Tensor) -> Inputs:
    """(L, Q)."""
    return _symmetric((X * d) @ X.mT) + tail * torch.eye(X.shape[-2], dtype=torch.float64), Q


def _tracking_with_zero_column(g: Generator, B: int, n: int, k: int) -> Inputs:
    """One column of U lies in the null space of Phi."""
    U, X = orthonormal(g, B, n, k), normal(g, B, n, k)
    u = U[..., k // 2 : k // 2 + 1]
    V, K, U = tracked(X - u @ (u.mT @ X), torch.ones(k, dtype=torch.float64), 0.0, U)
    V[..., k // 2] = K[..., k // 2] = K[:, k // 2] = 0
    return V, K, U


def _with_zero_row(g: Generator, B: int, n: int, k: int) -> Inputs:
    """A dead unit: no gradient in one row, whose direction the basis already has."""
    (A,) = _with_zero_column(g, B, k, k)
    Q = orthonormal(g, B, k, k)
    Q[:, k // 2] = Q[..., k // 2] = 0
    Q[:, k // 2, k // 2] = 1
    return A.mT @ A, torch.linalg.qr(Q)[0]


TRACKING: dict[str, Draw] = {
    **{name: lambda g, B, n, k, of=of: tracked(*of(g, B, n, k)) for name, of in SEMIDEFINITE.items()},
    "zero column": _tracking_with_zero_column,
}
FACTORS: dict[str, Draw] = {
    **{name: lambda g, B, n, k, of=of: whole(*of(g, B, k, k)) for name, of in SEMIDEFINITE.items()},
    "zero row": _with_zero_row,
}
"""(L, Q)."""


# refresh


def _in_basis(draw: Draw) -> Draw:
    def in_basis(g: Generator, B: int, n: int, k: int) -> Inputs:
        L, Q = draw(g, B, n, k)
        return (_symmetric(Q.mT @ L @ Q),)

    return in_basis


REFRESH: dict[str, Draw] = {name: _in_basis(draw) for name, draw in FACTORS.items()}


# coordinates

SKEWS = {"contracted": 2.0, "skewed 1e2": 1e2, "skewed 1e4": 1e4}
"""Condition of the basis before its columns get lengths from 1 to 1e-2; T^T Q_S of a step is the first."""


def _skewed(draw: Draw, skew: float) -> Draw:
    def skewed(g: Generator, B: int, n: int, k: int) -> Inputs:
        S, Q = draw(g, B, n, k)
        (turn,) = _with_spectrum(lambda k: log_spaced(k, skew))(g, B, k, k)
        return S, Q @ turn * log_spaced(k, 1e2)

    return skewed


COORDINATES: dict[str, Draw] = {
    **{
        f"{name}, {basis}": draw if basis == "orthogonal" else _skewed(draw, skew)
        for name, draw in FACTORS.items()
        for basis, skew in {"orthogonal": 1.0, **SKEWS}.items()
        # The skew takes the basis anywhere, so one drift is enough.
        if not name.endswith(("settled", "moving"))
    },
}


# classes of all operations

MIXED = {
    "qr": ("random", "condition 1e+08", "zero", "rank-deficient"),
    "tracking": ("random", "condition 1e+06, moving", "zero", "rank-deficient, fresh"),
    "refresh": ("random", "condition 1e+06, moving", "zero", "rank-deficient, fresh"),
    "coordinates": ("random, contracted", "condition 1e+06, fresh, contracted", "zero, contracted"),
}
"""Classes of the matrices of a mixed batch, in turn."""
SCALED = {operation: names[0] for operation, names in MIXED.items()}
BASIS = {"tracking": 2, "coordinates": 1}
"""The input that is a basis, and does not scale with the others."""


def _make(operation: str, draw: Draw, extreme: str | None = None) -> Make:
    """Draw, take all but the basis to an extreme size, and round."""

    def make(B: int, n: int, k: int, dtype: torch.dtype, g: Generator) -> Inputs:
        scale = 1.0 if extreme is None else EXTREMES[dtype][extreme]
        drawn = enumerate(draw(g, B, n, k))
        return tuple((t if i == BASIS.get(operation) else scale * t).to(dtype).contiguous() for i, t in drawn)

    return make


def _mixture(draws: list[Draw]) -> Draw:
    def draw(g: Generator, B: int, n: int, k: int) -> Inputs:
        parts = [draws[b % len(draws)](g, 1, n, k) for b in range(B)]
        return tuple(torch.cat(inputs) for inputs in zip(*parts, strict=True))

    return draw


def _classes(operation: str, draws: dict[str, Draw]) -> dict[str, Make]:
    return {
        **{name: _make(operation, draw) for name, draw in draws.items()},
        **{extreme: _make(operation, draws[SCALED[operation]], extreme) for extreme in ("tiny", "huge")},
        "mixed": _make(operation, _mixture([draws[name] for name in MIXED[operation]])),
    }


CLASSES: dict[str, dict[str, Make]] = {
    "qr": _classes("qr", PLAIN),
    "tracking": _classes("tracking", TRACKING),
    "refresh": _classes("refresh", REFRESH),
    "coordinates": _classes("coordinates", COORDINATES),
}


def draw(operation: str, name: str, size: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> Inputs:
    """The inputs of a class, of (B, n, k)."""
    return CLASSES[operation][name](*size, dtype, torch.Generator().manual_seed(0))


def poisoned(operation: str, index: int, value: float, inputs: Inputs) -> Inputs:
    """The inputs with ``value`` at one place of one matrix, and where a product would take it; the basis is kept."""
    found = tuple(t.clone() for t in inputs)
    for i, t in enumerate(found):
        if i != BASIS.get(operation):
            t[index, -1, 0] = value
            if operation != "qr" and t.shape[-1] == t.shape[-2]:
                t[index, 0, -1] = value  # symmetric
    return found
