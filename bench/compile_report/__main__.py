"""Compile the kernels without a GPU, and report: ``python -m bench.compile_report aot --out bench/results``.

``aot`` compiles every Triton kernel for sm_80, 90 and 100, beside what other versions of Triton made of them, ``csrc``
has nvcc compile csrc/. Exit status 1: a kernel spills more than a little, takes more shared memory than there is,
multiplies matrices without tensor cores, has lost its pipeline, or moves whole matrices by less than 16 bytes at a
time. ``pack`` is ``./run prepare``; ``unpack`` takes up what it made.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command import Parser, UsageError, command, cores, make_folder
from bench.compile_report import pack

REPORTS = {"aot": "compile the Triton kernels", "csrc": "compile csrc/"}


def report(name: str) -> tuple[Sequence[Any], list[str]]:
    """Make one report; return its rows, and what is wrong."""
    if name == "csrc":
        from bench.compile_report import csrc

        return csrc.report(cores())
    if importlib.util.find_spec("triton") is None:
        raise UsageError("Triton is not installed: pip install triton, or choose csrc")
    from prokl.kernels import launch

    if launch.INTERPRETED:
        raise UsageError("TRITON_INTERPRET=1 interprets the kernels, which compiles nothing; unset it")
    from bench.compile_report import triton_kernels

    return triton_kernels.report(cores())


@command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    parser = Parser(prog="python -m bench.compile_report", description=(__doc__ or "").partition("\n")[0])
    names = parser.add_subparsers(dest="name", required=True, parser_class=Parser)
    for name, what in REPORTS.items():
        own = names.add_parser(name, help=what)
        own.add_argument("--out", type=Path, metavar="DIR", help=f"folder of {name}.csv")
    own = names.add_parser("pack", prog="./run prepare", help="make what a GPU machine without network lacks")
    parts = ", ".join(pack.PARTS)
    own.add_argument("--only", nargs="+", choices=pack.PARTS, default=[*pack.PARTS], metavar="PART", help=parts)
    own.add_argument("--arch", type=int, default=90, help="the GPU's compute capability without its point (90)")
    names.add_parser("unpack", help="take up what pack made, as far as it fits this machine")
    a = parser.parse_args(argv)
    if a.name == "pack":
        pack.pack(a.only, a.arch)
    elif a.name == "unpack":
        pack.unpack()
    else:
        return made(a.name, a.out)
    return 0


def made(name: str, out: Path | None) -> int:
    """Make one report, print its rows and write them; return the exit status."""
    import pandas

    from bench import rows

    if out:
        make_folder(out)
    compiled, wrong = report(name)
    found = list(map(vars, compiled))
    print(pandas.DataFrame(found).to_string(index=False), flush=True)
    if out:
        # Rows of another Triton stay; of another nvcc none do.
        rows.upsert(out / f"{name}.csv", found, ("triton",) if name == "aot" else ())
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
