"""Compiles what the benchmarks launch into Triton's cache, without a GPU, as ``./run prepare`` does.

An entry's key is made of what is in Triton's files, of Python's version through its libtriton, of ptxas's version, of a
kernel's text and line number, its arguments' types and what they are specialised on, and of settings in TRITON_...
variables; of no path, driver or torch. Triton of the same wheel finds the entries on another machine, therefore, once
:mod:`bench.compile_report.pack` has written anew where their files are; it still compiles a launcher in C for each
signature there.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from unittest.mock import patch

import torch
import triton

from bench import first
from bench.command import cores
from bench.compile_report.launches import Launch, called
from bench.compile_report.trace import steps_of
from bench.compile_report.triton_kernels import build
from bench.micro import groups
from bench.micro.kernels import KERNELS
from bench.shapes import PAPER, SETS, ParameterSet
from bench.timing.entries import Entry, model_entries
from prokl.algorithm.settings import PRECISIONS

CUDA = torch.device("cuda")


def of_steps(s: ParameterSet, entry: Entry) -> Iterator[Launch]:
    """Yield what is launched where two weights of every shape are held to the reference, and then by the set."""
    twos = [ParameterSet("", ((2, *shape),), ()) for shape in dict.fromkeys(s.each)]
    double = partial(entry.build, ns_dtype=torch.float64)
    built = [(two, *own) for two in twos for own in ((torch.float32, entry.build), (torch.float64, double))]
    for own in (*built, (s, torch.float32, entry.build)):
        for event in chain.from_iterable(chain.from_iterable(steps_of(*own).values())):
            if event.launch is not None:
                yield event.launch


def launches(sets: Sequence[ParameterSet]) -> list[Launch]:
    """Return what :mod:`bench.first` launches, and the microbenchmarks and timed steps on these sets, each once."""
    both, found = ["torch", "triton"], []
    for case in KERNELS:
        found += called(case, first.SIZES, (case.timed or case.dtypes)[0])
    for precision in PRECISIONS:
        found += of_steps(first.weights_of(first.SIZES), first.entry_of(first.SIZES, precision))
    with patch("bench.timing.entries.backends", lambda device: both), patch.object(groups, "backends", lambda _: both):
        for group in groups.groups(sets, CUDA):
            for form in group.forms(CUDA):
                if form.backend == "triton":
                    found += called(form.case, group.sizes, group.dtypes)
        for s in sets:
            for entry in model_entries(s, CUDA, torch.bfloat16):
                if entry.backend == "triton":
                    found += of_steps(s, entry)
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


def report(arch: int) -> str:
    """Compile all that the benchmarks launch on the paper's models; say how much that was."""
    made, kept = compiled(launches([SETS[name] for name in PAPER]), arch)
    return f"Triton {triton.__version__}, sm_{arch}: {made} kernels compiled, {kept} in the cache already"
