"""Times whole optimizer steps over the weights of the paper's models: ``python -m bench.step [--out step-gpu.csv]``.

A period is ``--frequency`` steps, one of which refreshes, so that its mean is the amortised step. Periods of all
optimizers take turns. Nothing is reported of one whose weights do not go where those of backend="torch" go.

Every weight of a shape starts from the state that one of them had after its initialising step and 20 more: a start is
20 to 200 SVDs, and the first 20 steps may still correct it.

Dimension key: m short side, n long side, r rank.
"""

import argparse
import csv
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.errors import UsageError, interruptible
from bench.kernels import Ceiling, ceiling, environment
from prokl import KLShampoo, ProKLShampoo
from prokl.initial import YOUNG
from prokl.kernels import launch
from prokl.polar import use_gram
from prokl.shapes import effective_rank

Shape = tuple[int, int]
MODELS: dict[str, tuple[int, tuple[Shape, ...]]] = {
    "gpt2-124m": (12, ((768, 768),) * 4 + ((3072, 768), (768, 3072))),
    "gpt2-350m": (24, ((1024, 1024),) * 4 + ((4096, 1024), (1024, 4096))),
    "llama-134m": (12, ((768, 768),) * 4 + ((2048, 768),) * 2 + ((768, 2048),)),
    "llama-450m": (30, ((1024, 1024),) * 4 + ((2816, 1024),) * 2 + ((1024, 2816),)),
    "tiny": (1, ((24, 40), (40, 24))),
}
"""Layers of the paper's models, and the (rows, columns) of the matrices of one: attention, then MLP."""
ROTATING = 4  # sets of gradients that take turns, as new ones would come from a backward pass
CHECKED = 3  # periods that are compared: in the third one all steps are replayed where graphs are on
ALLOWED = 0.05
"""Largest distance between two ways, relative to the distance moved since the common start, over the weights.
Newton-Schulz in bfloat16 magnifies rounding: for one weight of 256 x 256 or 256 x 1024 two orders of the same sums
(rows and columns renumbered) were up to 0.008 apart and bfloat16 up to 0.014 from float32. A wrong index gives 1."""
SLOW = 20.0  # seconds; what takes longer for a period is not timed
FEWEST, MOST = 3, 30  # periods timed
TOP = 25  # kernels listed
COLUMNS = [
    "set", "optimizer", "backend", "graphs", "metric", "what", "unit", "median", "q1", "q3", "rounds", "calls", "share",
    "error", "rank", "frequency", "dtype", "reason", "device", "torch", "triton", "cuda", "prokl", "commit", "date",
]  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """One way to step.

    Attributes:
        optimizer: its name.
        make: the optimizer from parameters, rank and other settings.
        backend: of a matrix optimizer of this package, else empty.
        graphs: whether steps are replayed.
        checked: periods to compare with backend="torch" before timing; they also compile and record.
        timed: whether to time it at all; else it is only compared with.
        each: whether one period is all that is timed.
    """

    optimizer: str
    make: Callable[..., torch.optim.Optimizer]
    backend: str = ""
    graphs: bool = False
    checked: int = 1
    timed: bool = True
    each: bool = False

    def words(self) -> str:
        return " ".join([self.optimizer, self.backend, "graphs" * self.graphs]).strip()


def _pro(parameters: list[Tensor], rank: int, **settings: Any) -> torch.optim.Optimizer:
    return ProKLShampoo(parameters, rank=rank, **settings)


def _kl(parameters: list[Tensor], rank: int, ns_dtype: Any = None, **settings: Any) -> torch.optim.Optimizer:
    return KLShampoo(parameters, **settings)


def _muon(parameters: list[Tensor], rank: int, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02)


