"""Compiles every kernel for sm_80, 90 and 100, without a GPU: ``python -m bench.compile_report [--out bench/results]``.

What the Triton kernels became goes to aot.csv, beside what other versions of Triton made of them, what nvcc made of
csrc/ to csrc.csv. The exit status is 1 where a kernel spills, takes more shared memory than there is, multiplies
matrices without tensor cores, has lost its pipeline, or moves whole matrices by less than 16 bytes at a time.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas

from bench import rows
from bench.command import UsageError, command, cores, make_folder, options
from bench.compiled import csrc


@dataclass(frozen=True)
class Options:
    """Compile every kernel for sm_80, 90 and 100, without a GPU."""

    only: Literal["aot", "csrc"] | None = None
    """One of the two: the Triton kernels or csrc/."""
    out: Path | None = None
    """Folder for aot.csv and csrc.csv."""


def of_triton(jobs: int) -> tuple[list[Any], list[str]]:
    """Return the rows of the Triton kernels, and what is wrong."""
    if importlib.util.find_spec("triton") is None:
        raise UsageError("Triton is not installed: pip install triton, or choose --only csrc")
    from bench.compiled import triton_kernels
    from prokl.kernels import launch

    if launch.INTERPRETED:
        raise UsageError("TRITON_INTERPRET=1 interprets the kernels, which compiles nothing; unset it")
    return triton_kernels.report(jobs)


def of_csrc(jobs: int) -> tuple[list[Any], list[str]]:
    """Return the rows of csrc/, and what is wrong."""
    found = csrc.report(jobs)
    return found, list(csrc.complaints(found))


REPORTS: dict[str, Callable[[int], tuple[list[Any], list[str]]]] = {"aot": of_triton, "csrc": of_csrc}


KEYS: dict[str, tuple[str, ...]] = {"aot": ("triton",), "csrc": ()}
"""Columns by which rows of another compiler stay in a file; none do where there are none."""


@command
def main(argv: Sequence[str]) -> int:
    """Compile, print, write; return the exit status."""
    given = options(Options, argv, "bench.compile_report")
    if given.out:
        make_folder(given.out)
    wrong: list[str] = []
    for name in [given.only] if given.only else REPORTS:
        found, complaints = REPORTS[name](cores())
        print(pandas.DataFrame(found).to_string(index=False), flush=True)
        if given.out:
            rows.upsert(given.out / f"{name}.csv", map(vars, found), KEYS[name])
        wrong += complaints
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
