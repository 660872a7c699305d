"""Compiles what the benchmarks launch into Triton's cache, without a GPU, as ``./run prepare`` does.

An entry's key is made of what is in Triton's files, of Python's version through its libtriton, of ptxas's version, of a
kernel's text and line number, its arguments' types and what they are specialised on, and of settings in TRITON_...
variables; of no path, driver or torch. Triton of the same wheel finds the entries on another machine, therefore, once
:mod:`bench.compile_report.pack` has written anew where their files are; it still compiles a launcher in C for each
signature there.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import triton

from bench import first
from bench.command import Parser, command, cores
from bench.compile_report.launches import Launch, called
from bench.compile_report.trace import steps_of
from bench.compile_report.triton_kernels import build
from bench.micro import groups
from bench.micro.kernels import KERNELS
from bench.shapes import PAPER, SETS, ParameterSet
from bench.timing.entries import Entry, model_entries
from prokl.algorithm.settings import PRECISIONS

CUDA = torch.device("cuda")


def _stepped(s: ParameterSet, dtype: torch.dtype, build: Any) -> Iterator[Launch]:
    events = chain.from_iterable(chain.from_iterable(steps_of(s, dtype, build).values()))
    return (event.launch for event in events if event.launch is not None)


def _checked_and_stepped(s: ParameterSet, entry: Entry) -> Iterator[Launch]:
    """Yield what is launched where two weights of every shape are held to the reference, and then by the set."""
    for shape in dict.fromkeys(s.each):
        two = ParameterSet("", ((2, *shape),), ())
        yield from _stepped(two, torch.float32, entry.build)
        yield from _stepped(two, torch.float64, partial(entry.build, ns_dtype=torch.float64))
    yield from _stepped(s, torch.float32, entry.build)


def of_steps(s: ParameterSet) -> Iterator[Launch]:
    """Yield what timed steps launch on a set, and those before that hold them to the reference."""
    for entry in model_entries(s, CUDA, torch.bfloat16):
        if entry.backend != "triton":
            continue
        yield from _checked_and_stepped(s, entry)


def of_primitives(sets: Iterable[ParameterSet]) -> Iterator[Launch]:
    """Yield what the microbenchmarks launch on these sets."""
    for group in groups.groups(sets, CUDA):
        for form in group.forms(CUDA):
            if form.backend == "triton":
                yield from called(form.case, group.sizes, group.dtypes)


def of_first() -> Iterator[Launch]:
    """Yield what :mod:`bench.first` launches."""
    for case in KERNELS:
        yield from called(case, first.SIZES, (case.timed or case.dtypes)[0])
    for precision in PRECISIONS:
        yield from _checked_and_stepped(first.weights_of(first.SIZES), first.entry_of(first.SIZES, precision))


def launches(sets: Sequence[ParameterSet]) -> list[Launch]:
    """Return what the benchmarks launch on these sets, each once."""
    both = ["torch", "triton"]
    with patch("bench.timing.entries.backends", lambda device: both), patch.object(groups, "backends", lambda _: both):
        found = [*of_first(), *of_primitives(sets), *(launch for s in sets for launch in of_steps(s))]
    return list(dict.fromkeys(found))


def compiled(found: Iterable[Launch], arch: int) -> tuple[int, int]:
    """Compile what these launches take, side by side; return how many kernels were compiled, and how many were kept."""
    hits: list[bool] = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        with ThreadPoolExecutor(cores()) as pool, triton.AsyncCompileMode(pool):
            for launch in found:
                build(launch, arch)
    return hits.count(False), hits.count(True)


@command
def main(argv: Sequence[str]) -> int:
    """Compile; return the exit status."""
    parser = Parser(prog="python -m bench.compile_report.ahead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("arch", type=int, help="compute capability without its point, as 90")
    a = parser.parse_args(argv)
    made, kept = compiled(launches([SETS[name] for name in PAPER]), a.arch)
    print(f"Triton {triton.__version__}, sm_{a.arch}: {made} kernels compiled, {kept} in the cache already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