def _adamw(parameters: list[Tensor], rank: int, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


CONTENDERS = (
    # The two that the others of their kind are compared with come first of their kind.
    Contender("pro-klshampoo", _pro, "torch", checked=CHECKED),
    Contender("pro-klshampoo", _pro, "triton", checked=CHECKED),
    Contender("pro-klshampoo", _pro, "triton", graphs=True, checked=CHECKED),
    Contender("klshampoo", _kl, "torch", timed=False),
    Contender("klshampoo", _kl, "triton"),
    Contender("klshampoo", _kl, "reference", each=True),
    Contender("muon", _muon),
    Contender("adamw", _adamw),
)


class TooSlow(Exception):
    """A period would take longer than SLOW; the text says what took how long."""


@dataclass
class Problem:
    """The weights of a set where they start, and their gradients."""

    start: list[Tensor]
    gradients: list[list[Tensor]]
    rank: int
    settings: dict[str, Any]
    device: torch.device
    states: dict[tuple[str, Shape], dict[str, Any]]
    """By optimizer and oriented shape: the state that weights start from."""

    @property
    def frequency(self) -> int:
        return self.settings["precondition_frequency"]

    def draw(self, parameters: Sequence[Tensor], t: int) -> None:
        for p, g in zip(parameters, self.gradients[t % len(self.gradients)], strict=True):
            p.grad = g


def oriented(shape: Sequence[int]) -> Shape:
    """(m, n) of a matrix."""
    return min(shape), max(shape)


def shapes_of(name: str) -> list[Shape]:
    """(rows, columns) of every matrix of a set."""
    layers, matrices = MODELS[name]
    return list(matrices) * layers


def problem(
    shapes: Sequence[Shape], rank: int, dtype: torch.dtype, device: torch.device, settings: dict[str, Any],
    states: dict[tuple[str, Shape], dict[str, Any]],
) -> Problem:  # fmt: skip
    """Weights and low-rank signals plus noise as gradients: every matrix of an oriented shape has the same signal."""
    g = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device)

    signals: dict[Shape, tuple[Tensor, Tensor]] = {}
    for m, n in {oriented(s) for s in shapes}:
        g.manual_seed(m * n)  # the same in every set, as the settled states are
        signals[m, n] = normal(m, 16), normal(16, n)
    g.manual_seed(0)

    def gradient(shape: Shape) -> Tensor:
        a, b = signals[oriented(shape)]
        G = (a * normal(16)) @ b + normal(*oriented(shape))
        return (G if shape == oriented(shape) else G.mT.contiguous()).to(dtype)

    start = [(0.02 * normal(*s)).to(dtype) for s in shapes]
    return Problem(start, [[gradient(s) for s in shapes] for _ in range(ROTATING)], rank, settings, device, states)


def settled(c: Contender, p: Problem, index: int) -> dict[str, Any]:
    """State of weight ``index`` alone after its initialising step and YOUNG more."""
    key = c.optimizer, oriented(p.start[index].shape)
    if key not in p.states:
        W = torch.nn.Parameter(p.start[index].clone())
        optimizer = c.make([W], p.rank, **p.settings, backend="torch")
        for t in range(1 + YOUNG):
            W.grad = p.gradients[t % ROTATING][index]
            optimizer.step()
        p.states[key] = optimizer.state_dict()["state"][0]
    return p.states[key]


