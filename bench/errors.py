"""What a command line turns into one line instead of a traceback."""

import sys
from collections.abc import Callable, Sequence


class UsageError(Exception):
    """Wrong input; the text is one line that names the value and the remedy."""


def interruptible(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit status of ``main``; 130, as of a shell, and one line where Ctrl-C ended it."""
    try:
        return main(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
