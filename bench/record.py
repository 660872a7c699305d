"""Turns pytest-benchmark's JSON into CSV rows: ``python -m bench.record BENCHMARK.json bench/results/NAME.csv``."""

import csv
import json
import sys
from pathlib import Path

COLUMNS = [
    "group", "name", "metric", "unit", "median", "mean", "q1", "q3", "rounds",
    "device", "threads", "torch", "prokl", "commit", "date",
]  # fmt: skip


def rows(data: dict) -> list[dict[str, object]]:
    """One row a benchmark, in milliseconds."""
    commit = data["commit_info"]["id"] + ("-dirty" if data["commit_info"]["dirty"] else "")
    return [
        {
            "group": entry["group"],
            "name": (entry["params"] or {}).get("contender", entry["name"]),
            "metric": "step time",
            "unit": "ms",
            **{key: round(1e3 * entry["stats"][key], 4) for key in ("median", "mean", "q1", "q3")},
            "rounds": entry["stats"]["rounds"],
            "device": data["machine_info"]["cpu"]["brand_raw"],
            **{key: str(entry["extra_info"][key]) for key in ("threads", "torch", "prokl")},
            "commit": commit,
            "date": data["datetime"][:10],
        }
        for entry in data["benchmarks"]
    ]


def main(source: str, target: str) -> None:
    with open(target, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows(json.loads(Path(source).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