def begin(c: Contender, p: Problem) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Parameters where they start, and the optimizer with settled state."""
    parameters: list[Tensor] = [torch.nn.Parameter(W.clone()) for W in p.start]
    if not c.backend:
        return parameters, c.make(parameters, p.rank)
    optimizer = c.make(parameters, p.rank, **p.settings, backend=c.backend)
    saved = optimizer.state_dict()
    saved["state"] = {i: settled(c, p, i) for i in range(len(parameters))}
    optimizer.load_state_dict(saved)
    if c.graphs:
        optimizer.enable_graphs()  # type: ignore[attr-defined]
    return parameters, optimizer


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def period(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, p: Problem) -> None:
    """The steps from one refresh to the next."""
    for t in range(p.frequency):
        p.draw(parameters, t)
        optimizer.step()


def warm_up(c: Contender, p: Problem) -> tuple[list[Tensor], torch.optim.Optimizer, list[list[Tensor]], float]:
    """Run the periods that are compared.

    Returns:
        Parameters, optimizer, the parameters after the first and after the last period, seconds of the last.

    Raises:
        TooSlow: one step, or what it promises of a period, takes longer than SLOW.
    """
    parameters, optimizer = begin(c, p)
    seconds, after = 0.0, []
    for number in range(c.checked):
        started = perf_counter()
        for t in range(p.frequency):
            p.draw(parameters, t)
            synchronize(p.device)
            before = perf_counter()
            optimizer.step()
            synchronize(p.device)
            step = perf_counter() - before
            # The very first step compiles.
            if c.each and (number or t) and step * p.frequency > SLOW:
                raise TooSlow(f"one step took {step:.1f} s; a period may take {SLOW:.0f}")
        seconds = perf_counter() - started
        if number in (0, c.checked - 1):
            after.append([W.detach().clone() for W in parameters])
    if not c.each and seconds > SLOW:
        raise TooSlow(f"a period took {seconds:.1f} s; it may take {SLOW:.0f}")
    return parameters, optimizer, [after[0], after[-1]], seconds


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Largest distance over the weights, relative to the distance moved; nan where a weight is not finite."""
    ratios = torch.stack(
        [
            torch.linalg.vector_norm(x.float() - y.float()) / torch.linalg.vector_norm(y.float() - s.float())
            for x, y, s in zip(found, wanted, start, strict=True)
        ]
    )
    return float(ratios.max())  # nan is the largest


def timed_period(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, p: Problem) -> Callable[[], float]:
    """Run a period; the function returned says how many seconds it took, when asked after a synchronisation."""
    if p.device.type != "cuda":
        before = perf_counter()
        period(parameters, optimizer, p)
        seconds = perf_counter() - before
        return lambda: seconds
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    period(parameters, optimizer, p)
    end.record()
    return lambda: start.elapsed_time(end) / 1e3


def quartiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) == 1:
        return {"median": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def kernel_times(
    parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, p: Problem
) -> tuple[dict[str, float], Counter[str]]:
    """Milliseconds and calls of every kernel in one period; on a CPU of every PyTorch operation."""
    cuda = p.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities):  # the first profile of a process also starts the profiler
        torch.ones(1, device=p.device).add_(1)
        synchronize(p.device)
    with profile(activities=activities) as recorded:
        period(parameters, optimizer, p)
        synchronize(p.device)
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


def floors(shapes: Sequence[Shape], rank: int, frequency: int, item: int, top: Ceiling) -> dict[str, float]:
    """Seconds that a step cannot go below: arithmetic or memory traffic, whichever takes longer.

    Products are counted as the kernels do them, halved where the result is symmetric, five Newton-Schulz steps in the
    form that is chosen, an ideal QR and no r x r work. "all bfloat16" takes the ceiling of bfloat16 for all of them;
    in "tf32x3" all but Newton-Schulz are three products of TF32, each at half of that rate.
    """
    polar = other = moved = 0.0
    for m, n in map(oriented, shapes):
        r = effective_rank(rank, m, n)
        # In units of m^3: 11 + 9 n/m in the Gram form, 5 + 15 n/m in the standard one.
        polar += 11 * m**3 + 9 * m * m * n if use_gram(m, n) else 5 * m**3 + 15 * m * m * n
        # G U, M U, two residuals, B U^T, G^T Y; P G^perp and G_perp G_perp^T; P, E Q_L; Q_L^T G~, Y and L's increment,
        # P G^par; L Q_L and its QR at a refresh.
        other += 12 * m * n * r + 3 * m * m * n + 3 * m**3 + 7 * m * m * r + (2 + 4 / 3) * m**3 / frequency
        # G once, W, and M, L, U of float32 read and written, Q_L read, and written at a refresh.
        moved += 3 * m * n * item + 4 * (2 * m * n + 2 * m * m + 2 * n * r + m * m * (1 + 1 / frequency))
    bytes_time = moved / top.bytes
    return {
        "all bfloat16": max((polar + other) / top.flops, bytes_time),
        "tf32x3": max((polar + 6 * other) / top.flops, bytes_time),
        "memory traffic": bytes_time,
    }


