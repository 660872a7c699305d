"""The tables of who stands which task, from the rows of tasks.csv."""

from html import escape

from pandas import DataFrame

from bench.markdown import table
from bench.tasks import TASKS

OWN = "prokl."
REASONS: dict[str, str] = {}
"""Why this package is worse than a peer, by task: of exactly those in which it is."""


def outcomes(rows: DataFrame) -> str:
    """Return a line for every task, a column for every peer."""
    found = []
    for task, its in _by_task(rows):
        got = dict(zip(its["peer"], its["outcome"], strict=True))
        found.append({"task": task, **{_label(peer): got.get(peer, "-") for peer in rows["peer"].unique()}})
    return table(DataFrame(found), 1)


def details(rows: DataFrame) -> str:
    """Return versions, and of every task its criterion, what happened elsewhere, and why this package is worse."""
    versions = rows.drop_duplicates("peer")
    said = [f"{peer} {version}" for peer, version in zip(versions["peer"], versions["version"], strict=True)]
    lines = [f"Versions: {', '.join(said)}; torch {', '.join(rows['torch'].unique())}.", ""]
    behind = worse(rows)
    for task, its in _by_task(rows):
        lines += [f"**{task}.** {criterion(task)}", ""]
        lines += [f"- {_happened(its, detail)}" for detail in its[its["outcome"] != "yes"]["detail"].unique()]
        lines += [f"- Why prokl is worse: {REASONS[task]}"] if task in behind else []
        lines += [""] if lines[-1] else []
    return "\n".join(lines)


def criterion(task: str) -> str:
    """Return what has to hold."""
    return (TASKS[task].__doc__ or "").partition("\n")[0]


def worse(rows: DataFrame) -> list[str]:
    """Return the tasks that a peer stands and an optimizer of this package does not."""
    found = []
    for task, its in _by_task(rows):
        own = its["peer"].str.startswith(OWN)
        if (its[~own]["outcome"] == "yes").any() and (its[own]["outcome"] != "yes").any():
            found.append(task)
    return found


def _by_task(rows: DataFrame) -> list[tuple[str, DataFrame]]:
    return [(task, its) for task in TASKS if len(its := rows[rows["task"] == task])]


def _happened(its: DataFrame, detail: str) -> str:
    same = its[its["detail"] == detail]
    text = f"`{detail.replace('`', chr(39))}`" if same["outcome"].iloc[0] == "error" else escape(detail, quote=False)
    return f"{', '.join(same['peer'])}: {text}"


def _label(peer: str) -> str:
    """Return the name, which may break at a dot or an underscore: there are many columns."""
    return peer.replace(".", ". ").replace("_", " ").replace("/", " ")
