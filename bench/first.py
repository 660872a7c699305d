"""Check within two minutes that anything works on a GPU: ``python -m bench.first``.

It prints the versions that are installed. It checks every kernel once, at the sizes of training, against float64; whole
steps of both precisions against the reference, as before every timing; and steps from graphs against the same ones
without. Each check prints a line, with the seconds that it took, compiling included. An error is a line, too, and the
next check goes on. The exit status is 1 if a line says so.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench import command
from bench.micro.case import Case, Sizes, complaint, numbers
from bench.micro.kernels import KERNELS
from bench.shapes import ParameterSet, Problem, Shape
from bench.timing import agreement
from bench.timing.entries import Entry, pro
from bench.timing.runs import TimedRun
from prokl import doctor
from prokl.algorithm.settings import PRECISIONS
from prokl.backends.select import select

SIZES = Sizes(B=4, m=768, n=3072, r=128)
STEPS, PERIOD = 13, 4
"""Steps from graphs, and their tau: refreshes are recorded at the second and replayed from the third on."""
FAR = 2.0**-10
"""Distance of steps from graphs from those without, relative to the distance moved, that sums in another order do not
explain. Newton-Schulz is in float32: in bfloat16 rounding would make 0.02 of a step by itself."""


def kernel(case: Case, sizes: Sizes, device: torch.device) -> str:
    """Compare a kernel with float64."""
    dtypes = (case.timed or case.dtypes)[0]
    inputs = case.inputs(sizes, dtypes, numbers(device))
    wrong = complaint(case, select("triton", device, case.precision).ops, partial(copy.deepcopy, inputs))
    if wrong:
        raise ArithmeticError(wrong)
    return f"right in {dtypes.name}"


def weights_of(sizes: Sizes) -> ParameterSet:
    """Return the weights that are stepped: of two shapes, one of them as its transpose."""
    return ParameterSet("first", ((2, sizes.n, sizes.m), (2, sizes.m, sizes.m)), (sizes.r,))


def entry_of(sizes: Sizes, precision: str, **settings: object) -> Entry:
    """Return Pro-KLShampoo in the kernels."""
    entry = pro("triton", sizes.r, torch.float32)
    return replace(entry, settings=tuple((dict(entry.settings) | {"precision": precision, **settings}).items()))


def step(entry: Entry, shape: Shape, device: torch.device) -> str:
    """Compare steps of weights of one shape with the reference's."""
    if wrong := agreement.complaint(entry, shape, device):
        raise ArithmeticError(wrong)
    return "right"


def check_recorded(optimizer: Any) -> None:
    """Raise RuntimeError unless every bucket of the optimizer has a graph: its steps could have run plainly unseen."""
    graphs = optimizer.engine.graphs
    if graphs.refused:
        raise RuntimeError("recording a graph failed, as a warning says, and the steps ran without")
    if not graphs.replays or not all(any(kept.values()) for kept in graphs.replays.values()):
        raise RuntimeError("no graph was recorded of some step that was to come from one")


def graphs(sizes: Sizes, precision: str, device: torch.device) -> str:
    """Compare a few steps from graphs with the same ones without."""
    problem, moved = Problem(weights_of(sizes), device), []
    for on in (False, True):
        entry = entry_of(sizes, precision, precondition_frequency=PERIOD, cuda_graphs=on)
        run = TimedRun(entry, problem)
        took = run.steps(STEPS)[-1]
        moved.append([W.detach() - start for W, start in zip(run.weights, problem.start, strict=True)])
    apart = float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(*moved, strict=True)]).max())  # NaN if one is
    if not apart <= FAR:
        raise ArithmeticError(f"{apart:.2g} of the way from the steps without, may be {FAR:.2g}")
    if device.type == "cuda":
        check_recorded(run.optimizer)
    return f"{apart:.2g} of the way from the steps without; the last one took {1e3 * took:.2f} ms"


def checks(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield what is asked, the cheapest first, and what says what it found, or raises if it is wrong."""
    for name, line in doctor.lines():
        yield f"doctor: {name}", line
    for case in KERNELS:
        yield f"kernel: {case.name}", partial(kernel, case, sizes, device)
    for precision in PRECISIONS:
        for shape in dict.fromkeys(weights_of(sizes).each):
            what = partial(step, entry_of(sizes, precision), shape, device)
            yield f"step: {precision}, {shape[0]} x {shape[1]}", what
        yield f"graphs: {precision}", partial(graphs, sizes, precision, device)


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 1 if something is wrong, 2 for wrong input, 130 after Ctrl-C."""
    parser = command.Parser(prog="python -m bench.first", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu with TRITON_INTERPRET=1")
    parser.add_argument("--seconds", type=float, default=80.0, help="after which nothing new is begun (default: 80)")
    o = parser.parse_args(argv)
    begun, wrong, left = time.perf_counter(), 0, 0
    for name, check in checks(SIZES, torch.device(o.device)):
        before = time.perf_counter()
        if before - begun > o.seconds:
            left += 1
            continue
        try:
            result = check()
        except Exception as error:
            wrong += 1
            result = f"WRONG: {type(error).__name__}: {error}".splitlines()[0][:300]
        print(f"{name}: {result} ({time.perf_counter() - before:.1f} s)", flush=True)
    print(f"{wrong} wrong, {left} not begun within {o.seconds:g} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
