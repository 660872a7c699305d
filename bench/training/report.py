"""From records to numbers: the final table, and CSV files with every figure and where it was measured."""

import csv
import math
import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import prokl
from bench.records import commit, processor
from bench.training.contenders import label_of
from bench.training.corpus import Corpus
from bench.training.run import Record
from bench.training.settings import Settings

Results = dict[int, dict[str, Record]]  # seed -> contender -> record
TARGET = "kl-shampoo"


def seconds_to(record: Record, target: float) -> float:
    """Training seconds until the validation loss first reaches ``target``, interpolated; nan if never."""
    before = None
    for step, loss in record.validation:
        now = record.seconds(step)
        if loss <= target:
            if before is None or before[1] == loss:
                return now
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (now - before[0])
        before = (now, loss)
    return math.nan


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; the error of a single value is nan, and one nan makes both nan."""
    if any(math.isnan(v) for v in values):
        return math.nan, math.nan
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def summarise(results: Results) -> list[dict[str, Any]]:
    """One row per contender, averaged over the seeds; times leave out the first step, which initialises."""
    rows = []
    for key in next(iter(results.values())):
        records = [by_key[key] for by_key in results.values()]
        targets = [by_key[TARGET].final_loss if TARGET in by_key else math.nan for by_key in results.values()]
        loss, error = mean_and_error([r.final_loss for r in records])
        rows.append(
            {
                "optimizer": key,
                "seeds": " ".join(map(str, results)),
                "steps_done": min(len(r.losses) for r in records),
                "validation_loss": loss,
                "validation_loss_se": error,
                "validation_loss_per_seed": " ".join(f"{r.final_loss:.5f}" for r in records),
                "model_ms": 1e3 * mean_after_first([r.model_seconds for r in records]),
                "optimizer_ms": 1e3 * mean_after_first([r.optimizer_seconds for r in records]),
                "first_optimizer_step_ms": 1e3
                * fmean(r.optimizer_seconds[0] if r.losses else math.nan for r in records),
                "state_mb": max(r.state_bytes for r in records) / 1e6,
                "seconds_to_kl_shampoo_loss": mean_and_error(
                    [seconds_to(r, t) for r, t in zip(records, targets, strict=True)]
                )[0],
                "diverged_at": " ".join(str(r.diverged_at) for r in records if r.diverged_at is not None),
            }
        )
    return rows


def mean_after_first(times: list[list[float]]) -> float:
    """Mean without each run's first, which initialises."""
    later = [t for run in times for t in run[1:]]
    return fmean(later) if later else math.nan


def markdown_table(rows: list[dict[str, Any]], settings: Settings) -> str:
    """The final table; what could not be measured is a dash."""
    cells = [
        {
            "optimizer": label_of(row["optimizer"]),
            "lr": f"{settings.hyper[row['optimizer']].lr:g}",
            "validation loss": _loss_in_words(row),
            "model ms/step": _fixed(row["model_ms"], 1),
            "optimizer ms/step": _fixed(row["optimizer_ms"], 1),
            "state MB": _fixed(row["state_mb"], 1),
            "s to KL-Shampoo's loss": _fixed(row["seconds_to_kl_shampoo_loss"], 1),
        }
        for row in rows
    ]
    if TARGET not in settings.optimizers:
        for line in cells:
            del line["s to KL-Shampoo's loss"]
    widths = {name: max(len(name), *(len(line[name]) for line in cells)) for name in cells[0]}
    rule = {name: "-" * width if name == "optimizer" else "-" * (width - 1) + ":" for name, width in widths.items()}
    return "\n".join(
        "| " + " | ".join(_padded(name, text, widths[name]) for name, text in line.items()) + " |"
        for line in [{name: name for name in widths}, rule, *cells]
    )


def _padded(name: str, text: str, width: int) -> str:
    return text.ljust(width) if name == "optimizer" else text.rjust(width)


def _loss_in_words(row: dict[str, Any]) -> str:
    if row["diverged_at"]:
        return f"diverged at step {row['diverged_at']}"
    error = row["validation_loss_se"]
    return _fixed(row["validation_loss"], 4) + ("" if math.isnan(error) else f" ± {error:.4f}")


def _fixed(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def environment(corpus: Corpus) -> dict[str, Any]:
    """Where and on what the figures were measured."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "prokl": prokl.__version__,
        "commit": commit(),
        "corpus": corpus.source,
        "corpus_sha256": corpus.sha256,
        "train_bytes": len(corpus.train),
        "validation_bytes": len(corpus.validation),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_summary(path: Path, rows: list[dict[str, Any]], settings: Settings, measured: dict[str, Any]) -> None:
    """The table's figures unrounded, each row with its learning rate, the settings and the environment."""
    shared = settings.shared() | measured
    write_rows(path, [row | {"lr": settings.hyper[row["optimizer"]].lr} | shared for row in rows])


def write_curves(path: Path, results: Results) -> None:
    """A row per seed, contender and step: training loss, validation loss where known, training seconds."""
    rows = []
    for seed, by_key in results.items():
        for key, record in by_key.items():
            validation = dict(record.validation)
            seconds = 0.0
            for step in range(len(record.losses) + 1):
                if step:
                    seconds += record.model_seconds[step - 1] + record.optimizer_seconds[step - 1]
                rows.append(
                    {
                        "seed": seed,
                        "optimizer": key,
                        "step": step,
                        "train_loss": record.losses[step - 1] if step else "",
                        "validation_loss": validation.get(step, ""),
                        "seconds": round(seconds, 6),
                    }
                )
    write_rows(path, rows)


def write_sweep(path: Path, rows: list[dict[str, Any]], settings: Settings) -> None:
    """Learning rate against final validation loss."""
    columns = ("validation_loss", "validation_loss_se", "diverged_at", "seeds", "steps_done")
    write_rows(
        path,
        [
            {
                "optimizer": row["optimizer"].partition("@")[0],
                "lr": settings.hyper[row["optimizer"]].lr,
                "adamw_lr": settings.hyper[row["optimizer"]].adamw_lr,
            }
            | {c: row[c] for c in columns}
            for row in rows
        ],
    )


def best_of_sweep(rows: list[dict[str, Any]], settings: Settings) -> str:
    """The best learning rate in words; one at the edge of the sweep is no optimum yet."""
    finite = [row for row in rows if not math.isnan(row["validation_loss"])]
    if not finite:
        return "Every learning rate diverged; sweep lower ones."
    best = min(finite, key=lambda row: row["validation_loss"])["optimizer"]
    rates = sorted(hyper.lr for hyper in settings.hyper.values())
    edge = settings.hyper[best].lr in (rates[0], rates[-1])
    return f"Best: {label_of(best)}" + ("; it lies at the edge of the sweep, so widen it." if edge else ".")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """A CSV file with the columns of the first row."""
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
