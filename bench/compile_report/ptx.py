"""What a kernel's PTX says of how it multiplies, waits, loads and stores."""

import re
from collections.abc import Iterable

MULTIPLICATION = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
"""Instructions of tensor cores."""
WAIT = re.compile(r"\bwgmma\.wait_group\.sync\.aligned\s+0\s*;")
"""Waits for every instruction of tensor cores, so that none of them overlaps with what follows."""
LABEL = re.compile(r"^\s*(\$\w+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)\s*;")
ACCESS = re.compile(r"\b(ld|st)\.global(?:\.\w+::\w+)*(?:\.(?!v\d|[bfsu]\d)\w+)*(?:\.v(\d))?\.[bfsu](\d+)\b")
COPY = re.compile(r"\bcp\.async\.\w+\.shared\.global\b[^,]*,[^,]*,\s*(0x[0-9a-f]+|\d+)")


def in_loops(ptx: str) -> list[str]:
    """Return the lines between every label and the last branch back to it, each once."""
    lines = ptx.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    inside: set[int] = set()
    for i, line in enumerate(lines):
        for target in BRANCH.findall(line):
            inside |= set(range(labels[target], i + 1))  # empty for a branch ahead
    return [lines[i] for i in sorted(inside)]


def multiplications(lines: Iterable[str]) -> int:
    """Count the instructions of tensor cores."""
    return sum(map(len, map(MULTIPLICATION.findall, lines)))


def waits(lines: Iterable[str]) -> int:
    """Count the waits that leave no wgmma outstanding."""
    return sum(map(len, map(WAIT.findall, lines)))


def widest(ptx: str) -> tuple[int, int]:
    """Return the most bytes that a thread loads from global memory, and stores there, at once; 0 if it never does."""
    found = {"ld": [0], "st": [0]}
    for kind, count, bits in ACCESS.findall(ptx):
        found[kind].append(int(count or 1) * int(bits) // 8)
    found["ld"] += [int(size, 0) for size in COPY.findall(ptx)]
    return max(found["ld"]), max(found["st"])
