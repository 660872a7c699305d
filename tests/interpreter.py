"""Quickens Triton's interpreter, which at every call looks through the whole language for what it has to replace."""

import inspect
from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """Let the interpreter look each part of the language through once, and not at all where it is replaced already."""
    from triton.runtime import interpreter

    known: dict[int, list[str]] = {}
    is_builtin = interpreter.tl.core.is_builtin

    def getmembers(part: Any) -> list[tuple[str, Any]]:
        if id(part) not in known:
            known[id(part)] = [name for name, member in inspect.getmembers(part) if is_builtin(member)]
        names = known[id(part)]
        if not names or not is_builtin(getattr(part, names[0])):  # in a call from one that has replaced them
            return []
        return [(name, getattr(part, name)) for name in names]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})
