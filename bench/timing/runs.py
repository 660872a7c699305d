"""Optimizers that take turns on the same weights and gradients, timed period by period.

A period is PERIOD steps, one of which refreshes, so that its mean is the amortised step.
"""

import textwrap
from collections.abc import Sequence

import torch
from torch import Tensor

from bench import clock
from bench.command import UsageError
from bench.shapes import Problem
from bench.timing import agreement
from bench.timing.entries import PERIOD, Entry


class TimedRun:
    """One entry's own weights and optimizer."""

    def __init__(self, entry: Entry, problem: Problem) -> None:
        self.entry, self.problem = entry, problem
        self.weights: list[Tensor] = [torch.nn.Parameter(W.clone()) for W in problem.start]
        self.optimizer = entry.build(self.weights)
        self.periods: list[list[float]] = []  # seconds of every step of every period timed
        self.trouble: str | None = None  # why there is no figure
        self.took = 0.0  # seconds of a period, from warming up
        self._steps = 0

    def steps(self, count: int) -> list[float]:
        """Return the seconds of the next steps; gradients are put in place outside of them."""
        device, marks = self.problem.device, []
        for _ in range(count):
            self.problem.load(self.weights, self._steps)
            self._steps += 1
            before = clock.mark(device)
            self.optimizer.step()
            marks.append((before, clock.mark(device)))
        clock.wait(device)
        return [clock.between(*both) for both in marks]

    def warm_up(self, slowest: float) -> None:
        """Run the first step, which begins the state, and a period; raise UsageError if one takes too many seconds."""
        _, second = self.steps(2)
        if second * PERIOD > slowest:
            raise UsageError(f"too slow: a step took {second:.2g} s, may take {slowest / PERIOD:g} s")
        self.took = second + sum(self.steps(PERIOD - 1))
        if self.took > slowest:
            raise UsageError(f"too slow: a period took {self.took:.2g} s, may take {slowest:g} s")


def failure(entry: Entry, error: Exception) -> str:
    """Say in a line why there is no figure: a peer cannot run, while what fails of this package is wrong."""
    line = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
    return f"wrong: {line}" if entry.backend else line


def enter(entries: Sequence[Entry], problem: Problem, slowest: float) -> tuple[list[TimedRun], list[tuple[Entry, str]]]:
    """Check and warm up every entry with a period; return those that run, and the others with why they do not."""
    runs: list[TimedRun] = []
    left_out: list[tuple[Entry, str]] = []
    for entry in entries:
        try:
            if entry.backend not in ("", "reference"):
                for shape in dict.fromkeys(problem.parameters.each):
                    if wrong := agreement.complaint(entry, shape, problem.device):
                        raise UsageError(f"wrong: {wrong}")
            run = TimedRun(entry, problem)
            run.warm_up(slowest)
        except UsageError as error:
            left_out.append((entry, str(error)))
        except Exception as error:  # a peer may fail in any way, and the rest is to be measured
            left_out.append((entry, failure(entry, error)))
        else:
            runs.append(run)
    return runs, left_out


def take_turns(runs: Sequence[TimedRun], seconds: float, fewest: int, most: int) -> None:
    """Time periods of all runs in turns, for about ``seconds`` each.

    A run of which one period takes twice as long has one only. A run that fails, or whose weights are not finite at
    the end, gets ``trouble``.
    """
    rounds = [1 if run.took > 2 * seconds else max(fewest, min(most, round(seconds / run.took))) for run in runs]
    for k in range(max(rounds, default=0)):
        for run in (run for run, own in zip(runs, rounds, strict=True) if k < own and run.trouble is None):
            try:
                run.periods.append(run.steps(PERIOD))
            except Exception as error:  # as in enter
                run.trouble = failure(run.entry, error)
    for run in runs:
        if run.trouble is None and not all(bool(W.isfinite().all()) for W in run.weights):
            run.trouble = "wrong: weights are not finite"
