"""Read the options of every command of bench, and end it: wrong input and Ctrl-C give one line, no traceback.

What runs on a GPU machine without network reads its options with :class:`Parser`; everything else with
:func:`options`, which takes tyro.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
CLOSED = 141  # 128 + SIGPIPE
T = TypeVar("T")


class UsageError(Exception):
    """Wrong input; the text is one line that names the value and the remedy."""


def command(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Make a ``main`` end with 2 after a UsageError and 130 after Ctrl-C, each with one line on stderr.

    It ends with 141 where stdout was closed before. Without arguments it takes the command line's.
    """

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            code = main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # whoever reads has enough, as head
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - flushed at the interpreter's end
            return CLOSED
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as interrupt:
            print(interrupt if interrupt.args else "interrupted", file=sys.stderr)
            return INTERRUPTED

    return run


class Parser(argparse.ArgumentParser):
    """Raise UsageError on what it cannot take."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def options(kind: type[T], argv: Sequence[str], prog: str) -> T:
    """Read the command line into a dataclass, whose fields are the options; exit with 2 for a wrong argument."""
    import tyro

    simple = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
    return tyro.cli(kind, args=list(argv), prog=f"python -m {prog}", config=simple)


def _check(values: dict[str, Any], right: Callable[[Any], bool], must: str) -> None:
    """Raise UsageError unless all values of options are right, of which one may have several, or None."""
    for name, value in values.items():
        for one in value if isinstance(value, tuple | list) else (value,):
            if one is not None and not right(one):
                shown = f"{one:g}" if isinstance(one, float) else one
                raise UsageError(f"--{name.replace('_', '-')} {shown}: must be {must}")


def at_least(low: int, **values: int | Sequence[int] | None) -> None:
    """Raise UsageError unless options are whole numbers from ``low`` on."""
    _check(values, lambda one: one >= low, f"a whole number >= {low}")


def positive(**values: float | Sequence[float] | None) -> None:
    """Raise UsageError unless options are finite numbers above 0."""
    _check(values, lambda one: 0 < one < math.inf, "a finite number > 0")


def make_folder(out: Path) -> None:
    """Make the folder for results where it is not there; raise UsageError if it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be made a folder: {error.strerror}; choose another") from None


def make_file(out: Path) -> None:
    """Make the folder of a file for results where it is not there; raise UsageError if the file is a folder."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file in it")
    make_folder(out.parent)


def cores() -> int:
    """Return the cores that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
