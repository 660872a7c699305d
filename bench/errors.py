"""The one exception that the command line turns into a message instead of a traceback."""


class UsageError(Exception):
    """Wrong input; the text is one line that names the value and the remedy."""
