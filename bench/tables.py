"""README's tables and plot from the recorded rows: ``python -m bench.tables [--check]``.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; what is between them is replaced. With --check
nothing is written, and the exit status says whether the README shows what the rows give.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.errors import interruptible
from bench.markdown import NAMES, figure, markdown, rows_of

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pretrain() -> str:
    """The comparison of optimizers on the main job."""
    head = [
        *("optimizer", "lr", "validation loss", "model ms/step"),
        *("optimizer ms/step", "state MB", "s to KL-Shampoo's loss"),
    ]
    body = [
        [
            NAMES[row["optimizer"]],
            row["lr"],
            f"{figure(row['validation_loss'], 4)} ± {figure(row['validation_loss_se'], 4)}",
            *(figure(row[key], 1) for key in ("model_ms", "optimizer_ms", "state_mb", "seconds_to_kl_shampoo_loss")),
        ]
        for row in rows_of("pretrain-summary.csv")
    ]
    return markdown(head, "lrrrrrr", body)


TABLES: dict[str, Callable[[], str]] = {"pretrain": pretrain}


def rendered(text: str) -> str:
    """The text with every table as the rows give it.

    Raises:
        KeyError: it names a table that there is not.
    """
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main(argv: Sequence[str]) -> int:
    """Rewrite the README, or check it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the README differs from the rows")
    options = parser.parse_args(argv)
    before = README.read_text(encoding="utf-8")
    after = rendered(before)
    if not options.check:
        README.write_text(after, encoding="utf-8")
        return 0
    sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "README.md", "rows"))
    return int(before != after)


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
