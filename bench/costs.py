"""Operations and bytes of a step by method, this package's counts and the baselines', and the least time they need."""

from bench import counts
from bench.counts import Cost, Term
from bench.rates import Rates
from bench.shapes import ParameterSet
from prokl.algorithm.shapes import effective_rank

NS_STEPS = 5
METHODS = ("pro-klshampoo", "kl-shampoo", "muon", "adamw")


def terms(method: str, m: int, n: int, r: int) -> list[Term]:
    """Return what is counted of one weight's step, refresh included; r is the effective rank."""
    if method == "pro-klshampoo":
        return counts.pro_klshampoo(m, n, r, NS_STEPS)
    if method == "kl-shampoo":
        return counts.klshampoo(m, n)
    return {"muon": counts.newton_schulz_standard(m, n, NS_STEPS), "adamw": []}[method]


def traffic(method: str, m: int, n: int, r: int, tau: int) -> float:
    """Return the elements of state that one weight's step reads and writes; a refresh writes bases once in tau.

    Counters and lambda_0, a few scalars, are left out.
    """
    if method == "pro-klshampoo":
        kept = m * n + n * r + m * m + 2 * r * r + m + r + 1  # M, U, L, S, Q_S and eigenvalues
        return 2 * kept + m * m * (1 + 1 / tau)
    if method == "kl-shampoo":
        return 2 * (m * n + m * m + n * n + m + n) + (m * m + n * n) * (1 + 1 / tau)
    return {"muon": 2.0 * m * n, "adamw": 4.0 * m * n}[method]


def total(parameters: ParameterSet, rank: int, tau: int, method: str, *, least: bool = False) -> Cost:
    """Add up one step of a whole set in float32; arguments as of :func:`bench.counts.step_cost`."""
    found = Cost()
    for (m, n), count in parameters.oriented.items():
        r = effective_rank(rank, m, n)
        found += counts.step_cost(terms(method, m, n, r), traffic(method, m, n, r, tau), m, n, tau, least=least) * count
    return found


def floor(c: Cost, rates: Rates) -> float:
    """Return the seconds that ``c`` takes at least: arithmetic or memory traffic, whichever takes longer.

    Newton-Schulz runs at the better of both rates: bfloat16 is not the faster one on every CPU. What fits into a
    CPU's cache, as the small sets nearly do, may move faster than a copy does; the products bound those.
    """
    return max(c.flops_ns / max(rates.half, rates.single) + c.flops_rest / rates.single, c.bytes / rates.bandwidth)
