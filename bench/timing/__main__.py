"""Time whole steps: ``python -m bench.timing steps --out bench/results/step-cpu.csv``.

``steps`` times whole steps beside Muon's, AdamW's and other packages', ``kernels`` what they launch, and ``tiles`` some
kernels with other tiles. Primitives and kernels by themselves are ``pytest bench``. What --out has of this commit and
machine is not measured again.
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

PARTS = ("steps", "kernels", "tiles")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="python -m bench.timing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=PARTS, help="whole steps beside others', what they launch, or other tiles")
    parser.add_argument("--out", type=Path, metavar="CSV", help="put the rows there, in place of the same ones'")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu (default) or cuda")
    parser.add_argument("--sets", nargs="+", choices=SETS, metavar="SET", help=f"of {', '.join(SETS)}")
    parser.add_argument("--seconds", type=float, default=1.0, help="per optimizer and set (default: 1)")
    a = parser.parse_args(argv)
    if a.device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; leave it out to measure on the CPU")
    if a.part == "tiles" and a.device.type != "cuda":
        raise UsageError("tiles are those of kernels, which run on CUDA devices: give --device cuda")
    command.positive(seconds=a.seconds)
    if a.out:
        command.make_file(a.out)
    return a


@command.command
def main(argv: Sequence[str]) -> int:
    """Measure set by set, print, write; return the exit status, which is 1 where something was wrong."""
    a, precision, wrong = parse(argv), torch.get_float32_matmul_precision(), False
    here = rows.environment(a.device)
    try:
        torch.set_float32_matmul_precision("highest")
        usual = {"steps": PAPER, "kernels": kernels.MAIN, "tiles": kernels.MAIN[:1]}[a.part]
        for name in a.sets or (usual if a.device.type == "cuda" else SMALL):
            if a.out and rows.measured(a.out, {"model": name}, here):
                print(f"{name}: in {a.out} already", flush=True)
                continue
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            own = SETS[name]
            if a.part == "tiles":
                from bench.timing import tiles  # which needs Triton

                found = list(tiles.measure(own, a.device, a.seconds))
            elif a.part == "kernels":
                found = kernels.measure(own, a.device)
            else:
                found = steps.measure(own, a.device, a.seconds)
            print("\n".join(map(rows.describe, found)), flush=True)
            wrong |= any(row.get("note", "").startswith("wrong") for row in found)
            if a.out:
                rows.upsert(a.out, [here | row for row in found], ("model",))
    finally:
        torch.set_float32_matmul_precision(precision)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
