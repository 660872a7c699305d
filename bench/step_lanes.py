"""Optimizers that take turns on the same weights and gradients, timed period by period.

A period is PERIOD steps, one of which refreshes, so that its mean is the amortised step. Every weight of a shape starts
from the state that one of them has after SETTLING steps: a start is SVDs and eigenvectors of every weight, and in its
first 20 steps a state may still be rescaled.

Dimension key: m short side, n long side.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.peers import CannotRun, reason
from bench.shapes import ParameterSet
from bench.step_contenders import PERIOD, Contender
from prokl.initial import YOUNG

SETTLING = 1 + YOUNG
SIGNAL = 16
"""Rank of the gradients' signal."""
GRADIENTS = 8
"""Gradients of a weight, which take turns as new ones would come from a backward pass."""
AGREE = 1e-6
"""Largest distance of a contender of this package from the reference, both in float64, relative to the distance
moved. Measured: at most 4e-14; a wrong index gives 1."""
GATE_PERIOD = 3

Shape = tuple[int, int]


class Problem:
    """The weights of a set where they start, and their gradients: a signal of low rank plus as much noise.

    Attributes:
        parameters: the set.
        device: where.
        start: the weights.
        gradients: of every weight, ``GRADIENTS`` times.
        buffers: what an optimizer is given; it may write there.
    """

    def __init__(self, parameters: ParameterSet, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.parameters, self.device = parameters, device
        generator = torch.Generator(device)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        signals: dict[Shape, tuple[Tensor, Tensor]] = {}
        for m, n in parameters.oriented:
            generator.manual_seed(m * n)
            signals[m, n] = normal(m, SIGNAL), normal(SIGNAL, n)
        generator.manual_seed(0)

        def gradient(shape: Shape) -> Tensor:
            m, n = min(shape), max(shape)
            a, b = signals[m, n]
            G = torch.addmm(normal(m, n), a * normal(SIGNAL), b)
            return (G if shape == (m, n) else G.mT.contiguous()).to(dtype)

        self.start = [(0.02 * normal(*shape)).to(dtype) for shape in parameters.each]
        self.gradients = [[gradient(shape) for shape in parameters.each] for _ in range(GRADIENTS)]
        self.buffers = [torch.empty_like(W) for W in self.start]
        self._settled: dict[Any, dict[str, Any]] = {}

    def load(self, weights: Sequence[Tensor], t: int) -> None:
        """Give the weights their t-th gradients."""
        for W, buffer, G in zip(weights, self.buffers, self.gradients[t % GRADIENTS], strict=True):
            W.grad = buffer.copy_(G)

    def settled(self, kind: type[Optimizer], settings: Mapping[str, Any], index: int) -> dict[str, Any]:
        """State of weight ``index`` alone after SETTLING steps; the same for all of its oriented shape."""
        shape = self.start[index].shape
        settings = {**settings, "backend": "torch"}
        if "ns_dtype" in settings:  # the state does not depend on it, and half precision is slow on many CPUs
            settings["ns_dtype"] = torch.float32
        key = kind, tuple(sorted(settings.items(), key=lambda item: item[0])), min(shape), max(shape)
        if key not in self._settled:
            W = torch.nn.Parameter(self.start[index].clone())
            optimizer = kind([W], **settings)
            for t in range(SETTLING):
                W.grad = self.gradients[t % GRADIENTS][index].clone()
                optimizer.step()
            self._settled[key] = optimizer.state_dict()["state"][0]
        return self._settled[key]


class Lane:
    """A contender's own weights and optimizer.

    Attributes:
        contender: which.
        weights: where they have got to.
        optimizer: of these weights.
        periods: seconds of every step of every period timed.
        trouble: why there is no figure; None while all is well.
        took: seconds of a period, from warming up.
    """

    def __init__(self, contender: Contender, problem: Problem) -> None:
        self.contender, self.problem = contender, problem
        self.weights: list[Tensor] = [torch.nn.Parameter(W.clone()) for W in problem.start]
        self.optimizer = contender.make(self.weights)
        self.periods: list[list[float]] = []
        self.trouble: str | None = None
        self.took = 0.0
        self._steps = 0
        if contender.own:
            saved = self.optimizer.state_dict()
            saved["state"] = {i: copied(problem.settled(*contender.own, i)) for i in range(len(self.weights))}
            self.optimizer.load_state_dict(saved)

    def steps(self, count: int) -> list[float]:
        """Seconds of the next steps; gradients are put in place outside of them."""
        clocks = []
        for _ in range(count):
            self.problem.load(self.weights, self._steps)
            self._steps += 1
            clocks.append(timed(self.optimizer.step, self.problem.device))
        return [clock() for clock in clocks]

    def warm_up(self, slowest: float) -> None:
        """A period that does not count, but for knowing how long one takes.

        Raises:
            CannotRun: it takes longer than ``slowest`` seconds, as the second step promises; the first initialises.
        """
        seconds = self.steps(2)
        if seconds[1] * PERIOD > slowest:
            raise CannotRun(f"too slow: a step took {seconds[1]:.2g} s, may take {slowest / PERIOD:g} s")
        seconds += self.steps(PERIOD - 2)
        self.took = sum(seconds[1:]) * PERIOD / (PERIOD - 1)

    def finite(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(W.isfinite().all()) for W in self.weights)


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A state that shares no memory with the other weights'."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def timed(step: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Run a step; what is returned says how many seconds it took, and may wait for the device."""
    if device.type != "cuda":
        before = perf_counter()
        step()
        seconds = perf_counter() - before
        return lambda: seconds
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()

    def read() -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return read


def disagreement(contender: Contender, shape: Shape, device: torch.device) -> float:
    """Distance of one weight from the reference's after a few steps in float64, relative to the distance moved.

    Both start from the same initialised state, and refresh once. Gradients are those of a :class:`Problem`.
    """
    assert contender.own
    kind, settings = contender.own
    settings = {**settings, "precondition_frequency": GATE_PERIOD}
    if "ns_dtype" in settings:
        settings["ns_dtype"] = torch.float64
    problem = Problem(ParameterSet("gate", ((1, *shape),), ()), device, torch.float64)
    first = torch.nn.Parameter(problem.start[0].clone())
    optimizer = kind([first], **settings | {"backend": "reference"})
    problem.load([first], 0)
    optimizer.step()
    saved, ends = optimizer.state_dict(), []
    for key in {"L", "R"} & saved["state"][0].keys():
        # A few gradients leave R singular where n is many times m, and rounding would choose its null space's basis.
        factor = saved["state"][0][key]
        factor.diagonal().add_(factor.diagonal().mean())
    for backend in ("reference", contender.backend):
        W = torch.nn.Parameter(problem.start[0].clone())
        optimizer = kind([W], **settings | {"backend": backend})
        saved["param_groups"] = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(saved)
        for t in range(1, GATE_PERIOD + 2):  # the last step is with the refreshed bases
            problem.load([W], t)
            optimizer.step()
        ends.append(W.detach())
    moved = torch.linalg.vector_norm(ends[0] - problem.start[0])
    return float(torch.linalg.vector_norm(ends[1] - ends[0]) / moved)


class Gate:
    """Remembers what agrees with the reference, so that sets of the same shapes do not ask again."""

    def __init__(self) -> None:
        self._known: dict[Any, float] = {}

    def check(self, contender: Contender, problem: Problem) -> None:
        """Compare one weight of every shape.

        Raises:
            CannotRun: the contender does not go where the reference goes.
        """
        if contender.own is None or contender.backend == "reference":
            return
        for shape in dict.fromkeys(problem.parameters.each):
            settings = {k: v for k, v in contender.own[1].items() if k != "ns_dtype"}  # float64 for the comparison
            key = contender.own[0], tuple(sorted(settings.items())), shape, problem.device
            if key not in self._known:
                self._known[key] = disagreement(contender, shape, problem.device)
            if not self._known[key] <= AGREE:
                error = f"{self._known[key]:.1e} from the reference on {shape[0]}x{shape[1]} in float64"
                raise CannotRun(f"wrong: {error}, may be {AGREE:g}")


def enter(
    contenders: Sequence[Contender], problem: Problem, gate: Gate, slowest: float
) -> tuple[list[Lane], list[tuple[Contender, str]]]:
    """Check and warm up every contender with a period.

    Args:
        contenders: in the order in which they are to take turns.
        problem: weights and gradients.
        gate: what has been compared already.
        slowest: seconds that a period may take, initialisation aside.

    Returns:
        Those that run; the others and why they do not.
    """
    lanes: list[Lane] = []
    left_out: list[tuple[Contender, str]] = []
    for contender in contenders:
        try:
            gate.check(contender, problem)
            lane = Lane(contender, problem)
            lane.warm_up(slowest)
        except CannotRun as error:
            left_out.append((contender, str(error)))
        except Exception as error:  # a peer may fail in any way, and the rest is to be measured
            left_out.append((contender, reason(error)))
        else:
            lanes.append(lane)
    return lanes, left_out


def take_turns(lanes: Sequence[Lane], seconds: float, fewest: int, most: int) -> None:
    """Time periods of all lanes in turns, for about ``seconds`` each; the fewer ones of slow lanes spread evenly.

    A lane of which one period takes twice as long has one only. A lane that fails, or whose weights are not finite at
    the end, gets ``trouble``.
    """
    rounds = [1 if lane.took > 2 * seconds else max(fewest, min(most, round(seconds / lane.took))) for lane in lanes]
    total = max(rounds, default=0)
    for k in range(total):
        for lane, own in zip(lanes, rounds, strict=True):
            if lane.trouble is None and (k + 1) * own // total > k * own // total:
                try:
                    lane.periods.append(lane.steps(PERIOD))
                except Exception as error:  # as in enter
                    lane.trouble = reason(error)
    for lane in lanes:
        if lane.trouble is None and not lane.finite():
            lane.trouble = "wrong: weights are not finite"
