"""The documents' tables, and their plots, from the recorded rows: ``python -m bench.tables [--check]``.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; what is between them is replaced. With --check
nothing is written, and the exit status says whether the documents show what the rows give.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.errors import command
from bench.experiments import alpha, comparisons, cost, sensitivity
from bench.experiments import tables as experiments
from bench.markdown import NAMES, RESULTS, figure, markdown, rows_of
from bench.micro import report as micro_report
from bench.steps import memory_report
from bench.steps import report as step_report

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "experiments.md")
PLOT = RESULTS / "step-cpu.png"
PRIMITIVES = ("24x256x256", "12x256x1024")
"""Shapes of the microbenchmarks that are shown: those of gpt2-350m/4, a square and a wide one."""
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


TABLES: dict[str, Callable[[], str]] = {
    "pretrain": pretrain,
    "steps": step_report.steps,
    "floors": step_report.floors,
    "aspects": step_report.aspects,
    "growth": step_report.growth,
    "micro": lambda: micro_report.table(shapes=PRIMITIVES),
    "state": memory_report.state,
    "workspace": memory_report.workspace,
    "alpha-kl": lambda: alpha.table(rows_of("alpha-kl.csv")),
    "memory-cost": lambda: cost.table(rows_of("memory-cost.csv")),
    "main": lambda: experiments.main_table(rows_of("main.csv")),
    "main-orderings": lambda: experiments.orderings_table(rows_of("main-orderings.csv")),
    "main-sweep": lambda: experiments.sweep_table(rows_of("main-sweep.csv")),
    "ablation": lambda: experiments.ablation_table(rows_of("ablation.csv")),
    **{
        f"sensitivity-{varied}": lambda varied=varied: experiments.sensitivity_table(rows_of("sensitivity.csv"), varied)
        for varied in experiments.VARIED
    },
    "ablation-orderings": lambda: experiments.orderings_table(rows_of("ablation-orderings.csv")),
}


def rendered(text: str) -> str:
    """The text with every table as the rows give it.

    Raises:
        KeyError: it names a table that there is not.
    """
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


@command
def main(argv: Sequence[str]) -> int:
    """Rewrite the documents and the plots, or check the documents; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document differs from the rows")
    options = parser.parse_args(argv)
    differ = False
    for document in DOCUMENTS:
        before = document.read_text(encoding="utf-8")
        after = rendered(before)
        if options.check:
            name = document.name
            sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True), name, "rows"))
            differ |= before != after
        elif before != after:
            document.write_text(after, encoding="utf-8")
    if not options.check:
        step_report.plot(PLOT)
        comparisons.draw(RESULTS)
        sensitivity.draw(RESULTS)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
