"""Times every kernel beside its PyTorch form: ``python -m bench.kernels [--sets gpt2-124m] [--out rows.csv]``.

The sizes are the buckets of the paper's four models. Nothing is reported of a kernel whose results are wrong. Each
repetition runs both contenders, one after the other, with the L2 cache emptied before each.
"""

import argparse
import csv
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import triton
from torch import Tensor

import prokl
from bench.case import FP32_POLAR, Case, Dtypes, Inputs, Sizes
from bench.errors import UsageError, interruptible
from bench.kernel_cases import CASES
from bench.report import _commit
from prokl.addresses import Addresses
from prokl.kernels import launch

SETS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "gpt2-124m": ((48, 768, 768), (24, 768, 3072)),
    "gpt2-350m": ((96, 1024, 1024), (48, 1024, 4096)),
    "llama-134m": ((48, 768, 768), (36, 768, 2048)),
    "llama-450m": ((120, 1024, 1024), (90, 1024, 2816)),
    "tiny": ((2, 24, 40),),
}
"""Oriented weight matrices of the paper's models as (count, m, n): four square ones a layer, and those of the MLP."""
FLUSH = 256 * 2**20
"""Bytes that are written to empty the L2 cache: five times that of an H200, and time for the host to run ahead."""
TOLERANCE = 4
"""Largest ratio of the kernel's error to that of the PyTorch form, both against float64. Sums in another order and
TF32 in three parts make up to about twice the error; a wrong index or a lost part makes thousands of times it."""


