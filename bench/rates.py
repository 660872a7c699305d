"""What a machine does per second at most: the ceilings that floors are made of, measured or as recorded before."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench import records

MACHINE = "machine"
"""Set of the ceilings' rows."""
CEILINGS = {"product rate bfloat16": "GFLOP/s", "product rate float32": "GFLOP/s", "copy bandwidth": "GB/s"}
"""Metric and unit of the fields of :class:`Rates`, in their order."""
QUICK = 0.03
"""Seconds of a product after which a larger one, eight times the work, is still tried."""


@dataclass(frozen=True)
class Rates:
    """What a machine does per second.

    Attributes:
        half: operations of matrix products in bfloat16.
        single: operations of matrix products in float32, or as exact.
        bandwidth: bytes read and written by a copy.
    """

    half: float
    single: float
    bandwidth: float


def main_dtype(rates: Rates) -> torch.dtype:
    """The dtype of Newton-Schulz that is faster here, which most steps are measured with."""
    return torch.bfloat16 if rates.half > rates.single else torch.float32


def machine_rows(rates: Rates) -> list[dict[str, Any]]:
    """The ceilings as rows."""
    values = rates.half, rates.single, rates.bandwidth
    return [
        {"set": MACHINE, "metric": metric, "unit": unit, "median": value / 1e9}
        for (metric, unit), value in zip(CEILINGS.items(), values, strict=True)
    ]


def recorded(path: Path | None, here: Mapping[str, str]) -> Rates | None:
    """The ceilings that a file has of this commit and machine, which its floors are made of; None where it has none."""
    if path is None or not records.measured(path, MACHINE, here):
        return None
    found = {row["metric"]: float(row["median"]) for row in records.read(path) if row["set"] == MACHINE}
    return Rates(*(1e9 * found[metric] for metric in CEILINGS))


def _fastest(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of the quickest of ``rounds`` calls after one that warms up."""
    cuda = device.type == "cuda"
    best = float("inf")
    for i in range(rounds + 1):
        if cuda:
            torch.cuda.synchronize(device)
        start = perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        if i:
            best = min(best, perf_counter() - start)
    return best


def _product_rate(dtype: torch.dtype, sides: tuple[int, ...], device: torch.device, rounds: int) -> float:
    """Operations per second of square products, of the size and layout that are fastest.

    It goes on to the next size only from a call that was quick: a CPU that emulates bfloat16 may be a hundred times
    slower in it than in float32.
    """
    best = 0.0
    for side in sides:
        A = torch.randn(side, side, device=device).to(dtype)
        seconds = [_fastest(partial(torch.mm, A, B), device, rounds) for B in (A, A.mT)]
        best = max(best, 2 * side**3 / min(seconds))
        if max(seconds) > QUICK:
            break
    return best


def measure_rates(
    device: torch.device,
    threads: int,
    sides: tuple[int, ...] | None = None,
    elements: int = 2**26,
    rounds: int = 5,
) -> Rates:
    """The ceilings of a machine, measured now: the quickest of a few calls, as a floor wants.

    On a GPU three TF32 products count as one in float32, which they are about as exact as, where that is faster.

    Args:
        device: where.
        threads: of a CPU; torch's own setting is put back.
        sides: of the square matrices multiplied, ascending; it stops where they take long.
        elements: float32 numbers copied; must be more than the caches hold.
        rounds: calls of which the quickest counts.
    """
    cuda = device.type == "cuda"
    sides = sides or ((4096, 8192) if cuda else (128, 256, 512, 1024))
    before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads)
    try:
        half = _product_rate(torch.bfloat16, sides, device, rounds)
        torch.set_float32_matmul_precision("highest")
        single = _product_rate(torch.float32, sides, device, rounds)
        if cuda:
            torch.set_float32_matmul_precision("high")
            single = max(single, _product_rate(torch.float32, sides, device, rounds) / 3)
        x = torch.ones(elements, device=device)
        y = torch.empty_like(x)
        bandwidth = 2 * x.nbytes / _fastest(lambda: y.copy_(x), device, rounds)
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precision)
    return Rates(half, single, bandwidth)
