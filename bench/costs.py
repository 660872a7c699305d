"""Operations and bytes of one step, counted term by term, and the time that they need at least on this machine.

An addition and a multiplication are two operations. Products of matrices and factorisations are counted, and
nothing elementwise. Three forms:

* "reference": ``backend="reference"`` (prokl/reference.py, reference_kl.py), the papers' lines as they are printed.
* "torch": ``backend="torch"`` (prokl/update.py, update_kl.py, polar.py, qr.py).
* "least": as "torch", with half of every product whose result is symmetric, and every QR by one Cholesky pass. The
  floors take this one.

Totals of form "torch" without the refresh, for m <= n and r, with T Newton-Schulz steps:

* Pro-KLShampoo: ``2 (6 mnr + 2 m^2 n + 2 m^3 + 4 m^2 r + 5 mr^2 + 4 nr^2 + 3 r^3) - 4/3 r^3`` and Newton-Schulz in
  either form, ``2 T (2 m^2 n + m^3)`` or, five steps with restarts, ``2 (6 m^2 n + 11 m^3)``.
* KL-Shampoo: ``2 (5 mn^2 + 4 m^2 n)``.
* Muon: ``2 T (2 m^2 n + m^3)``.

A refresh adds a product and a Householder QR, ``2 k^3 + 8/3 k^3``, for k = m and r, or m and n; 1/tau of it counts.
Tracking is counted with Householder's QR, ``4 nr^2 - 4/3 r^3``, as a CPU has it; the two Cholesky passes of other
devices take ``2 (5 nr^2) + 2 r^3``.

A QR of n x k that gives Q cannot take less than one Cholesky pass: half of ``W^T W``, ``nk^2``, its factor, ``k^3/3``,
and a triangular solve, ``nk^2``. That is less than Householder's by ``2 nk^2 - 5/3 k^3``, which is positive for n >= k.

Dimension key: m short side, n long side, r rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.rates import Rates
from bench.shapes import ParameterSet
from prokl.polar import GRAM_RUN, use_gram
from prokl.shapes import effective_rank

NS_STEPS = 5
FORMS = ("reference", "torch", "least")


@dataclass(frozen=True)
class Term:
    """One product or factorisation.

    Attributes:
        what: the result, in the letters of prokl/update.py.
        flops: operations.
        kind: "product", "symmetric" (a product with a symmetric result) or "factorisation".
        polar: whether it belongs to Newton-Schulz, which may run in bfloat16.
        refresh: whether it takes place once in tau steps.
        cheapest: operations of the cheapest factorisation that would do.
    """

    what: str
    flops: float
    kind: str = "product"
    polar: bool = False
    refresh: bool = False
    cheapest: float = 0.0

    @property
    def least(self) -> float:
        """Operations that a step cannot do without."""
        return {"product": self.flops, "symmetric": self.flops / 2, "factorisation": self.cheapest}[self.kind]


@dataclass(frozen=True)
class Cost:
    """What a step takes.

    Attributes:
        flops_ns: operations of Newton-Schulz, which may run in bfloat16.
        flops_rest: operations in float32.
        bytes: every input read once and every output written once.
    """

    flops_ns: float
    flops_rest: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops_ns + other.flops_ns, self.flops_rest + other.flops_rest, self.bytes + other.bytes)


def _standard(m: int, n: int) -> list[Term]:
    """X <- aX + (bA + cA^2)X with A = XX^T: a step has two products with n and one without."""
    products = Term("A", 2 * m * m * n, "symmetric", True), Term("A^2", 2 * m**3, "symmetric", True)
    return [*products, Term("X", 2 * m * m * n, polar=True)] * NS_STEPS


def _gram(m: int, n: int) -> list[Term]:
    """Runs of GRAM_RUN steps on R = XX^T, each with one product that makes R and one that applies Q.

    A run of k steps has k products Z, k - 1 products Q (the first Q is Z + aI), and k - 1 of Y and of R.
    """
    terms: list[Term] = []
    for done in range(0, NS_STEPS, GRAM_RUN):
        run = min(GRAM_RUN, NS_STEPS - done)
        terms += [Term("R", 2 * m * m * n, "symmetric", True), Term("Q X", 2 * m * m * n, polar=True)]
        terms += [Term("Z, Q, Y, R", 2 * m**3, "symmetric", True)] * (run + 3 * (run - 1))
    return terms


def cholesky_qr(n: int, k: int) -> float:
    """Operations of one Cholesky QR of n x k, of which half of W^T W: the cheapest way to Q."""
    return 2 * n * k * k + k**3 / 3


def _householder(what: str, n: int, k: int, refresh: bool = True) -> Term:
    """R and Q (n,k) of n x k: 2 nk^2 - 2/3 k^3 each."""
    flops = 4 * n * k * k - 4 / 3 * k**3
    return Term(what, flops, "factorisation", refresh=refresh, cheapest=cholesky_qr(n, k))


def _refresh(what: str, k: int) -> list[Term]:
    return [Term(what, 2 * k**3, refresh=True), _householder(what, k, k)]


def _pro(m: int, n: int, r: int) -> list[Term]:
    """prokl/update.py from top to bottom."""
    return [
        Term("G U, M U", 4 * m * n * r),
        Term("G_perp, G^_perp", 4 * m * n * r),
        Term("P", 2 * m**3, "symmetric"),
        Term("G_par S^-1/2", 4 * m * r * r),
        Term("P G_par S^-1/2", 2 * m * m * r),
        Term("P G^_perp", 2 * m * m * n),
        *(_gram(m, n) if use_gram(m, n) else _standard(m, n)),
        Term("E", 2 * m * m * n, "symmetric"),
        Term("Q_L^T G U", 2 * m * m * r),
        Term("G U Q_S, A", 4 * m * r * r),
        Term("E Q_L", 2 * m**3),
        Term("L", 2 * m * m * r, "symmetric"),
        Term("S", 2 * m * r * r, "symmetric"),
        Term("Y", 2 * m * m * r),
        Term("U S", 2 * n * r * r),
        Term("V", 2 * m * n * r),
        _householder("U", n, r, refresh=False),
        Term("T", 2 * n * r * r),
        Term("T^T S T, T^T Q_S", 6 * r**3),
        Term("B U^T", 2 * m * n * r),
        *_refresh("Q_L", m),
        *_refresh("Q_S", r),
    ]


def _pro_reference(m: int, n: int, r: int) -> list[Term]:
    """prokl/reference.py from top to bottom; Diag(.) is a matrix there."""
    return [
        Term("G^_par, G^_perp", 4 * m * n * r),
        Term("L^-1/2, twice", 8 * m**3),
        Term("L^-1/2 G^_perp", 2 * m * m * n),
        *_standard(m, n),
        Term("Delta_sub", 2 * m * m * r + 6 * m * r * r + 2 * m * n * r),
        Term("G U, G_perp", 4 * m * n * r),
        Term("ldiag", 2 * m * m * r + 4 * m * r * r),
        Term("rdiag", 2 * m**3 + 2 * m * m * r + 2 * m * r * r),
        Term("e_res", 2 * m * m * n),
        Term("X", 4 * m * r * r),
        Term("Z", 2 * m**3 + 2 * m * m * r),
        Term("L", 2 * m * m * r + 2 * m * m * n, "symmetric"),
        Term("S", 2 * m * r * r, "symmetric"),
        Term("G^T L^-1", 6 * m * m * n),
        Term("G^T L^-1 G U", 2 * m * n * n + 2 * n * n * r),
        Term("U S", 2 * n * r * r),
        _householder("U", n, r, refresh=False),
        Term("T", 2 * n * r * r),
        Term("T^T S T, T^T Q_S", 6 * r**3),
        *_refresh("Q_L", m),
        *_refresh("Q_S", r),
    ]


def _kl(m: int, n: int, r: int) -> list[Term]:
    """prokl/update_kl.py from top to bottom."""
    return [
        Term("Q_L^T M, Q_L (.)", 4 * m * m * n),
        Term("(.) Q_R, (.) Q_R^T", 4 * m * n * n),
        Term("G Q_R", 2 * m * n * n),
        Term("Q_L^T G", 2 * m * m * n),
        Term("A", 2 * m * n * n),
        Term("L", 2 * m * m * n, "symmetric"),
        Term("R", 2 * m * n * n, "symmetric"),
        *_refresh("Q_L", m),
        *_refresh("Q_R", n),
    ]


def _kl_reference(m: int, n: int, r: int) -> list[Term]:
    """prokl/reference_kl.py from top to bottom; Diag(.) is a matrix there."""
    return [
        Term("direction", 4 * m * m * n + 4 * m * n * n),
        Term("X", 4 * m * n * n),
        Term("Y", 4 * m * m * n),
        Term("A", 2 * m * m * n + 2 * m * n * n),
        Term("L", 2 * m * m * n, "symmetric"),
        Term("R", 2 * m * n * n, "symmetric"),
        *_refresh("Q_L", m),
        *_refresh("Q_R", n),
    ]


def _muon(m: int, n: int, r: int) -> list[Term]:
    """torch.optim.Muon."""
    return _standard(m, n)


def _adamw(m: int, n: int, r: int) -> list[Term]:
    """Elementwise throughout."""
    return []


TERMS: dict[tuple[str, str], Callable[[int, int, int], list[Term]]] = {
    ("pro-klshampoo", "reference"): _pro_reference,
    ("pro-klshampoo", "torch"): _pro,
    ("klshampoo", "reference"): _kl_reference,
    ("klshampoo", "torch"): _kl,
    ("muon", "torch"): _muon,
    ("adamw", "torch"): _adamw,
}
METHODS = tuple(dict.fromkeys(method for method, _ in TERMS))


def terms(method: str, form: str, m: int, n: int, r: int) -> list[Term]:
    """What is counted of one weight's step, refresh included; r is the effective rank.

    Raises:
        ValueError: a method or a form that is not known, or not known of this method.
    """
    found = TERMS.get((method, "torch" if form == "least" else form))
    if found is None:
        raise ValueError(f"Invalid method={method!r}, form={form!r}: must be among {[*TERMS]}, or form='least'.")
    return found(m, n, r)


def state_traffic(method: str, m: int, n: int, r: int, tau: int) -> float:
    """Elements of state that are read and written in a step; bases of a refresh are written once in tau steps.

    Counters and lambda_0, a few scalars a weight, are left out.
    """
    kept = {
        "pro-klshampoo": m * n + n * r + m * m + 2 * r * r + m + r + 1,  # M, U, L, S, Q_S and eigenvalues
        "klshampoo": m * n + m * m + n * n + m + n,
        "muon": m * n,
        "adamw": 2 * m * n,
    }[method]
    bases = {"pro-klshampoo": m * m, "klshampoo": m * m + n * n}.get(method, 0)
    return 2 * kept + bases * (1 + 1 / tau)


def cost(
    shape: tuple[int, int, int],
    rank: int,
    tau: int,
    method: str,
    form: str = "torch",
    item: int = 4,
    state_item: int = 4,
) -> Cost:
    """Cost of one step of all weights of a shape, refreshes amortised.

    Args:
        shape: (count, rows, cols).
        rank: of the tracked subspace, as it is asked for.
        tau: steps between refreshes.
        method: "pro-klshampoo", "klshampoo", "muon" or "adamw".
        form: "reference", "torch" or "least", see above.
        item: bytes of an element of weights and gradients.
        state_item: bytes of an element of state.
    """
    count, rows, cols = shape
    m, n = min(rows, cols), max(rows, cols)
    r = effective_rank(rank, m, n)
    sums = {True: 0.0, False: 0.0}
    for t in terms(method, form, m, n, r):
        sums[t.polar] += (t.least if form == "least" else t.flops) / (tau if t.refresh else 1)
    # The gradient is read, the weight read and written.
    moved = 3 * m * n * item + state_traffic(method, m, n, r, tau) * state_item
    return Cost(count * sums[True], count * sums[False], count * moved)


def total(
    parameters: ParameterSet,
    rank: int,
    tau: int,
    method: str,
    form: str = "torch",
    item: int = 4,
    state_item: int = 4,
) -> Cost:
    """Cost of one step of a whole set; arguments as of :func:`cost`."""
    costs = (cost(shape, rank, tau, method, form, item, state_item) for shape in parameters.shapes)
    return sum(costs, Cost(0.0, 0.0, 0.0))


def floor(c: Cost, rates: Rates) -> float:
    """Seconds that ``c`` takes at least: arithmetic or memory traffic, whichever takes longer.

    Newton-Schulz runs at the better of both rates: bfloat16 is not the faster one on every CPU. What fits into a
    CPU's cache, as the small sets nearly do, may move faster than a copy does; the products bound those.
    """
    return max(c.flops_ns / max(rates.half, rates.single) + c.flops_rest / rates.single, c.bytes / rates.bandwidth)
