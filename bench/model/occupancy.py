"""How many programs of a Triton launch a processor holds: from the compiled kernel's registers and shared memory."""

from functools import cache

from bench import rows
from bench.compiled.launches import Launch, describe

ARCH = "90"
REGISTERS = 64 * 1024
SHARED = 228 * 1024
"""Bytes that the programs of a processor share, of which each takes 1 KiB more than it asks for."""
TOLD = ("has_c", "a_lo", "b_lo", "d_lo", "lo", "u_lo")
"""What of a launch decides about registers beside its tile and the dtype multiplied."""
THREADS = 2048


@cache
def _compiled() -> dict[str, list[tuple[str, int, int]]]:
    """Return (config, registers, shared memory) of every recorded compilation by kernel."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for row in rows.read(rows.RESULTS / "aot.csv"):
        if row["arch"] == ARCH:
            found.setdefault(row["kernel"], []).append((row["config"], int(row["registers"]), int(row["shared"])))
    return found


def _kind(config: str) -> tuple[str, ...]:
    """Return what decides about registers: tile, warps, stages, the dtype multiplied, what is done besides."""
    words = config.split()
    told = [word for word in words if word in TOLD or word.startswith(("operand=", "dtype=", "energy="))]
    return *words[:5], *sorted(told)


def programs_per_processor(launch: Launch) -> int:
    """Return how many programs run on a processor side by side; 1 where nothing like the launch was compiled.

    Of several compilations with this tile and dtype the one with the most registers counts. Those at odd sizes, which
    hold an address for every element, do not.
    """
    own = describe(launch)
    usual = [row for row in _compiled().get(launch.kernel, []) if "?" not in row[0] and _kind(row[0]) == _kind(own)]
    if not usual:
        return 1
    exact = [row for row in usual if row[0] == own]
    registers = -(-max(row[1] for row in exact or usual) // 8) * 8
    shared = max(row[2] for row in exact or usual) + 1024
    threads = 32 * int(launch.by_name["num_warps"])
    return max(1, min(REGISTERS // (registers * threads), SHARED // shared, THREADS // threads))
