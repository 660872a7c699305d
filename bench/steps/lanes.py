"""Optimizers that take turns on the same weights and gradients, timed period by period.

A period is PERIOD steps, one of which refreshes, so that its mean is the amortised step.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.steps.contenders import PERIOD, Contender
from bench.steps.gate import Gate
from bench.steps.peers import CannotRun, reason
from bench.steps.problem import Problem


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


def failure(contender: Contender, error: Exception) -> str:
    """Why a contender that failed has no figure: a peer cannot run, while what is this package's own is wrong."""
    return f"wrong: {reason(error)}" if contender.own else reason(error)


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
            left_out.append((contender, failure(contender, error)))
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
                    lane.trouble = failure(lane.contender, error)
    for lane in lanes:
        if lane.trouble is None and not lane.finite():
            lane.trouble = "wrong: weights are not finite"
