"""The documents' tables, and their plots, from the recorded rows: ``python -m bench.tables [--check] [--steps CSV]``.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; what is between them is replaced. With --check
nothing is written, and the exit status says whether the documents show what the rows give. With --steps other rows of
whole steps, as of ``./run bench``, are printed as a table.
"""

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pandas import DataFrame

from bench.command import UsageError, command, options
from bench.rows import RESULTS, ROOT, frame
from bench.study import figures, gpt124m, gpt124m_tables
from bench.study import lengths_tables as lengths
from bench.timing import tables as timing

DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "results")),
)
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES: dict[str, tuple[str, Callable[[DataFrame], str]]] = {
    "costs": (gpt124m.FILE, gpt124m_tables.costs),
    "steps-gpu": ("step-gpu.csv", timing.costs),
    "gpt-124m": (gpt124m.FILE, gpt124m_tables.shown),
    "lengths": ("lengths.csv", lengths.losses_table),
    "results": ("lengths.csv", partial(lengths.short_table, steps=figures.STEPS)),
    "lengths-reached": ("lengths.csv", partial(lengths.reached_table, length=figures.STEPS)),
}
"""File of the rows, and the table that is made of them, by name."""


@dataclass(frozen=True)
class Options:
    """Rewrite the documents' tables and the plots from the recorded rows, or check the documents."""

    check: bool = False  # Write nothing; fail if a document differs from the rows
    steps: Path | None = None  # Write nothing; print these rows of bench.timing as a table


def rendered(text: str) -> str:
    """Return the text with every table as the rows give it.

    Raises:
        KeyError: it names a table that there is not.
    """

    def table(name: str) -> str:
        file, make = TABLES[name]
        return make(frame(RESULTS / file))

    return BLOCK.sub(lambda found: found[1] + table(found[2]) + found[3], text)


def draw() -> None:
    """Draw the figures of the results again."""
    lengths_rows = frame(RESULTS / "lengths.csv"), frame(RESULTS / "lengths-curves.csv")
    figures.lengths(RESULTS / "lengths-loss.png", *lengths_rows)
    figures.lengths(RESULTS / "lengths-seconds.png", *lengths_rows, x="seconds")
    own = frame(RESULTS / gpt124m.FILE)
    if len(own):
        along = frame(RESULTS / gpt124m.CURVES)
        for x, (name, _) in gpt124m_tables.PICTURES.items():
            figures.gpt124m(RESULTS / name, own, along, x)


@command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    o = options(Options, argv, "bench.tables")
    if o.steps:
        found = frame(o.steps)
        if not len(timing.timed(found)):
            raise UsageError(f"--steps {o.steps} has no timed step; give what bench.timing steps wrote with --out")
        print(timing.costs(found))
        return 0
    differ = False
    for document in DOCUMENTS:
        before = document.read_text(encoding="utf-8")
        after = rendered(before)
        if o.check:
            lines = before.splitlines(True), after.splitlines(True)
            sys.stdout.writelines(difflib.unified_diff(*lines, document.name, "rows"))
            differ |= before != after
        elif before != after:
            document.write_text(after, encoding="utf-8")
    if not o.check:
        draw()
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
