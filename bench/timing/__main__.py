"""What a step takes, by its part: ``python -m bench.timing steps --out bench/results/step-cpu.csv``.

``steps`` times whole steps beside Muon's, AdamW's and other packages'; ``kernels`` lists where the time of one goes;
``memory`` counts state and workspace; ``divided`` measures ranks. The primitives and kernels by themselves are
``pytest bench``. What --out has of this commit and machine is not measured again.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import command, rows
from bench.command import Parser, UsageError
from bench.rates import machine_rates
from bench.shapes import ASPECTS, PAPER, SETS, SMALL
from bench.timing import divided, kernels, memory, steps

EVERY = SETS | ASPECTS
Here = Mapping[str, str]


def by_set(a: argparse.Namespace, here: Here, key: Sequence[str], measure: Callable[[str], list[rows.Row]]) -> bool:
    """Measure set by set, print and write; return whether something was wrong."""
    failed = False
    for name in a.sets:
        if a.out and not a.again and rows.measured(a.out, {"model": name}, here):
            print(f"{name}: in {a.out} already; --again measures it anew", flush=True)
            continue
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        found = measure(name)
        failed |= any(row.get("note", "").startswith("wrong") for row in found)
        written(found, a.out, here, key)
    return failed


def written(found: Iterable[rows.Row], out: Path | None, here: Here, key: Sequence[str]) -> None:
    """Print rows, and put them into the file."""
    found = list(found)
    print("\n".join(map(rows.describe, found)), flush=True)
    if out:
        rows.upsert(out, [dict(here) | row for row in found], key)


def time_steps(a: argparse.Namespace, here: Here) -> bool:
    """Time whole steps beside others'."""
    if not a.seconds > 0 or a.rounds < steps.FEWEST:
        least = f"must be more than 0, and at least {steps.FEWEST}"
        raise UsageError(f"--seconds {a.seconds:g} --rounds {a.rounds}: {least}")
    a.sets = a.sets or ([*PAPER] if a.device.type == "cuda" else [*SMALL, *ASPECTS])
    rates: list[Any] = []

    def measure(name: str) -> list[rows.Row]:
        if not rates:
            rates.append(machine_rates(a.device, a.out, here))
        return steps.measure(EVERY[name], a.device, rates[0], a.seconds, a.rounds)

    return by_set(a, here, ("model", "case"), measure)


def list_kernels(a: argparse.Namespace, here: Here) -> bool:
    """List kernels, or on a CPU PyTorch's operators, by what they take of a step."""
    a.sets = a.sets or [*(PAPER if a.device.type == "cuda" else SMALL)]
    without: list[bool] = []

    def measure(name: str) -> list[rows.Row]:
        found = list(kernels.measure(EVERY[name], a.device))
        without.extend("median" not in row for row in found)
        return found

    return by_set(a, here, ("model", "case"), measure) or any(without)


def count_memory(a: argparse.Namespace, here: Here) -> bool:
    """Count the state and the workspace of every method; nothing is timed."""
    a.sets = a.sets or [*SETS]
    if unknown := [name for name in a.sets if name not in SETS]:
        raise UsageError(f"--sets {unknown[0]}: is none of {', '.join(SETS)}; give one of these")
    return by_set(a, here, ("model",), lambda name: list(memory.set_rows(SETS[name])))


def measure_divided(a: argparse.Namespace, here: Here) -> bool:
    """Measure the ranks of a divided optimizer, processes here."""
    command.at_least(1, ranks=a.ranks, layers=a.layers, width=a.width, periods=a.periods)
    command.some(ranks=a.ranks)
    if a.width % 2:
        raise UsageError(f"--width {a.width}: must be even, as rotary positions need")
    for found in divided.measure(a.ranks, divided.config_of(a.layers, a.width), a.periods):
        written(found, a.out, here, ("case", "ranks"))
    return False


PARTS: dict[str, Callable[[argparse.Namespace, Here], bool]] = {
    "steps": time_steps,
    "kernels": list_kernels,
    "memory": count_memory,
    "divided": measure_divided,
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="python -m bench.timing", description=(__doc__ or "").partition("\n")[0])
    names = parser.add_subparsers(dest="part", required=True, parser_class=Parser)
    for name, part in PARTS.items():
        own = names.add_parser(name, help=part.__doc__, description=part.__doc__)
        own.add_argument("--out", type=Path, metavar="CSV", help="put the rows there, in place of the same ones'")
        if name in ("steps", "kernels"):
            own.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu (default) or cuda")
        if name in ("steps", "kernels", "memory"):
            own.add_argument("--sets", nargs="+", choices=EVERY, metavar="SET", help=f"of {', '.join(EVERY)}")
            own.add_argument("--again", action="store_true", help="also what --out has of this commit and machine")
        if name == "steps":
            own.add_argument("--seconds", type=float, default=1.0, help="per optimizer and set (default: 1)")
            own.add_argument("--rounds", type=int, default=15, help="periods at most (default: 15)")
        if name == "divided":
            own.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="processes (default: 1 2 4)")
            for option, value in (("layers", 6), ("width", 192), ("periods", 9)):
                own.add_argument(f"--{option}", type=int, default=value, help=f"default: {value}")
    a = parser.parse_args(argv)
    if getattr(a, "device", torch.device("cpu")).type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; leave it out to measure on the CPU")
    if a.out:
        if a.out.is_dir():
            raise UsageError(f"--out {a.out}: must be a file; name one in it")
        rows.read(a.out)  # now, not after measuring
    return a


@command.command
def main(argv: Sequence[str]) -> int:
    """Measure, print, write; return the exit status, which is 1 where something was wrong."""
    a, threads, precision = parse(argv), torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        return int(PARTS[a.part](a, rows.environment(getattr(a, "device", torch.device("cpu")))))
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


if __name__ == "__main__":
    sys.exit(main())
