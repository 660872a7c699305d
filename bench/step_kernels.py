"""Where the time of a step goes, kernel by kernel: ``python -m bench.step_kernels [--sets gpt2-124m] [--out CSV]``.

One period of Pro-KLShampoo in PyTorch's profiler, after :mod:`bench.step_cpu`'s checks and warming up. On a CPU it is
PyTorch's operators that are listed. What a step takes longer than all kernels together, the GPU stands idle.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import records
from bench.errors import UsageError, command
from bench.shapes import PAPER, SETS, SMALL, ParameterSet
from bench.steps.contenders import PERIOD, backends, pro
from bench.steps.gate import Gate
from bench.steps.lanes import Lane, enter
from bench.steps.problem import Problem

SLOWEST = 20.0
"""Seconds that a period may take."""
TOP = 25
"""Kernels listed."""


def kernel_times(lane: Lane) -> tuple[dict[str, float], Counter[str]]:
    """Milliseconds and calls of every kernel in one period; on a CPU of every PyTorch operator."""
    device = lane.problem.device
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities):  # the first profile of a process also starts the profiler
        torch.ones(1, device=device).add_(1).sum().item()
    with profile(activities=activities) as recorded:
        lane.steps(PERIOD)
    times: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for e in recorded.events():
        on_gpu = e.device_type == torch.autograd.DeviceType.CUDA
        # The optimizer's own annotation is repeated on the device.
        if on_gpu != cuda or e.name.startswith(("Optimizer.", "ProfilerStep")) or getattr(e, "is_user_annotation", 0):
            continue
        times[e.name] += (e.time_range.elapsed_us() if cuda else e.self_cpu_time_total) / 1e3
        calls[e.name] += 1
    return times, calls


def rows_of(s: ParameterSet, device: torch.device, gate: Gate) -> Iterator[dict[str, Any]]:
    """Time of a step, of all kernels, and of those that take the most, at the largest rank; or why there is none."""
    c = pro(backends(device)[-1], s.ranks[-1], torch.bfloat16 if device.type == "cuda" else torch.float32)
    row = {"set": s.name, "contender": c.name, "backend": c.backend, "rank": c.rank, "dtype": c.dtypes}
    lanes, left_out = enter([c], Problem(s, device), gate, SLOWEST)
    for _, why in left_out:
        yield row | {"metric": "kernel time", "note": why}
    for lane in lanes:
        step = 1e3 * sum(lane.steps(PERIOD)) / PERIOD
        yield row | {"metric": "step", "unit": "ms", "median": step, "rounds": 1}
        times, calls = kernel_times(lane)
        total = sum(times.values()) / PERIOD
        row |= {"metric": "kernel time", "unit": "ms", "rounds": 1}
        yield row | {"median": total, "ratio": total / step, "note": "all; ratio is to the step"}
        launches = calls.total() / PERIOD
        yield row | {"metric": "kernel calls", "unit": "1", "median": launches, "note": "all, a step"}
        for name in sorted(times, key=lambda name: -times[name])[:TOP]:
            own = times[name] / PERIOD
            note = f"{calls[name] / PERIOD:.3g} calls a step: {name[:120]}"
            yield row | {"median": own, "ratio": own / total, "note": note}


def words(row: dict[str, Any]) -> str:
    """A row as a line."""
    what = f"{row['set']} {row['metric']}: "
    if "median" not in row:
        return what + row["note"]
    share = f", {row['ratio']:.0%}" if "ratio" in row else ""
    return f"{what}{row['median']:.4g} {row['unit']}".removesuffix(" 1") + f"{share} {row.get('note', '')}".rstrip()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        UsageError: there is no such device, or the file has other columns.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.step_kernels", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: cuda")
    parser.add_argument("--sets", nargs="+", choices=SETS, metavar="SET", help=f"of {', '.join(SETS)}")
    parser.add_argument("--out", type=Path, metavar="CSV", help="put the rows there, in place of the same sets'")
    a = parser.parse_args(argv)
    a.device = torch.device(a.device)
    if a.device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; --device cpu lists PyTorch's operators")
    a.sets = a.sets or (PAPER if a.device.type == "cuda" else SMALL)
    if a.out:
        records.read(a.out)  # now, not after measuring
    return a


@command
def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status, which is 1 where a set has no figures."""
    a = parse(argv)
    torch.set_float32_matmul_precision("highest")
    here, gate, missing = records.environment(a.device), Gate(), False
    for name in a.sets:
        if a.out and records.measured(a.out, name, here):
            print(f"{name}: in {a.out} already", flush=True)
            continue
        rows = list(rows_of(SETS[name], a.device, gate))
        for row in rows:
            print(words(row), flush=True)
        missing |= any("median" not in row for row in rows)
        if a.out:
            records.merge(a.out, [row | here for row in rows])
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
