"""See :mod:`bench.command`."""

from bench.command import INTERRUPTED, UsageError, command

__all__ = ["INTERRUPTED", "UsageError", "command"]