def measure(p: Problem, seconds: float, report: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The rows of one set, as soon as they are known: what is left out with its reason, then times, then kernels."""
    reached: dict[str, list[list[Tensor]]] = {}
    ready: list[tuple[Contender, list[Tensor], torch.optim.Optimizer, int, float]] = []
    for c in CONTENDERS:
        row = {"optimizer": c.optimizer, "backend": c.backend, "graphs": int(c.graphs)}
        if c.graphs and p.device.type != "cuda":
            yield row | {"metric": "left out", "reason": "graphs need a CUDA device"}
            continue
        try:
            parameters, optimizer, after, took = warm_up(c, p)
        except TooSlow as error:
            yield row | {"metric": "left out", "reason": str(error)}
            continue
        except torch.cuda.OutOfMemoryError:
            yield row | {"metric": "left out", "reason": "the device's memory does not hold it beside the others"}
            continue
        error = 0.0
        if c.backend == "torch":
            reached[c.optimizer] = after
        elif c.backend:
            if c.optimizer not in reached:
                yield row | {"metric": "left out", "reason": 'there is no backend="torch" to compare with'}
                continue
            error = distance(after[-1], reached[c.optimizer][-1 if c.checked > 1 else 0], p.start)
            report(f"{c.words()}: {error:.1e} from backend torch")
            if not error <= ALLOWED:
                yield row | {"metric": "wrong", "error": error, "reason": f"may be {ALLOWED:g}"}
                continue
        if c.timed:
            rounds = 1 if c.each else min(MOST, max(FEWEST, int(seconds / took)))
            ready.append((c, parameters, optimizer, rounds, error))
    reached.clear()

    times: list[list[Callable[[], float]]] = [[] for _ in ready]
    for number in range(max((rounds for *_, rounds, _ in ready), default=0)):
        for (_, parameters, optimizer, rounds, _), own in zip(ready, times, strict=True):
            if number < rounds:
                own.append(timed_period(parameters, optimizer, p))
        synchronize(p.device)
    for (c, parameters, optimizer, rounds, error), own in zip(ready, times, strict=True):
        steps = [1e3 * read() / p.frequency for read in own]
        row = {"optimizer": c.optimizer, "backend": c.backend, "graphs": int(c.graphs), "rounds": rounds}
        row |= {"error": error} if c.backend not in ("", "torch") else {}
        yield row | {"metric": "step time", "unit": "ms"} | quartiles(steps)
        if c.backend == "triton" and c.make is _pro and not c.graphs:
            yield from kernel_rows(c, parameters, optimizer, p, statistics.median(steps))


def kernel_rows(
    c: Contender, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, p: Problem, step: float
) -> Iterator[dict[str, Any]]:
    """Where the time of a period goes, a step's share of it; the rest of a step's time the device stands idle."""
    spent, calls = kernel_times(parameters, optimizer, p)
    total = sum(spent.values())
    row = {"optimizer": c.optimizer, "backend": c.backend, "graphs": int(c.graphs), "metric": "kernel time"}
    row |= {"unit": "ms per step", "rounds": 1}
    everything = {"what": "all kernels", "median": total / p.frequency, "calls": calls.total() / p.frequency}
    yield row | everything | {"share": total / p.frequency / step}
    for name in sorted(spent, key=lambda name: -spent[name])[:TOP]:
        own = {"what": name[:120], "median": spent[name] / p.frequency, "calls": calls[name] / p.frequency}
        yield row | own | {"share": spent[name] / total}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        UsageError: there is no GPU, or a number is out of bounds, in one line with the remedy.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=(__doc__ or "").partition("\n")[0])
    names = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--sets", nargs="+", choices=MODELS, default=names, metavar="SET", help=", ".join(MODELS))
    parser.add_argument("--rank", type=int, default=128, metavar="R", help="of the subspace (default: 128)")
    parser.add_argument("--frequency", type=int, default=10, metavar="N", help="steps of a period (default: 10)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and gradients (default: float32)",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.5, metavar="S", help="of timing per optimizer and set (default: 2.5)"
    )
    parser.add_argument("--out", type=Path, metavar="CSV", help="also write the rows there, as soon as they are known")
    a = parser.parse_args(argv)
    a.device, a.dtype = torch.device(a.device), getattr(torch, a.dtype)
    if a.rank < 1 or a.frequency < 1 or not a.seconds >= 0:
        raise UsageError(
            f"--rank {a.rank} --frequency {a.frequency} --seconds {a.seconds}: must be at least 1, 1 and 0"
        )
    if a.device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "no CUDA device here; TRITON_INTERPRET=1 and --device cpu --sets tiny only exercise the code"
            )
        if launch.INTERPRETED:
            raise UsageError("TRITON_INTERPRET=1 would time the interpreter; unset it")
    elif a.sets != ["tiny"] or not launch.INTERPRETED or a.dtype != torch.float32:
        raise UsageError(f"--device {a.device} takes --sets tiny, float32 and TRITON_INTERPRET=1: it measures nothing")
    return a


def lines(a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows of a run, without where they were measured."""
    cuda = a.device.type == "cuda"
    top = ceiling(a.device, 20 if cuda else 2)
    for what, value, unit in (("bfloat16 bmm", top.flops / 1e12, "TFLOP/s"), ("copy", top.bytes / 1e9, "GB/s")):
        yield {"metric": "ceiling", "what": what, "unit": unit, "median": value}
    # The interpreter computes bfloat16 wrongly.
    settings = {"precondition_frequency": a.frequency, "ns_dtype": None if cuda else torch.float32}
    states: dict[tuple[str, Shape], dict[str, Any]] = {}
    for name in a.sets:
        shapes = shapes_of(name)
        common = {"set": name, "rank": a.rank, "frequency": a.frequency}
        for what, bound in floors(shapes, a.rank, a.frequency, a.dtype.itemsize, top).items():
            row = {"optimizer": "pro-klshampoo", "metric": "floor", "what": what, "unit": "ms"}
            yield common | row | {"median": 1e3 * bound}
        p = problem(shapes, a.rank, a.dtype, a.device, settings, states)
        for row in measure(p, a.seconds, lambda text, name=name: print(f"{name}, {text}", flush=True)):
            yield common | row
        del p
        if cuda:
            torch.cuda.empty_cache()


def words(row: dict[str, Any]) -> str:
    """A row as a line."""
    who = [row.get("set"), row.get("optimizer"), row.get("backend"), "graphs" * row.get("graphs", 0), row["metric"]]
    value = row.get("reason") or f"{row['median']:.4g} {row['unit']}"
    if row["metric"] == "wrong":
        value = f"{row['error']:.1e}, {value}"
    if "q1" in row:
        value += f" [{row['q1']:.4g}, {row['q3']:.4g}] in {row['rounds']} periods"
    if "share" in row:
        value += f", {row['share']:.0%}, {row['calls']:.3g} calls"
    return " ".join(filter(None, [*who, row.get("what")])) + f": {value}"


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    try:
        a = parse(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    if a.device.type != "cuda":
        print("The interpreter runs the kernels on the CPU: no times below are measurements.")
    measured_on = environment(a.device) | {"dtype": str(a.dtype).removeprefix("torch.")}
    wrong = 0
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
    stream = a.out.open("w", newline="", encoding="utf-8") if a.out else None
    try:
        writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore") if stream else None
        if writer:
            writer.writeheader()
        for row in lines(a):
            wrong += row["metric"] == "wrong"
            print(words(row), file=sys.stderr if row["metric"] == "wrong" else sys.stdout, flush=True)
            if writer and stream and row["metric"] != "wrong":
                row |= measured_on
                writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
                stream.flush()
    finally:
        if stream:
            stream.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
