"""What a step takes, by its part: ``python -m bench.timing steps --out bench/results/step-cpu.csv``.

``steps`` times whole steps beside Muon's, AdamW's and other packages'; ``kernels`` lists where the time of one goes.
The primitives and kernels by themselves are ``pytest bench``. What --out has of this commit and machine is not measured
again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import command, rows
from bench.command import Parser, UsageError
from bench.shapes import PAPER, SETS, SMALL
from bench.timing import kernels, steps

PARTS = {
    "steps": "time whole steps beside others'",
    "kernels": "list kernels, or on a CPU PyTorch's operators, by what they take of a step",
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="python -m bench.timing", description=(__doc__ or "").partition("\n")[0])
    names = parser.add_subparsers(dest="part", required=True, parser_class=Parser)
    for name, what in PARTS.items():
        own = names.add_parser(name, help=what, description=what)
        own.add_argument("--out", type=Path, metavar="CSV", help="put the rows there, in place of the same ones'")
        own.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu (default) or cuda")
        own.add_argument("--sets", nargs="+", choices=SETS, metavar="SET", help=f"of {', '.join(SETS)}")
        if name == "steps":
            own.add_argument("--seconds", type=float, default=1.0, help="per optimizer and set (default: 1)")
    a = parser.parse_args(argv)
    if a.device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; leave it out to measure on the CPU")
    if a.part == "steps":
        command.positive(seconds=a.seconds)
    if a.out:
        command.make_file(a.out)
        rows.read(a.out)  # now, not after measuring
    return a


@command.command
def main(argv: Sequence[str]) -> int:
    """Measure set by set, print, write; return the exit status, which is 1 where something was wrong."""
    a, precision, wrong = parse(argv), torch.get_float32_matmul_precision(), False
    here = rows.environment(a.device)
    try:
        torch.set_float32_matmul_precision("highest")
        for name in a.sets or (PAPER if a.device.type == "cuda" else SMALL):
            if a.out and rows.measured(a.out, {"model": name}, here):
                print(f"{name}: in {a.out} already", flush=True)
                continue
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            s = SETS[name]
            timed = a.part == "steps"
            found = steps.measure(s, a.device, a.seconds) if timed else list(kernels.measure(s, a.device))
            print("\n".join(map(rows.describe, found)), flush=True)
            wrong |= any(row.get("note", "").startswith("wrong") for row in found)
            if a.out:
                rows.upsert(a.out, [here | row for row in found], ("model",))
    finally:
        torch.set_float32_matmul_precision(precision)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
