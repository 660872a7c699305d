"""What a step takes on an H200, modelled: ``python -m bench.step_model [--out bench/results/step_model.csv]``.

The launches of the real step are traced without a GPU (:mod:`bench.model.trace`), and each gets a time by two sets of
rates (:mod:`bench.model.rates`). Nothing here is measured. Rows whose precision is "before" are those of the step
before float32 factors were multiplied as pairs; they are not made again.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

from bench import rows
from bench.command import Parser, UsageError, command
from bench.model import rates
from bench.model.tables import ON_TOP, ORDINARY, total
from bench.model.trace import EXTENSION, Event, steps
from bench.shapes import PAPER, SETS, ParameterSet

RANK = 128
DTYPES = (torch.bfloat16, torch.float32)
"""Of weights and gradients."""
PRECISIONS = ("faithful", "balanced")
MODELLED = "H200, modelled"
"""In the place of the device."""
KNOWN = ("torch", "triton", "prokl", "commit", "date")
"""What of the provenance says something about a model."""


@dataclass
class Sum:
    """What the launches of one row add up to."""

    launches: int = 0
    gflop: float = 0.0
    gb: float = 0.0
    ms_brief: float = 0.0
    ms_tiles: float = 0.0

    def add(self, event: Event) -> None:
        """Add a launch."""
        self.launches += 1
        self.gflop += sum(event.work.flops.values()) / 1e9
        self.gb += event.work.bytes / 1e9
        self.ms_brief += 1e3 * rates.brief(event)
        self.ms_tiles += 1e3 * rates.tiles(event)

    def __sub__(self, other: "Sum") -> "Sum":
        return Sum(**{name: value - getattr(other, name) for name, value in vars(self).items()})


@dataclass
class Step:
    """A whole step of a model, by (stage, kernel, arithmetic), and the number of its buckets."""

    buckets: int
    parts: dict[tuple[str, str, str], Sum] = field(default_factory=dict)


def added(buckets: Sequence[Sequence[Event]]) -> Step:
    """Add up the launches of all buckets; those of the extension count as one kernel."""
    step = Step(len(buckets))
    for event in (event for events in buckets for event in events):
        kernel = "qr" if event.kernel.startswith(EXTENSION) else event.kernel
        path = "fp32" if kernel == "qr" else " + ".join(event.work.flops)
        step.parts.setdefault((event.stage, kernel, path), Sum()).add(event)
    return step


def set_rows(s: ParameterSet, dtype: torch.dtype, precision: str, rank: int = RANK) -> Iterator[rows.Row]:
    """Yield the rows of a set in one dtype of weights and gradients; those of a refresh are what it takes on top."""
    ordinary, refresh = (added(buckets) for buckets in steps(s, dtype, rank, precision).values())
    given: rows.Row = {"model": s.name, "precision": precision, "optimizer": "pro-klshampoo", "rank": rank}
    given |= {"dtype": str(dtype).removeprefix("torch."), "buckets": ordinary.buckets}
    on_top = {key: own - ordinary.parts.get(key, Sum()) for key, own in refresh.parts.items()}
    for case, parts in ((ORDINARY, ordinary.parts), (ON_TOP, on_top)):
        for (stage, kernel, path), own in parts.items():
            if own != Sum():
                yield given | {"case": case, "stage": stage, "kernel": kernel, "path": path, **vars(own)}


def summary(found: Sequence[rows.Row]) -> str:
    """Return the totals of one model, precision and dtype as lines."""
    first = found[0]
    lines = [
        f"{first['model']}, {first['precision']}, {first['dtype']} weights and gradients, {first['buckets']} buckets"
    ]
    for kind in ("ordinary", "refresh", "amortised"):
        sums = {name: total(found, kind, name) for name in ("launches", "gflop", "gb", "ms_brief", "ms_tiles")}
        lines.append(
            f"  {kind:10}{sums['launches']:8.0f} launches{sums['gflop']:9.0f} GFLOP{sums['gb']:7.1f} GB"
            f"{sums['ms_brief']:8.1f} ms brief{sums['ms_tiles']:8.1f} ms tiles"
        )
    return "\n".join(lines)


@command
def main(argv: Sequence[str]) -> int:
    """Trace, print, write; return the exit status."""
    parser = Parser(prog="python -m bench.step_model", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[*PAPER], metavar="SET", help=", ".join(SETS))
    parser.add_argument("--parts", action="store_true", help="also print every stage and kernel")
    parser.add_argument("--out", type=Path, metavar="CSV", help="also put the rows there, in place of the same sets'")
    a = parser.parse_args(argv)
    if a.out and a.out.is_dir():
        raise UsageError(f"--out {a.out}: must be a file; name one in it")
    if a.out:
        rows.read(a.out)  # now, not after tracing
    environment = rows.environment(torch.device("cpu"))
    here = {"device": MODELLED} | {name: environment[name] for name in KNOWN}
    for name, precision in product(a.sets, PRECISIONS):
        found: list[rows.Row] = []
        for dtype in DTYPES:
            own = list(set_rows(SETS[name], dtype, precision))
            print(summary(own), flush=True)
            if a.parts:
                print("\n".join(map(line, own)), flush=True)
            found += own
        if a.out:
            rows.upsert(a.out, [row | here for row in found], key=("model", "precision"))
    return 0


def line(row: rows.Row) -> str:
    """Return a row as a line."""
    return (
        f"  {row['case']:16}{row['stage']:20}{row['kernel']:18}{row['path']:15}{row['launches']:6}"
        f"{row['gflop']:9.1f} GFLOP{row['gb']:7.2f} GB{row['ms_brief']:8.2f}{row['ms_tiles']:8.2f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
