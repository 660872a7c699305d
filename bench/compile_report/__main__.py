"""Compile the kernels without a GPU, and report registers, shared memory and stack: ``python -m bench.compile_report``.

``aot`` compiles every Triton kernel for sm_80, 90 and 100; ``csrc`` builds csrc/. Exit status 1: a kernel
spills more than a little, takes more shared memory than there is, or does not compile. ``pack`` is ``./run prepare``;
``unpack`` takes up what it made.
"""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from bench.command import Parser, UsageError, command, cores
from bench.compile_report import pack


def report(name: str) -> tuple[Sequence[Any], list[str]]:
    """Make one report; return its rows, and what is wrong."""
    if name == "csrc":
        from bench.compile_report import csrc

        return csrc.report()
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
    names.add_parser("aot", help="compile the Triton kernels")
    names.add_parser("csrc", help="compile csrc/")
    own = names.add_parser("pack", prog="./run prepare", help="make what a GPU machine without network lacks")
    parts = ", ".join(pack.PARTS)
    own.add_argument("--only", nargs="+", choices=pack.PARTS, default=[*pack.PARTS], metavar="PART", help=parts)
    own.add_argument("--arch", type=int, default=90, help="the GPU's compute capability without its point (90)")
    own = names.add_parser("ahead", help="compile what the benchmarks launch into Triton's cache, as pack does")
    own.add_argument("arch", type=int)
    names.add_parser("unpack", help="take up what pack made, as far as it fits this machine")
    a = parser.parse_args(argv)
    if a.name == "pack":
        pack.pack(a.only, a.arch)
    elif a.name == "unpack":
        pack.unpack()
    elif a.name == "ahead":
        from bench.compile_report import ahead

        print(ahead.report(a.arch))
    else:
        import pandas

        found, wrong = report(a.name)
        print(pandas.DataFrame(map(vars, found)).to_string(index=False), flush=True)
        print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
        return int(bool(wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())
