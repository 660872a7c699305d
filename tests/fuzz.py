"""Random weights, settings and gradients: what must hold after every step whatever comes.

    python -m tests.fuzz --cases 100000 --first 0 --jobs 2

A case is one integer (:mod:`tests.fuzz_cases`), and what is checked of it is in :mod:`tests.fuzz_checks`.
``--cases 1 --first SEED`` repeats one.
"""

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.fuzz_cases import Case, draw, gradients
from tests.fuzz_checks import History, check, snapshot
from tests.inputs import forbid_host_reads


def histories(case: Case) -> list[History]:
    with ExitStack() as stack:
        if case.path == "blind":
            forbid_host_reads(stack.enter_context(pytest.MonkeyPatch.context()))
        weights = case.weights()
        backend = "torch" if case.path == "blind" else case.path
        optimizer = case.optimizer(weights, backend=backend, **case.settings)
        snapshots, steps = [[snapshot(p, {}) for p in weights]], list(gradients(case))
        for step in steps:
            for p, g in zip(weights, step, strict=True):
                p.grad = None if g is None else g.clone()
            optimizer.step()
            snapshots.append([snapshot(p, optimizer.state.get(p, {})) for p in weights])
    group = optimizer.param_groups[0]
    by_weight = zip(zip(*snapshots, strict=True), zip(*steps, strict=True), strict=True)
    return [History(case, optimizer.method, group, i, own, grads) for i, (own, grads) in enumerate(by_weight)]


def examine(seed: int) -> list[str]:
    """Return a line for everything that fails in the case of a seed."""
    try:
        return [line for history in histories(draw(seed)) for line in check(history)]
    except Exception as error:  # whatever it is, the case failed
        return [f"raised {type(error).__name__}: {error}"]


def chunks(every: int, size: int) -> list[Any]:
    """Return the seeds to ``every`` as parameters of tests, ``size`` each."""
    starts = range(0, every, size)
    return [pytest.param(range(start, start + size), id=f"{start}-{start + size - 1}") for start in starts]


def failures(one: Callable[[int], list[str]], seeds: Iterable[int]) -> list[tuple[int, list[str]]]:
    return [(seed, found) for seed in seeds if (found := one(seed))]


def _with_seed(seed: int) -> tuple[int, list[str]]:
    return seed, examine(seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the optimizers' steps.")
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="seed of the first; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args()
    seeds, kinds, failed = range(asked.first, asked.first + asked.cases), Counter[str](), 0
    with multiprocessing.get_context("spawn").Pool(asked.jobs, torch.set_num_threads, (1,)) as pool:
        for seed, lines in pool.imap_unordered(_with_seed, seeds):
            if lines:
                failed += 1
                kinds.update({line.split(":")[0] for line in lines})
                print(draw(seed), *lines, sep="\n    ", flush=True)
    print(f"{failed} of {asked.cases} cases failed")
    for kind, count in kinds.most_common():
        print(f"{count:7d}  {kind}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
