"""What a step takes, by its part: ``python -m bench.timing steps --out bench/results/step-cpu.csv``.

``steps`` times whole steps beside Muon's, AdamW's and other packages'; ``kernels`` lists where the time of one goes;
``memory`` counts state and workspace; ``divided`` measures ranks. The primitives and kernels by themselves are
``pytest bench``. What --out has of this commit and machine is not measured again.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from bench import command, rows
from bench.command import Parser, UsageError
from bench.rates import machine_rates
from bench.shapes import ASPECTS, PAPER, SETS, SMALL, ParameterSet
from bench.timing import divided, kernels, memory, steps

EVERY = SETS | ASPECTS
CPU = torch.device("cpu")
PARTS = {
    "steps": "time whole steps beside others'",
    "kernels": "list kernels, or on a CPU PyTorch's operators, by what they take of a step",
    "memory": "count the state and the workspace of every method; nothing is timed",
    "divided": "measure the ranks of a divided optimizer, processes here",
}
KEYS = {"steps": ("model", "case"), "kernels": ("model", "case"), "memory": ("model",), "divided": ("case", "ranks")}
"""Columns by which new rows take the place of old ones."""


def of_a_set(a: argparse.Namespace, here: Mapping[str, str]) -> Callable[[ParameterSet], Iterable[rows.Row]]:
    """Return what measures a set."""
    if a.part == "steps":
        rates = machine_rates(a.device, a.out, here)
        return lambda s: steps.measure(s, a.device, rates, a.seconds, a.rounds)
    return memory.set_rows if a.part == "memory" else lambda s: kernels.measure(s, a.device)


def measured(a: argparse.Namespace, here: Mapping[str, str]) -> Iterator[list[rows.Row]]:
    """Yield the rows of one set, or of one launcher and number of ranks, after another."""
    if a.part == "divided":
        yield from divided.measure(a.ranks, divided.config_of(a.layers, a.width), a.periods)
        return
    usual = {"cuda": [*PAPER], "cpu": [*SMALL, *(ASPECTS if a.part == "steps" else ())]}[a.device.type]
    measure = of_a_set(a, here)
    for name in a.sets or ([*SETS] if a.part == "memory" else usual):
        if a.out and not a.again and rows.measured(a.out, {"model": name}, here):
            print(f"{name}: in {a.out} already; --again measures it anew", flush=True)
            continue
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        yield list(measure(EVERY[name]))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="python -m bench.timing", description=(__doc__ or "").partition("\n")[0])
    names = parser.add_subparsers(dest="part", required=True, parser_class=Parser)
    for name, what in PARTS.items():
        own = names.add_parser(name, help=what, description=what)
        own.set_defaults(device=CPU)
        own.add_argument("--out", type=Path, metavar="CSV", help="put the rows there, in place of the same ones'")
        if name in ("steps", "kernels"):
            own.add_argument("--device", type=torch.device, help="cpu (default) or cuda")
        if name != "divided":
            every = SETS if name == "memory" else EVERY
            own.add_argument("--sets", nargs="+", choices=every, metavar="SET", help=f"of {', '.join(every)}")
            own.add_argument("--again", action="store_true", help="also what --out has of this commit and machine")
        if name == "steps":
            own.add_argument("--seconds", type=float, default=1.0, help="per optimizer and set (default: 1)")
            own.add_argument("--rounds", type=int, default=15, help="periods at most (default: 15)")
        if name == "divided":
            own.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="processes (default: 1 2 4)")
            for option, value in (("layers", 6), ("width", 192), ("periods", 9)):
                own.add_argument(f"--{option}", type=int, default=value, help=f"default: {value}")
    a = parser.parse_args(argv)
    if a.device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; leave it out to measure on the CPU")
    if a.part == "steps":
        command.positive(seconds=a.seconds)
        command.at_least(steps.FEWEST, rounds=a.rounds)
    if a.part == "divided":
        command.at_least(1, ranks=a.ranks, layers=a.layers, width=a.width, periods=a.periods)
        if a.width % 2:
            raise UsageError(f"--width {a.width}: must be even, as rotary positions need")
    if a.out:
        command.make_file(a.out)
        rows.read(a.out)  # now, not after measuring
    return a


@command.command
def main(argv: Sequence[str]) -> int:
    """Measure, print, write; return the exit status, which is 1 where something was wrong."""
    a, precision, wrong = parse(argv), torch.get_float32_matmul_precision(), False
    try:
        torch.set_float32_matmul_precision("highest")
        here = rows.environment(a.device)
        for found in measured(a, here):
            print("\n".join(map(rows.describe, found)), flush=True)
            wrong |= any(row.get("note", "").startswith("wrong") for row in found)
            if a.out:
                rows.upsert(a.out, [here | row for row in found], KEYS[a.part])
    finally:
        torch.set_float32_matmul_precision(precision)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
