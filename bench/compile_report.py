"""Compiles every kernel for sm_80, 90 and 100, without a GPU: ``python -m bench.compile_report [--out bench/results]``.

What the Triton kernels became goes to aot.csv, what nvcc made of csrc/ to csrc.csv. The exit status is 1 where a kernel
spills, takes more shared memory than there is, multiplies matrices without tensor cores, or has lost its pipeline.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench.compiled import csrc, triton_kernels
from bench.errors import UsageError, command
from prokl.kernels import launch


def of_triton(jobs: int) -> tuple[list[Any], list[str]]:
    """Return the rows of the Triton kernels, and what is wrong."""
    if launch.INTERPRETED:
        raise UsageError("TRITON_INTERPRET=1 interprets the kernels, which compiles nothing; unset it")
    return triton_kernels.report(jobs)


def of_csrc(jobs: int) -> tuple[list[Any], list[str]]:
    """Return the rows of csrc/, and what is wrong."""
    rows = csrc.report(jobs)
    return rows, list(csrc.complaints(rows))


REPORTS: dict[str, Callable[[int], tuple[list[Any], list[str]]]] = {"aot": of_triton, "csrc": of_csrc}


@command
def main(argv: Sequence[str]) -> int:
    """Compile, print, write; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.compile_report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=REPORTS, help="one of the two (default: both)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write aot.csv and csrc.csv there")
    options = parser.parse_args(argv)
    wrong: list[str] = []
    for name in [options.only] if options.only else REPORTS:
        rows, complaints = REPORTS[name](os.cpu_count() or 1)
        table = pd.DataFrame(rows)
        print(table.to_string(index=False), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            table.to_csv(options.out / f"{name}.csv", index=False)
        wrong += complaints
    print("\n".join(wrong), end="\n" * bool(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
