"""What a machine does per second at most: the ceilings that floors are made of, measured or as recorded before."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch

from bench import rows
from bench.timer import call_seconds

MACHINE = "machine"
"""Case of the ceilings' rows."""
CEILINGS = {"product rate bfloat16": "GFLOP/s", "product rate float32": "GFLOP/s", "copy bandwidth": "GB/s"}
"""Metric and unit of the fields of :class:`Rates`, in their order."""
QUICK = 0.03
"""Seconds of a product after which a larger one, eight times the work, is still tried: a CPU that emulates bfloat16 may
be a hundred times slower in it than in float32."""
EACH = 0.05
"""Seconds that each product and the copy are repeated for; the quickest call counts, as a floor wants."""


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
    """Return the dtype of Newton-Schulz that is faster here, which most steps are measured with."""
    return torch.bfloat16 if rates.half > rates.single else torch.float32


def machine_rates(device: torch.device, path: Path | None, here: Mapping[str, str]) -> Rates:
    """Return the ceilings that a file has of this commit and machine, or measure them and put them into the file."""
    if path is not None and rows.measured(path, {"case": MACHINE}, here):
        found = {row["metric"]: float(row["median"]) for row in rows.read(path) if row.get("case") == MACHINE}
        return Rates(*(1e9 * found[metric] for metric in CEILINGS))
    rates = measure_rates(device)
    ceilings: list[rows.Row] = [
        {"case": MACHINE, "metric": metric, "unit": unit, "median": value / 1e9}
        for (metric, unit), value in zip(CEILINGS.items(), astuple(rates), strict=True)
    ]
    print(*map(rows.describe, ceilings), sep="\n", flush=True)
    if path is not None:
        rows.upsert(path, [row | here for row in ceilings], key=("model", "case"))
    return rates


def _product_rate(dtype: torch.dtype, sides: tuple[int, ...], device: torch.device) -> float:
    """Return the operations per second of square products, of the size and layout that are fastest."""
    best = 0.0
    for side in sides:
        A = torch.randn(side, side, device=device).to(dtype)
        seconds = [min(call_seconds(partial(torch.mm, A, B), device, EACH)) for B in (A, A.mT)]
        best = max(best, 2 * side**3 / min(seconds))
        if max(seconds) > QUICK:
            break
    return best


def measure_rates(device: torch.device) -> Rates:
    """Measure the ceilings of a machine, with products as exact as float32 on the way out.

    On a GPU three TF32 products count as one in float32, which they are about as exact as, where that is faster.
    """
    cuda = device.type == "cuda"
    sides = (4096, 8192) if cuda else (128, 256, 512, 1024)
    torch.set_float32_matmul_precision("highest")
    half, single = (_product_rate(dtype, sides, device) for dtype in (torch.bfloat16, torch.float32))
    if cuda:
        torch.set_float32_matmul_precision("high")
        single = max(single, _product_rate(torch.float32, sides, device) / 3)
        torch.set_float32_matmul_precision("highest")
    x = torch.ones(2**26, device=device)  # more than caches hold
    y = torch.empty_like(x)
    return Rates(half, single, 2 * x.nbytes / min(call_seconds(partial(y.copy_, x), device, EACH)))
