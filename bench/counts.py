"""Operations and bytes of one step of one matrix, counted term by term as the fast steps are written.

An addition and a multiplication are two operations. Products of matrices and factorisations are counted, nothing
elementwise. Without the refresh, for m <= n, rank r and T Newton-Schulz steps, the terms add up to

* Pro-KLShampoo: ``2 (6 mnr + 2 m^2 n + 2 m^3 + 4 m^2 r + 4 mr^2 + 4 nr^2 + 4 r^3) - 4/3 r^3``, and Newton-Schulz:
  ``2 T (2 m^2 n + m^3)`` or in the Gram form, five steps with restarts, ``2 (6 m^2 n + 11 m^3)``;
* KL-Shampoo: ``2 (5 mn^2 + 4 m^2 n)``.

A balanced step takes ``2 m^2 n`` for the energies in the eigenbasis, Q_L^T G_perp, where ``2 m^3`` are counted here.

A refresh adds a product and a Householder QR, ``2 k^3 + 8/3 k^3``, for k = m and r, or m and n; 1/tau of it counts.
Tracking is counted with Householder's QR, ``4 nr^2 - 4/3 r^3``, as a CPU has it; the two Cholesky passes of other
devices take ``2 (5 nr^2) + 2 r^3``.

Dimension key: m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from prokl.algorithm.newton_schulz import GRAM_RUN, use_gram


@dataclass(frozen=True)
class Term:
    """One product or factorisation of a step.

    Attributes:
        what: the result, in the letters of :mod:`prokl.algorithm.stages`.
        flops: operations.
        kind: "symmetric" is a product with a symmetric result.
        newton_schulz: whether it belongs to Newton-Schulz, which may run in bfloat16.
        cheapest: operations of the cheapest factorisation that would do.
        stage: function of the step that it belongs to, or "apply".
    """

    what: str
    flops: float
    kind: Literal["product", "symmetric", "factorisation"] = "product"
    newton_schulz: bool = False
    cheapest: float = 0.0
    stage: str = ""

    @property
    def refresh(self) -> bool:
        """Return True for what takes place once in tau steps."""
        return self.stage == "refresh_eigenbases"

    @property
    def least(self) -> float:
        """Return the operations that a step cannot do without: half of a symmetric product, one Cholesky pass a QR."""
        return {"product": self.flops, "symmetric": self.flops / 2, "factorisation": self.cheapest}[self.kind]


@dataclass(frozen=True)
class Cost:
    """What a step of some matrices takes.

    Attributes:
        flops_ns: operations of Newton-Schulz, which may run in bfloat16.
        flops_rest: operations in the arithmetic dtype.
        bytes: every input read once and every output written once.
    """

    flops_ns: float = 0.0
    flops_rest: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops_ns + other.flops_ns, self.flops_rest + other.flops_rest, self.bytes + other.bytes)

    def __mul__(self, count: int) -> Cost:
        return Cost(self.flops_ns * count, self.flops_rest * count, self.bytes * count)


def cholesky_qr(n: int, k: int) -> float:
    """Count one Cholesky QR of n x k: half of W^T W, its factor and a triangular solve, ``2 nk^2 + k^3/3``.

    It is the cheapest way to Q; Householder's R and Q take ``2 nk^2 - 5/3 k^3`` more, which is positive for n >= k.
    """
    return 2 * n * k * k + k**3 / 3


def _householder(what: str, n: int, k: int) -> Term:
    """Count R and Q (n,k) of n x k: 2 nk^2 - 2/3 k^3 each (Golub and Van Loan, Matrix Computations, section 5.2)."""
    return Term(what, 4 * n * k * k - 4 / 3 * k**3, "factorisation", cheapest=cholesky_qr(n, k))


def _refresh(what: str, k: int) -> list[Term]:
    return [Term(what, 2 * k**3), _householder(what, k, k)]


def _staged(stages: dict[str, list[Term]]) -> list[Term]:
    return [replace(term, stage=stage) for stage, terms in stages.items() for term in terms]


def newton_schulz_standard(m: int, n: int, steps: int) -> list[Term]:
    """Count X <- aX + (bA + cA^2)X with A = XX^T: a step has two products with n and one without."""
    return [
        Term("A", 2 * m * m * n, "symmetric", True),
        Term("A^2", 2 * m**3, "symmetric", True),
        Term("X", 2 * m * m * n, newton_schulz=True),
    ] * steps


def newton_schulz_gram(m: int, n: int, steps: int) -> list[Term]:
    """Count runs of GRAM_RUN steps on R = XX^T, each with one product that makes R and one that applies Q.

    A run of k steps has k products Z, k - 1 products Q (the first Q is Z + aI), and k - 1 of Y and of R.
    """
    terms: list[Term] = []
    for done in range(0, steps, GRAM_RUN):
        run = min(GRAM_RUN, steps - done)
        terms += [Term("R", 2 * m * m * n, "symmetric", True), Term("Q X", 2 * m * m * n, newton_schulz=True)]
        terms += [Term("Z, Q, Y, R", 2 * m**3, "symmetric", True)] * (run + 3 * (run - 1))
    return terms


def newton_schulz(m: int, n: int, steps: int) -> list[Term]:
    """Count Newton-Schulz in the form that a step takes."""
    return newton_schulz_gram(m, n, steps) if use_gram(m, n) else newton_schulz_standard(m, n, steps)


def pro_klshampoo(m: int, n: int, r: int, ns_steps: int = 5, balanced: bool = False) -> list[Term]:
    """Count :mod:`prokl.algorithm.stages` from top to bottom, refresh included; r is the effective rank."""
    residual = Term("Q_L^T G_perp", 2 * m * m * n) if balanced else Term("E Q_L", 2 * m**3)
    return _staged(
        {
            "project": [Term("G U, M U", 4 * m * n * r), Term("G_perp", 2 * m * n * r)],
            "energies": [
                Term("E", 2 * m * m * n, "symmetric"),
                Term("Q_L^T G U", 2 * m * m * r),
                residual,
                Term("G U Q_S", 2 * m * r * r),
                Term("A", 2 * m * r * r),
            ],
            "momentum": [Term("G^_perp", 2 * m * n * r)],
            "direction": [
                Term("P", 2 * m**3, "symmetric"),
                Term("S^-1/2", 2 * r**3, "symmetric"),
                Term("G_par S^-1/2", 2 * m * r * r),
                Term("P G_par S^-1/2", 2 * m * m * r),
                Term("P G^_perp", 2 * m * m * n),
                *newton_schulz(m, n, ns_steps),
            ],
            "statistics": [
                Term("L", 2 * m * m * r, "symmetric"),
                Term("S", 2 * m * r * r, "symmetric"),
            ],
            "track_subspace": [
                Term("Y", 2 * m * m * r),
                Term("U S", 2 * n * r * r),
                Term("V", 2 * m * n * r),
                _householder("U", n, r),
                Term("T", 2 * n * r * r),
                Term("T^T S T, T^T Q_S", 6 * r**3),
            ],
            "refresh_eigenbases": [*_refresh("Q_L", m), *_refresh("Q_S", r)],
            "apply": [Term("left right^T", 2 * m * n * r)],
        }
    )


def klshampoo(m: int, n: int) -> list[Term]:
    """Count :mod:`prokl.algorithm.klshampoo` from top to bottom, refresh included."""
    return _staged(
        {
            "whitening": [Term("Q_L^T G", 2 * m * m * n), Term("A", 2 * m * n * n)],
            "direction": [Term("Q_L^T M, Q_L (.)", 4 * m * m * n), Term("(.) Q_R, (.) Q_R^T", 4 * m * n * n)],
            "statistics": [
                Term("G Q_R", 2 * m * n * n),
                Term("L", 2 * m * m * n, "symmetric"),
                Term("R", 2 * m * n * n, "symmetric"),
            ],
            "refresh_eigenbases": [*_refresh("Q_L", m), *_refresh("Q_R", n)],
        }
    )


def step_cost(
    terms: Iterable[Term],
    traffic: float,
    m: int,
    n: int,
    tau: int,
    *,
    least: bool = False,
    item: int = 4,
    state_item: int = 4,
) -> Cost:
    """Add up one step of one matrix, refreshes amortised.

    Args:
        terms: products and factorisations.
        traffic: elements of state read and written.
        m, n: sides of the weight; its gradient is read, the weight read and written.
        tau: steps between refreshes.
        least: whether only what a step cannot do without is counted, :attr:`Term.least`.
        item: bytes of an element of weights and gradients.
        state_item: bytes of an element of state.
    """
    sums = {True: 0.0, False: 0.0}
    for t in terms:
        sums[t.newton_schulz] += (t.least if least else t.flops) / (tau if t.refresh else 1)
    return Cost(sums[True], sums[False], 3 * m * n * item + traffic * state_item)