class Numbers:
    """Draws normal numbers; the same ones for the same seed."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def table(self, matrices: Sequence[Tensor]) -> Tensor:
        addresses = Addresses(len(matrices), self.device)
        addresses.update([t.unsqueeze(0) for t in matrices], [1] * len(matrices))
        return addresses.table


@dataclass(frozen=True)
class Ceiling:
    """What this machine reached in this run."""

    flops: float
    """Per second, in a large bfloat16 torch.bmm."""
    bytes: float
    """Per second, read and written, in a large copy."""


def doubled(x: Any) -> Any:
    """Inputs in float64."""
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    if isinstance(x, torch.dtype):
        return torch.float64
    if isinstance(x, (list, tuple)):
        return [doubled(y) for y in x]
    return {k: doubled(v) for k, v in x.items()} if isinstance(x, dict) else x


def errors(case: Case, fresh: Callable[[], Inputs]) -> tuple[float, float, float]:
    """Largest relative errors of kernel and PyTorch form over the results, in norm, and how large the first may be.

    The first is nan where a result is not finite.
    """
    kernel, plain, truth = (
        _tensors(case.dense(f(i)))
        for f, i in ((lambda i: case.call(i, None), fresh()), (case.torch, fresh()), (case.torch, doubled(fresh())))
    )
    results = zip(kernel, plain, truth, strict=True)
    found = [(_distance(x, t), _distance(y, t), torch.finfo(x.dtype).eps) for x, y, t in results]
    # The result that is worst in units of what it may be; nan is worse than any number.
    return max(
        ((x, y, TOLERANCE * (y + eps)) for x, y, eps in found),
        key=lambda e: float("inf") if e[0] != e[0] else e[0] / e[2],
    )


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [x for x in results if x is not None]


def _distance(x: Tensor, truth: Tensor) -> float:
    return (torch.linalg.vector_norm(x.double() - truth) / torch.linalg.vector_norm(truth)).item()


def timed(contenders: Sequence[Callable[[], Any]], device: torch.device, rounds: int) -> list[list[float]]:
    """Seconds of every contender in every round, interleaved, from a cold L2 cache.

    The host runs ahead while the cache is emptied, for some 50 microseconds; what takes it longer to launch shows.
    """
    cuda = device.type == "cuda"
    flush = torch.empty(FLUSH if cuda else 0, dtype=torch.int8, device=device)
    times: list[list[Any]] = [[] for _ in contenders]
    for _ in range(3 if cuda else 1):
        for run in contenders:
            run()
    for _ in range(rounds):
        for run, own in zip(contenders, times, strict=True):
            if cuda:
                flush.zero_()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                run()
                events[1].record()
                own.append(events)
            else:
                start = perf_counter()
                run()
                own.append(perf_counter() - start)
    if not cuda:
        return times
    torch.cuda.synchronize(device)
    return [[start.elapsed_time(end) / 1e3 for start, end in own] for own in times]


def ceiling(device: torch.device, rounds: int) -> Ceiling:
    """Measure what this machine can do."""
    side, elements = (4096, 2**29) if device.type == "cuda" else (64, 2**12)
    A = torch.randn(8, side, side, device=device).to(torch.bfloat16)
    x = torch.ones(elements, dtype=torch.int16, device=device)
    y = torch.empty_like(x)
    product, copy = timed((lambda: A @ A, lambda: y.copy_(x)), device, rounds)
    return Ceiling(2 * 8 * side**3 / statistics.median(product), 4 * elements / statistics.median(copy))


def measure(case: Case, dtypes: Dtypes, s: Sizes, device: torch.device, rounds: int, top: Ceiling) -> dict[str, Any]:
    """The row of one case.

    Raises:
        ArithmeticError: the kernel's results are wrong.
    """

    def fresh() -> Inputs:
        return case.inputs(s, dtypes, Numbers(device))

    error, plain_error, allowed = errors(case, fresh)
    if not error <= allowed:
        raise ArithmeticError(f"error {error:.1e}, may be {allowed:.1e}; PyTorch's is {plain_error:.1e}")
    i, j = fresh(), fresh()
    times = timed((lambda: case.call(i, None), lambda: case.torch(j)), device, rounds)
    row: dict[str, Any] = {}
    for name, own in zip(("kernel", "torch"), times, strict=True):
        q1, median, q3 = statistics.quantiles(own, n=4, method="inclusive")
        row |= {f"{name}_ms": 1e3 * median, f"{name}_q1": 1e3 * q1, f"{name}_q3": 1e3 * q3}
    seconds = row["kernel_ms"] / 1e3
    flops, moved = case.flops(s), case.bytes(s, dtypes)
    arithmetic = flops / top.flops > moved / top.bytes  # which of the two bounds it
    amount, most = (flops, top.flops) if arithmetic else (moved, top.bytes)
    unit, scale = ("TFLOP/s", 1e12) if arithmetic else ("GB/s", 1e9)
    return row | {
        "torch_over_kernel": row["torch_ms"] / row["kernel_ms"],
        "rate": amount / seconds / scale,
        "unit": unit,
        "ceiling": most / scale,
        "share": amount / seconds / most,
        "kernel_error": error,
        "torch_error": plain_error,
        "rounds": rounds,
    }


def environment(device: torch.device) -> dict[str, str]:
    """Where and on what the figures were measured."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()}, interpreted: no measurement",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "",
        "prokl": prokl.__version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def buckets(names: Sequence[str], rank: int) -> dict[Sizes, list[str]]:
    """The buckets of these sets, each once, with the sets that it is in."""
    found: dict[Sizes, list[str]] = {}
    for name in names:
        for count, m, n in SETS[name]:
            found.setdefault(Sizes(count, m, n, min(rank, m)), []).append(name)
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        UsageError: there is no GPU, in one line with the remedy.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=(__doc__ or "").partition("\n")[0])
    names = [name for name in SETS if name != "tiny"]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=names, metavar="SET", help=", ".join(SETS))
    parser.add_argument("--rank", type=int, default=128, metavar="R", help="of the subspace (default: 128)")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="repetitions (default: 50)")
    parser.add_argument("--only", choices=[case.name for case in CASES if case.timed], metavar="NAME", help="one case")
    parser.add_argument("--out", type=Path, metavar="CSV", help="also write the rows there")
    a = parser.parse_args(argv)
    a.device = torch.device(a.device)
    if a.rank < 1 or a.rounds < 2:
        raise UsageError(f"--rank {a.rank} --rounds {a.rounds}: must be at least 1 and 2")
    if a.device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "no CUDA device here; TRITON_INTERPRET=1 and --device cpu --sets tiny only exercise the code"
            )
        if launch.INTERPRETED:
            raise UsageError("TRITON_INTERPRET=1 would time the interpreter; unset it")
    elif a.sets != ["tiny"] or not launch.INTERPRETED:
        raise UsageError(f"--device {a.device} takes --sets tiny and TRITON_INTERPRET=1: it measures nothing")
    return a


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the file, with a header where it is the first: an interrupted run keeps what it has measured."""
    first = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, row)
        if first:
            writer.writeheader()
        writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    try:
        a = parse(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    cuda = a.device.type == "cuda"
    if not cuda:
        print("The interpreter runs the kernels on the CPU: no times below are measurements.")
    top = ceiling(a.device, a.rounds)
    print(f"Ceiling: {top.flops / 1e12:.3g} TFLOP/s (bfloat16 bmm), {top.bytes / 1e9:.4g} GB/s (copy)")
    wrong = 0
    measured_on = environment(a.device)
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.unlink(missing_ok=True)
    for s, sets in buckets(a.sets, a.rank).items():
        for case in CASES:
            if a.only not in (None, case.name):
                continue
            # The interpreter computes bfloat16 wrongly.
            for dtypes in case.timed if cuda else (FP32_POLAR,) * bool(case.timed):
                what = {"case": case.name, "dtypes": dtypes.name, "matrices": s.B, "m": s.m, "n": s.n, "r": s.r}
                words = f"{case.name}, {dtypes.name}, {s.B} of {s.m}x{s.n}, r={s.r}"
                try:
                    row = measure(case, dtypes, s, a.device, a.rounds, top)
                except ArithmeticError as error:
                    print(f"{words}: wrong, so not reported: {error}", file=sys.stderr)
                    wrong += 1
                    continue
                if a.out:
                    append(a.out, what | {"sets": " ".join(sets)} | row | measured_on)
                print(
                    f"{words}: {row['kernel_ms']:.3f} ms [{row['kernel_q1']:.3f}, {row['kernel_q3']:.3f}], "
                    f"PyTorch {row['torch_ms']:.3f} ({row['torch_over_kernel']:.2f}x), "
                    f"{row['rate']:.3g} {row['unit']} = {row['share']:.0%} of the ceiling",
                    flush=True,
                )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
