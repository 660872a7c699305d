"""Disturbed steps and runs of every optimizer: ``python -m bench.disturbances [--out bench/results/disturbances.csv]``.

Steps are in the unit of the usual ones and so do not depend on the learning rate. Everything is seeded, in float32 and
on one thread of a CPU; nothing here is timed.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from bench import rows
from bench.command import UsageError, command, options, some
from bench.disturbances import experts, gpt, steps
from bench.disturbances.forms import FORMS, Form

CASES: dict[str, Callable[[Form], Iterator[rows.Row]]] = {
    **{case.name: partial(steps.measure, case.name) for case in steps.CASES},
    "experts": experts.measure,
    **{name: partial(gpt.measure, name) for name in gpt.DISTURBANCES},
}
"""What measures one optimizer, by case."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Disturb the gradients of every optimizer; ten minutes on one core.

    Ctrl-C keeps the cases that are done, and the same command goes on with the others.
    """

    cases: tuple[Literal[tuple(CASES)], ...] = tuple(CASES)  # type: ignore[valid-type]
    """spike: one gradient larger; zeros, faint, row: gradients that vanish for a while; huge: one near float32's limit;
    scale: another scale for good; experts: a mixture with idle ones; the others: a small GPT."""
    out: Path | None = None  # CSV file; its rows of the same cases are replaced
    again: bool = False  # Measure also what --out has of this commit and machine

    def __post_init__(self) -> None:
        some(cases=self.cases)
        if self.out is not None and self.out.is_dir():
            raise UsageError(f"--out {self.out}: must be a file; name one in it")


def run(o: Options) -> None:
    """Measure, print and write."""
    if o.out is not None:
        rows.read(o.out)  # now, not after measuring
    here = rows.environment(torch.device("cpu"))
    for case in o.cases:
        if o.out is not None and not o.again and rows.measured(o.out, {"case": case}, here):
            print(f"{case}: in {o.out} already; --again measures it anew", flush=True)
            continue
        found = []
        for form in FORMS:
            for row in CASES[case](form):
                print(rows.describe(row), flush=True)
                found.append(row | here)
        if o.out is not None:
            rows.upsert(o.out, found, key=("case",))


@command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    threads = torch.get_num_threads()
    try:
        o = options(Options, argv, "bench.disturbances")
        torch.set_num_threads(1)
        run(o)
        return 0
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
