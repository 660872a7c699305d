"""What a step launches, does and takes on an H200: a lower bound from traced launches. Nothing here is measured.

The launches of the real step are traced without a GPU (:mod:`bench.compile_report.trace`), with their operations and
bytes. A launch takes as long as its arithmetic or its memory, whichever is longer, at two thirds of what a data sheet
promises of either arithmetic (989 TFLOP/s in bfloat16, a third of 495 in tf32x3, 67 without tensor cores) and nine
tenths of 4.8 TB/s; no processor is ever idle, whatever the tile. A launch from a CUDA graph takes 2 us besides.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from bench import rows
from bench.compile_report.trace import Event, steps
from bench.shapes import PAPER, SETS, ParameterSet

RANK = 128
DTYPES = (torch.bfloat16, torch.float32)
"""Of weights and gradients."""
PRECISIONS = ("faithful", "balanced")
MODELLED = "H200, modelled"
"""In the place of the device."""
KNOWN = ("torch", "triton", "prokl", "commit", "date")
"""What of the provenance says something about a model."""
RATES = {"bf16": 700e12, "fp16": 700e12, "bf16x2": 350e12, "bf16x3": 233e12, "tf32x3": 110e12, "fp32": 45e12}
"""Operations a second by arithmetic; of a product in several parts, those of the product that comes out."""
RATES |= {f"{path} chained": RATES[path] for path in ("bf16x2", "bf16x3")}
BANDWIDTH = 4.3e12
LAUNCH = 2e-6
"""Seconds that a launch takes whatever it does."""


def seconds(event: Event) -> float:
    """Return the seconds of a launch at least."""
    work = event.work
    return max(sum(flops / RATES[path] for path, flops in work.flops.items()), work.bytes / BANDWIDTH) + LAUNCH


def set_rows(s: ParameterSet, dtype: torch.dtype, precision: str, rank: int = RANK) -> Iterator[rows.Row]:
    """Yield a row for either kind of step of a set, in one dtype of weights and gradients."""
    given: rows.Row = {"model": s.name, "precision": precision, "optimizer": "pro-klshampoo", "rank": rank}
    for kind, buckets in steps(s, dtype, rank, precision).items():
        events = [event for bucket in buckets for event in bucket]
        own = {"case": kind, "dtype": str(dtype).removeprefix("torch."), "buckets": len(buckets)}
        own |= {"launches": len(events), "gflop": sum(sum(event.work.flops.values()) for event in events) / 1e9}
        own |= {"gb": sum(event.work.bytes for event in events) / 1e9, "ms": 1e3 * sum(map(seconds, events))}
        yield given | own


def report(sets: Sequence[str] = PAPER) -> list[rows.Row]:
    """Return the rows of all models."""
    environment = rows.environment(torch.device("cpu"))
    here = {"device": MODELLED} | {name: environment[name] for name in KNOWN}
    every = product(sets, DTYPES, PRECISIONS)
    return [row | here for name, dtype, precision in every for row in set_rows(SETS[name], dtype, precision)]
