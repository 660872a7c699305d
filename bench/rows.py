"""The rows of every result file: one schema, where and with what they were measured, one reader and one writer.

A file has those columns of the schema that its rows have, in the schema's order. Writing needs torch and the standard
library only, so that a GPU machine without network can do it; :func:`frame` reads with pandas.
"""

import csv
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import prokl

if TYPE_CHECKING:
    from pandas import DataFrame

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"

Row = dict[str, Any]
"""Values by column; as read from a file every value is text."""


def _columns(text: str = "", whole: str = "", real: str = "") -> dict[str, type]:
    return {name: kind for kind, names in ((str, text), (int, whole), (float, real)) for name in names.split()}


PROVENANCE = _columns("device cpu threads torch triton cuda prokl commit date")
"""Columns of the machine, the versions and the date of a measurement."""
COLUMNS = {
    # The subject: a run, or an operation on a model's matrices; "case" is an operation with its shapes, or what
    # happens to gradients; "base" the case that another is a change of; "clip_threshold" a number or "none".
    **_columns("model case base optimizer clip_threshold backend", "rank"),
    **_columns("kernel"),
    **_columns("value", "seed step"),
    **_columns("metric unit dtype shapes", "launches"),
    # The result: "ratio" is the median over that of the row that this one is compared with, "floor" of recorded rows
    # a predicted lower bound in the same unit.
    **_columns("", "rounds", "median q1 q3 ratio floor"),
    **_columns(real="validation_loss seconds"),
    **_columns("diverged_at"),
    **_columns(real="model_ms optimizer_ms optimizer_per_model state_mb peak_gib"),
    # Columns of runs on a GPU: the optimizer's median and longest step, the host's quickest one; seconds with all that
    # was not training; the card's rate of products, TFLOP/s; how often a step was bounded.
    **_columns(real="optimizer_median_ms optimizer_longest_ms host_ms tokens_per_second wall_seconds matmul_tflops"),
    **_columns(whole="clipped"),
    # A run's settings.
    **_columns("preset", real="lr alpha_kl weight_decay adamw_lr adamw_weight_decay momentum beta2 qk_rate"),
    **_columns(whole="qk_pieces qk_rank vo_pieces"),
    **_columns("family tied", "layers width heads mlp_width vocabulary context parameters"),
    **_columns("autocast compiled state_dtype", "steps eval_windows batch micro_batch"),
    **_columns("data data_sha256"),
    **PROVENANCE,
    # Why there is no value, or what a reader must know.
    **_columns("note"),
}
"""Every column that a command writes, with its type. Frozen files may have others."""
SAME = ("device", "cpu", "threads", "torch", "triton", "cuda", "prokl", "commit")
"""Columns that are alike where a measurement need not be repeated."""


def environment(device: torch.device) -> dict[str, str]:
    """Return where, with what and when the figures of this process are measured."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cpu": processor(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "triton": version("triton") or "",
        "cuda": (torch.version.cuda or "") if cuda else "",
        "prokl": prokl.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of this checkout, with "-dirty" where files other than the results differ or are new."""
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--", ".", ":!bench/results"])
    try:
        name, changes = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in commands
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return name.strip() + ("-dirty" if changes else "")


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, q1 and q3; no quartiles where there is one value."""
    if len(values) < 2:
        return {"median": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def text(value: Any) -> str:
    """Return a value as files have it: numbers with seven digits, empty for None and for a number that is none."""
    if value is None or isinstance(value, float) and math.isnan(value):
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def describe(row: Mapping[str, Any]) -> str:
    """Return a row of a measurement as a line: what it is of, the figures, or the note why there is none."""
    keys = ("model", "case", "value", "optimizer", "clip_threshold", "backend", "rank", "metric", "kernel")
    given = {"rank": "r=", "clip_threshold": "clip_threshold="}
    who = " ".join(f"{given.get(key, '')}{row[key]}" for key in keys if row.get(key) not in (None, ""))
    if row.get("median") is None:
        return f"{who}: {row['note']}"
    line = f"{who}: {row['median']:{'' if isinstance(row['median'], int) else '.5g'}} {row['unit']}"
    line += f" [{row['q1']:.4g}, {row['q3']:.4g}]" if "q1" in row else ""
    line += f", {row['ratio']:.2f} x" if row.get("ratio") else ""
    return line + (f"; {row['note']}" if row.get("note") else "")


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file as text; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def having(rows: Iterable[Row], key: Mapping[str, Any]) -> list[Row]:
    """Return those of a file's rows that have these values."""
    own = {name: text(value) for name, value in key.items()}
    return [row for row in rows if all(row.get(name, "") == value for name, value in own.items())]


def frame(path: Path) -> "DataFrame":
    """Return the rows of a file with typed columns; without rows where there is no file."""
    return typed(read(path))


def typed(rows: Sequence[Row]) -> "DataFrame":
    """Return a file's rows with typed columns: missing text is "", a missing number NaN, of whole numbers NA."""
    import pandas

    data = pandas.DataFrame(rows, columns=list(rows[0]) if rows else None)
    for name in data.columns:
        if COLUMNS[name] is not str:
            data[name] = pandas.to_numeric(data[name].replace("", None))
            data[name] = data[name].astype("Int64" if COLUMNS[name] is int else float)
    return data


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows, all or nothing: an interrupted run leaves the file as it was."""
    rows = list(rows)
    having = dict.fromkeys(name for row in rows for name in row)
    columns = {name: None for name in COLUMNS if name in having} | having  # of an older file there may be others
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [*columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: text(value) for name, value in row.items()} for row in rows)
    os.replace(partial, path)


def upsert(path: Path, rows: Iterable[Mapping[str, Any]], key: Sequence[str]) -> None:
    """Put rows into a file in the place of all that have the same values in the columns ``key``; others stay."""
    groups: list[dict[tuple[str, ...], list[Mapping[str, Any]]]] = []
    for its in (read(path), rows):
        groups.append({})
        for row in its:
            groups[-1].setdefault(tuple(text(row.get(name)) for name in key), []).append(row)
    old, new = groups
    write(path, [row for group in (old | new).values() for row in group])


def measured(path: Path, key: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Return whether a file has rows with this key, all of this commit, versions and machine, and none of them wrong.

    It has none of a changed tree.
    """
    rows, known = having(read(path), key), bool(here["commit"]) and not here["commit"].endswith("-dirty")
    right = not any(row.get("note", "").startswith("wrong") for row in rows)
    return bool(rows) and known and right and len(having(rows, {name: here[name] for name in SAME})) == len(rows)
