"""Times the ways to a batched QR on a GPU: ``python -m bench.qr [--out rows.csv]``.

The shapes are buckets of the paper's models. Every round runs all contenders, one after the other, with the L2 cache
emptied before each; products that form the matrix belong to a contender's time and are the same for all. Nothing is
timed of a contender whose Q is no QR within the bounds of the tests; its row says by how much it is not.

Dimension key: B matrices, n rows, k columns.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.errors import UsageError, interruptible
from bench.kernels import FLUSH, Ceiling, ceiling, environment
from bench.qr_cases import CONTENDERS, SETS, Contender, Problem, deviations, draw
from prokl import ops
from prokl.qr import Product

SECONDS = 1.0  # to time one contender on one problem, unless FEWEST rounds take longer
FEWEST, MOST = 3, 50
SLOW = 4.0  # seconds; what takes longer is not timed
PRODUCTS = 6
"""How much longer a product of float32 takes than one of bfloat16: three of TF32, each at half of that rate."""
COLUMNS = [
    "problem", "matrices", "n", "k", "contender", "metric", "unit", "median", "q1", "q3", "rounds",
    "speedup_over_linalg_batched", "floor", "orthogonality", "backward_error", "reason",
    "device", "torch", "triton", "cuda", "prokl", "commit", "date",
]  # fmt: skip


@dataclass
class Lane:
    """A contender on one problem, and what is known of it."""

    contender: Contender
    run: Callable[[], Tensor]
    row: dict[str, Any]
    rounds: int = 0  # 0 is not timed


def clock(run: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], float]]:
    """The result, and a function that says how many seconds it took when asked after a synchronisation."""
    if device.type != "cuda":
        before = perf_counter()
        result = run()
        seconds = perf_counter() - before
        return result, lambda: seconds
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = run()
    end.record()
    return result, lambda: start.elapsed_time(end) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def admit(lane: Lane, inputs: Sequence[Tensor], p: Problem, device: torch.device, seconds: float) -> None:
    """Check the contender's Q, and say in its row why it is not timed or set how often it is."""
    try:
        Q = lane.run()  # the first call also loads and compiles
        synchronize(device)
        _, read = clock(lane.run, device)
        synchronize(device)
    except RuntimeError as error:  # memory, or a library that gives up on a matrix
        lane.row |= {"metric": "left out", "reason": str(error).splitlines()[0]}
        return
    found = deviations(p, inputs, Q)
    lane.row |= found.row()
    if found.reason:
        lane.row |= {"metric": "wrong", "reason": found.reason}
    elif read() > SLOW:
        lane.row |= {"metric": "left out", "reason": f"one call took {read():.1f} s; it may take {SLOW:g}"}
    else:
        lane.rounds = min(MOST, max(FEWEST, int(seconds / max(read(), 1e-9))))


def timed(lanes: Sequence[Lane], device: torch.device) -> list[list[float]]:
    """Seconds of every lane in each of its rounds, interleaved, from a cold L2 cache."""
    flush = torch.empty(FLUSH if device.type == "cuda" else 0, dtype=torch.int8, device=device)
    times: list[list[Callable[[], float]]] = [[] for _ in lanes]
    for number in range(max((lane.rounds for lane in lanes), default=0)):
        for lane, own in zip(lanes, times, strict=True):
            if number < lane.rounds:
                flush.zero_()
                own.append(clock(lane.run, device)[1])
    synchronize(device)
    return [[read() for read in own] for own in times]


def measure(p: Problem, mm: Product, device: torch.device, seconds: float, top: Ceiling) -> list[dict[str, Any]]:
    """The rows of one problem, a contender each."""
    inputs = draw(p, device)
    lanes = []
    for c in CONTENDERS:
        row = {"problem": p.kind, "matrices": p.B, "n": p.n, "k": p.k, "contender": c.name}
        reason = c.obstacle(device)
        if reason:
            lanes.append(Lane(c, lambda: inputs[0], row | {"metric": "left out", "reason": reason}))
            continue
        lane = Lane(c, lambda c=c: c.run(p.kind, inputs, mm), row)
        admit(lane, inputs, p, device, seconds)
        lanes.append(lane)
    for lane, own in zip(lanes, timed(lanes, device), strict=True):
        if own:
            q1, median, q3 = statistics.quantiles([1e3 * t for t in own], n=4, method="inclusive")
            lane.row |= {"metric": "time", "unit": "ms", "median": median, "q1": q1, "q3": q3, "rounds": len(own)}
            lane.row["floor"] = 1e3 * floor(p, top)
    batched = next((lane.row["median"] for lane in lanes if lane.rounds and lane.contender.baseline), None)
    for lane in lanes:
        if lane.rounds and batched is not None:
            lane.row["speedup_over_linalg_batched"] = batched / lane.row["median"]
    return [lane.row for lane in lanes]


def floor(p: Problem, top: Ceiling) -> float:
    """Seconds that no way goes below: the arithmetic of one Cholesky QR, or every operand moved once."""
    return max(PRODUCTS * p.flops / top.flops, p.bytes / top.bytes)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        UsageError: there is no GPU, or a number is out of bounds, in one line with the remedy.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.qr", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--set", choices=SETS, default="paper", help="default: paper; tiny only exercises the code")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help=f"each timing (default: {SECONDS:g})"
    )
    parser.add_argument("--out", type=Path, metavar="CSV", help="also write the rows there")
    a = parser.parse_args(argv)
    a.device = torch.device(a.device)
    if not a.seconds >= 0:
        raise UsageError(f"--seconds {a.seconds}: must be at least 0")
    if a.device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device here; --device cpu --set tiny only exercises the code")
    if a.device.type == "cpu" and a.set != "tiny":
        raise UsageError("--device cpu takes --set tiny: it measures nothing")
    return a


def words(row: dict[str, Any]) -> str:
    """One line for a row."""
    name = f"{row['problem']}, {row['matrices']} of {row['n']}x{row['k']}, {row['contender']}: "
    if row["metric"] != "time":
        return f"{name}{row['metric']}: {row['reason']}"
    speedup = row.get("speedup_over_linalg_batched")
    return (
        f"{name}{row['median']:.3f} ms [{row['q1']:.3f}, {row['q3']:.3f}]"
        + (f", {speedup:.3g} times as fast as batched linalg" if speedup else "")
        + f", floor {row['floor']:.3g}"
    )


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status, 1 where a form of this package was wrong."""
    try:
        a = parse(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    if a.device.type != "cuda":
        print("On a CPU no times below are measurements.")
    # Also where Triton is there, so that the products are those that a step would take.
    table = ops.select(None, a.device) or ops.TORCH
    top = ceiling(a.device, 10)
    measured_on = environment(a.device)
    wrong = False
    stream = None
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        stream = a.out.open("w", newline="", encoding="utf-8")
    try:
        writer = csv.DictWriter(stream or sys.stdout, COLUMNS)
        if stream:
            writer.writeheader()
        for p in SETS[a.set]:
            for row in measure(p, table.product, a.device, a.seconds, top):
                ours = next(c.ours for c in CONTENDERS if c.name == row["contender"])
                wrong |= ours and row["metric"] == "wrong"
                print(words(row), file=sys.stderr if row["metric"] == "wrong" else sys.stdout, flush=True)
                if stream:
                    row = row | measured_on
                    writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
                    stream.flush()
    finally:
        if stream:
            stream.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
