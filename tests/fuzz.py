"""Random weights, settings and gradients: what must hold after every step whatever comes.

    python -m tests.fuzz --cases 100000 --first 0 --jobs 2

A case is one integer (:mod:`tests.fuzz_cases`), and what is checked of it is in :mod:`tests.fuzz_checks`; where the
result is unique up to rounding, both batched paths must also find the reference's. ``--cases 1 --first SEED`` repeats
one. With ``--paper`` no step is bounded (clip_threshold=None): nothing has to stay finite then, but nothing may raise.
"""

import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bench.command import at_least, command, cores, options
from tests.fuzz_cases import Case, draw, gradients
from tests.fuzz_checks import FACTORS, Finding, check, snapshot
from tests.inputs import forbid_host_reads
from tests.problems import made, relative

PERTURBATION = 1e-12
"""Relative change of every gradient's entry whose effect on the reference says how far rounding may carry a batch: ten
thousand times the unit roundoff, where an entry of a product has some hundred terms and a step some ten products."""

DIRECTIONS = 4
"""Allowance for the directions of such a change that were not drawn."""

UNIQUE = 1e-7
"""Effect of it from which on a result is not unique: it hangs on which side of a threshold rounding falls."""

CONDITION = 1e6
"""Condition of a factor, at a refresh, from which on its eigenbasis is left to rounding."""


class Run(NamedTuple):
    """One run of a case: what every weight was, step by step, and its gradients."""

    weights: list[Tensor]
    optimizer: torch.optim.Optimizer
    snapshots: list[list[dict[str, Tensor]]]
    """By weight, then by step; the first before any."""
    gradients: list[list[Tensor | None]]
    """By weight, then by step."""


def run(case: Case, path: str, perturbation: float = 0.0) -> Run:
    """Step a case to its end."""
    noise = torch.Generator().manual_seed(case.seed)
    with ExitStack() as stack:
        if path == "blind":
            forbid_host_reads(stack.enter_context(pytest.MonkeyPatch.context()))
        weights = case.weights()
        optimizer = made(case.optimizer, weights, backend="torch" if path == "blind" else path, **case.settings)
        found = Run(weights, optimizer, [[snapshot(p, {})] for p in weights], [[] for _ in weights])
        for step in gradients(case):
            for p, g, given in zip(weights, step, found.gradients, strict=True):
                given.append(g)
                if g is not None and perturbation:
                    g = g * (1 + perturbation * torch.randn(g.shape, generator=noise, dtype=g.dtype))
                p.grad = None if g is None else g.clone()
            optimizer.step()
            for p, own in zip(weights, found.snapshots, strict=True):
                own.append(snapshot(p, optimizer.state.get(p, {})))
    return found


def condition(case: Case, history: list[dict[str, Tensor]]) -> float:
    """Return the largest condition that a factor of one weight had when its eigenbasis was refreshed."""
    worst = 1.0
    for now in history[1:]:
        fresh = (now["step"] > 0) & (now["step"] % case.settings["precondition_frequency"] == 0)
        for key in FACTORS:
            if key in now and fresh.any():
                eigenvalues = torch.linalg.eigvalsh(now[key][fresh])
                worst = max(worst, float((eigenvalues[:, -1] / eigenvalues[:, 0].clamp(min=0)).max()))
    return worst


def disagreements(case: Case, batched: Run) -> Iterator[Finding]:
    """Yield what of a batched run is further from the reference's than rounding explains, where that is unique.

    Rounding acts as a change of the gradients, and as one of the factors, which the QR of a refresh multiplies by their
    condition.
    """
    runs = [run(case, "reference", size) for size in (0.0, PERTURBATION, -PERTURBATION)]
    for i in range(len(case.shapes)):
        wanted, *others = (r.snapshots[i][-1] for r in runs)
        keys = [key for key, value in wanted.items() if value.is_floating_point()]
        effects = {key: max(relative(other[key], wanted[key]) for other in others) for key in keys}
        worst = condition(case, runs[0].snapshots[i])
        if max(effects.values()) > UNIQUE or worst > CONDITION:
            continue
        for key, effect in effects.items():
            measured = relative(batched.snapshots[i][-1][key], wanted[key])
            bound = PERTURBATION + DIRECTIONS * effect + 10 * torch.finfo(torch.float64).eps * worst
            if not measured <= bound:
                yield Finding(f"{key} unlike the reference's", i, 0, case.steps - 1, measured, bound)


