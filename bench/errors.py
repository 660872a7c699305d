"""How every command of bench ends: wrong input and Ctrl-C give one line instead of a traceback."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class UsageError(Exception):
    """Wrong input; the text is one line that names the value and the remedy."""


def command(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorates a ``main``: its exit status, 2 after a UsageError and 130 after Ctrl-C, each told in one line.

    Without arguments it takes the command line's.
    """

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(sys.argv[1:] if argv is None else argv)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as interrupt:
            print(interrupt if interrupt.args else "interrupted", file=sys.stderr)
            return INTERRUPTED

    return run
