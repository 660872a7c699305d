"""Whether anything works at all on a GPU, within two minutes: ``python -m bench.first``.

What is installed; every kernel once, at the sizes of training, against float64; the QR; a few steps eager and from
graphs, in both precisions, against PyTorch's. A line each as it comes, with the seconds that it took, compiling
included; an error is a line, too, and the next one goes on. The exit status is 1 if a line says so.
"""

import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench import command
from bench.micro.case import Case, Sizes, complaint, numbers, precision_of
from bench.micro.kernels import KERNELS
from bench.optimizers import arguments
from bench.shapes import ParameterSet
from prokl import ProKLShampoo, doctor
from prokl.algorithm.settings import PRECISIONS
from prokl.algorithm.stages import ProKLShampooStages
from prokl.backends.select import select

SIZES = Sizes(B=4, m=768, n=3072, r=128)
STEPS, PERIOD = 13, 4
"""Refreshes are recorded at their second and replayed from the third on."""
FAR = {"faithful": 2.0**-10, "balanced": 2.0**-8}
"""Distance from the weights of PyTorch's faithful form, relative to the distance moved, that rounding does not explain,
with Newton-Schulz in float32: in bfloat16 it would make 0.02 of a step by itself.

Balanced, the factors of the subspace's part are stored in bfloat16: each entry is off by up to 2^-8, a factor by 2^-9.2
in norm and both together by 2^-8.7 (of normal numbers). PyTorch's balanced form was 2.6e-4 away at these sizes, and
1.6e-3 on weights of 6 x 10 and 16 x 36; faithful with another QR it was 7e-6 away."""

Check = Callable[[], str]
"""Returns what was found; raises if it is wrong."""


def kernel(case: Case, sizes: Sizes, device: torch.device, ops: dict[str, ProKLShampooStages]) -> str:
    """Compare a kernel with float64, in the stages of the precision that has such inputs."""
    dtypes = (case.timed or case.dtypes)[0]
    inputs = case.inputs(sizes, dtypes, numbers(device))
    wrong = complaint(case, ops[precision_of(inputs)], partial(copy.deepcopy, inputs))
    if wrong:
        raise ArithmeticError(wrong)
    return f"right in {dtypes.name}"


def weights_of(sizes: Sizes) -> ParameterSet:
    """Return the weights that are stepped: of two shapes, one of them also as its transpose."""
    return ParameterSet("first", ((1, sizes.m, sizes.n), (1, sizes.n, sizes.m), (2, sizes.m, sizes.m)), (sizes.r,))


def trained(sizes: Sizes, device: torch.device, **settings: object) -> tuple[list[Tensor], float, ProKLShampoo]:
    """Return how far weights of two shapes have moved, the milliseconds of the last step, and the optimizer."""
    g = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(s, generator=g).to(device)) for s in weights_of(sizes).each]
    start = [W.detach().clone() for W in weights]
    own = arguments({"rank": sizes.r, "precondition_frequency": PERIOD, "ns_dtype": torch.float32, **settings})
    optimizer = ProKLShampoo(weights, **own)
    took = 0.0
    for _ in range(STEPS):
        for W in weights:
            W.grad = torch.randn(W.shape, generator=g).to(device)
        before = time.perf_counter()
        optimizer.step()
        moved = [(W.detach() - old).cpu() for W, old in zip(weights, start, strict=True)]  # waits for the step
        took = 1e3 * (time.perf_counter() - before)
    return moved, took, optimizer


def check_recorded(optimizer: ProKLShampoo) -> None:
    """Raise RuntimeError unless every bucket of the optimizer has a graph: its steps could have run plainly unseen."""
    graphs = optimizer.engine.graphs
    if graphs.refused:
        raise RuntimeError("recording a graph failed, as a warning says, and the steps ran without")
    if not graphs.replays or not all(any(kept.values()) for kept in graphs.replays.values()):
        raise RuntimeError("no graph was recorded of some step that was to come from one")


def steps(
    sizes: Sizes, device: torch.device, wanted: Callable[[], list[Tensor]], precision: str, **settings: object
) -> str:
    """Compare a few steps with PyTorch's faithful ones."""
    moved, took, optimizer = trained(sizes, device, backend="triton", precision=precision, **settings)
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(moved, wanted(), strict=True))
    if not apart <= FAR[precision]:
        raise ArithmeticError(f"{apart:.2g} of the way from PyTorch's, may be {FAR[precision]:.2g}")
    if device.type == "cuda" and settings.get("cuda_graphs"):
        check_recorded(optimizer)
    return f"{apart:.2g} of the way from PyTorch's; the last step took {took:.2f} ms, by the host"


def checks(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Check]]:
    """Yield what is asked, the cheapest first."""
    for name, line in doctor.lines():
        yield f"doctor: {name}", line
    ops = {precision: select("triton", device, precision).stages["pro-klshampoo"] for precision in PRECISIONS}
    for case in KERNELS:
        yield f"kernel: {case.name}", partial(kernel, case, sizes, device, ops)
    found: list[list[Tensor]] = []

    def wanted() -> list[Tensor]:
        if not found:
            found.append(trained(sizes, device, backend="torch", precision="faithful")[0])
        return found[0]

    for precision, graphs in itertools.product(PRECISIONS, (False, True)):
        name = f"steps: {precision}, {'from graphs' if graphs else 'eager'}"
        yield name, partial(steps, sizes, device, wanted, precision, cuda_graphs=graphs)


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 1 if something is wrong, 2 for wrong input, 130 after Ctrl-C."""
    parser = command.Parser(prog="python -m bench.first", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu with TRITON_INTERPRET=1")
    parser.add_argument("--seconds", type=float, default=80.0, help="after which nothing new is begun (default: 80)")
    o = parser.parse_args(argv)
    begun, wrong, left = time.perf_counter(), 0, 0
    for name, check in checks(SIZES, torch.device(o.device)):
        if time.perf_counter() - begun > o.seconds:
            left += 1
            continue
        before = time.perf_counter()
        try:
            said = check()
        except Exception as error:
            wrong += 1
            said = f"WRONG: {type(error).__name__}: {error}".splitlines()[0][:300]
        print(f"{name}: {said} ({time.perf_counter() - before:.1f} s)", flush=True)
    print(f"{wrong} wrong, {left} not begun within {o.seconds:g} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