def examine(seed: int) -> list[str]:
    """Return a line for everything that fails in the case of a seed."""
    case = draw(seed)
    try:
        done = run(case, case.path)
        h = done.optimizer.method.hyper(done.optimizer.param_groups[0])
        found: list[Finding] = []
        for i, (snapshots, grads) in enumerate(zip(done.snapshots, done.gradients, strict=True)):
            found += check(case, h, i, snapshots, grads)
        if case.unique:
            found += disagreements(case, done)
        return [str(finding) for finding in found]
    except Exception as error:  # whatever it is, the case failed
        return [f"raised {type(error).__name__}: {error}"]


def examine_unbounded(seed: int) -> list[str]:
    """Return what fails in the case of a seed without a bound: that it raises, or what does not stay finite."""
    case = draw(seed)
    case = replace(case, settings={**case.settings, "clip_threshold": None})
    try:
        done = run(case, case.path)
    except Exception as error:
        return [f"raised {type(error).__name__}: {error}"]
    return [
        f"not finite: {key} of weight {i}"
        for i, snapshots in enumerate(done.snapshots)
        for key, value in snapshots[-1].items()
        if not value.isfinite().all()
    ]


def chunks(every: int, size: int) -> list[Any]:
    """Return the seeds to ``every`` as parameters of tests, ``size`` each."""
    starts = range(0, every, size)
    return [pytest.param(range(start, start + size), id=f"{start}-{start + size - 1}") for start in starts]


def failures(one: Callable[[int], list[str]], seeds: Iterable[int]) -> list[tuple[int, list[str]]]:
    """Return the seeds whose cases failed, with what did."""
    return [(seed, found) for seed in seeds if (found := one(seed))]


@dataclass(frozen=True)
class Options:
    """Fuzz the optimizers' steps."""

    cases: int = 1000  # How many
    first: int = 0  # Seed of the first; the others follow
    jobs: int = 1  # Processes
    paper: bool = False  # Without the bound: nothing may raise, and what is not finite is listed

    def __post_init__(self) -> None:
        at_least(1, cases=self.cases, jobs=self.jobs)
        at_least(0, first=self.first)


def _prepare() -> None:
    """Leave Ctrl-C to the parent, and cores to the other processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _with_seed(seed: int, paper: bool) -> tuple[int, list[str]]:
    return seed, examine_unbounded(seed) if paper else examine(seed)


def results(asked: Options) -> Iterator[tuple[int, list[str]]]:
    """Yield every case's seed and what failed in it, in the order in which they are done."""
    one, seeds = partial(_with_seed, paper=asked.paper), range(asked.first, asked.first + asked.cases)
    if asked.jobs == 1:
        torch.set_num_threads(1)
        yield from map(one, seeds)
    else:
        with multiprocessing.get_context("spawn").Pool(min(asked.jobs, cores()), _prepare) as pool:
            yield from pool.imap_unordered(one, seeds)


@command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 1 after a failure, 2 for wrong input, 130 after Ctrl-C."""
    asked = options(Options, argv, "tests.fuzz")
    start, done, failed, kinds = time.monotonic(), 0, 0, Counter[str]()
    try:
        for seed, lines in results(asked):
            done += 1
            if lines:
                failed += 1
                kinds.update({line.split(":")[0] for line in lines})
                print(draw(seed), *lines, sep="\n    ", flush=True)
    finally:  # after Ctrl-C, too
        print(f"{failed} of {done} cases failed, {time.monotonic() - start:.0f} s")
        for kind, count in kinds.most_common():
            print(f"{count:7d}  {kind}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
