"""The microbenchmarks' rows as a table; :mod:`bench.summary` prints it."""

from collections.abc import Sequence

from bench.markdown import Row, figure, markdown, rows_of
from bench.micro.ledger import KL, OURS, PLAIN

RECORD = "micro-cpu.csv"


def cell(row: Row | None, plain: float | None) -> str:
    """Milliseconds, and how many times the plain form's they are; "-" where there is no figure."""
    if row is None or not row["median"]:
        return "-"
    text = figure(row["median"], 2)
    return text if plain is None or row["contender"] == PLAIN else f"{text} ({float(row['median']) / plain:.2f})"


def table(rows: Sequence[Row] | None = None, shapes: Sequence[str] | None = None) -> str:
    """Milliseconds of every primitive: plain, ours by backend, and what KL-Shampoo needs in its place.

    Args:
        rows: of the microbenchmarks; None takes the recorded ones.
        shapes: those to show, as in the column of that name; None shows all.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows_of(RECORD) if rows is None else rows:
        if row["metric"] == "time" and (shapes is None or row["shapes"] in shapes):
            groups.setdefault(row["set"], []).append(row)
    backends = list(dict.fromkeys(row["backend"] for own in groups.values() for row in own if row["contender"] == OURS))
    columns = [(PLAIN, ""), *((OURS, backend) for backend in backends)]
    body = []
    for name, own in groups.items():
        found = {(row["contender"], row["backend"]): row for row in own}
        theirs = [row for row in own if row["contender"] == KL]
        plain = found.get((PLAIN, ""))
        unit = float(plain["median"]) if plain and plain["median"] else None
        cells = [found.get(key) for key in columns] + theirs
        body.append([name, *(cell(row, unit) for row in cells)] + ["-"] * (not theirs))
    head = ["ms (times the plain form's)", "plain", *(f"ours, {backend}" for backend in backends), "KL-Shampoo's"]
    return markdown(head, "l" + "r" * (len(columns) + 1), body)
