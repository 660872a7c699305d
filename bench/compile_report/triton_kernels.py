"""Compiles what the launchers launch, with the specialisation that Triton's JIT would choose, without a GPU.

Every case of :mod:`bench.micro.kernels` is called with tensors that have shape and dtype but no memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget

from bench.compile_report.launches import Launch, called, describe
from bench.micro.case import Case, Sizes
from bench.micro.kernels import KERNELS

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may have."""
SPILLED = {80: 64, 90: 32, 100: 320}
"""Bytes of stack that a thread may take, for registers that are put away once; fewest where tiles were chosen by
measuring. On an H200 a symmetric polynomial's tile of four warps was a fifth faster than that of eight also while it
took 288 bytes."""
SIZES = Sizes(B=48, m=768, n=3072, r=128)
"""A bucket of GPT-2 124M's kind: full tiles are chosen, and all sizes are multiples of 16, as they are in practice."""
ODD = Sizes(B=3, m=517, n=1031, r=37)
"""Sizes and strides that are multiples of nothing, which take more registers for addresses and masks."""
HALVES = ("fp16", "bf16")
WGMMA_ROWS = 64
"""Rows that wgmma takes: 64 spill where a symmetric product of odd size stores two matrices."""
INSTRUCTIONS = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "cp.async": r"\bcp\.async",
    "trap": r"^\s*trap;",
}
"""Patterns in the PTX: tensor cores, loads that run ahead, and code that the compiler gave up on."""
MULTIPLICATION = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
"""Instructions of tensor cores."""
WAIT = re.compile(r"\bwgmma\.wait_group\.sync\.aligned\s+0\s*;")
"""Waits for every instruction of tensor cores, so that none of them overlaps with what follows."""
LABEL = re.compile(r"^\s*(\$\w+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)\s*;")
ACCESS = re.compile(r"\b(ld|st)\.global(?:\.\w+::\w+)*(?:\.(?!v\d|[bfsu]\d)\w+)*(?:\.v(\d))?\.[bfsu](\d+)\b")
COPY = re.compile(r"\bcp\.async\.\w+\.shared\.global\b[^,]*,[^,]*,\s*(0x[0-9a-f]+|\d+)")
LOOPS = ("product", "symmetric_product", "momentum")
"""Kernels of one loop over factors that lie as they are multiplied, in which nothing need be waited for."""
COPIES = ("stack", "apply", "split", "store")
"""Kernels that move whole matrices, 16 bytes at a time."""


@dataclass(frozen=True)
class Row:
    """One specialisation of a kernel on one architecture.

    Attributes:
        registers: of a thread.
        shared, stack: bytes.
        instructions: kinds that the code has.
        multiplications: instructions of tensor cores in it.
        loop_waits: waits in its loops that leave no wgmma outstanding.
        load_bytes, store_bytes: most that a thread moves at once, from and to global memory.
    """

    kernel: str
    config: str
    arch: int
    registers: int
    shared: int
    stack: int
    instructions: str
    multiplications: int
    loop_waits: int
    load_bytes: int
    store_bytes: int
    triton: str


def _item(a: dict[str, Any], *operands: str) -> int:
    return sum(a[f"{name}_ptr"].dtype.itemsize for name in operands)


STAGE_BYTES: dict[str, Callable[[dict[str, Any]], int]] = {
    "project": lambda a: (
        a["TILE_N"] * (a["TILE_M"] * _item(a, "G", "M") + a["TILE_R"] * _item(a, "U") * (1 + a["U_LO"]))
    ),
    "momentum": lambda a: a["HAT"] * a["TILE_R"] * (a["TILE_M"] * _item(a, "G_par") + a["TILE_N"] * _item(a, "U")),
    "apply": lambda a: (
        a["HAS_LOW_RANK"] * a["TILE_R"] * (a["TILE_M"] * _item(a, "left") + a["TILE_N"] * _item(a, "right"))
    ),
    "product": lambda a: a["TILE_K"] * (a["TILE_M"] * _item(a, "A") + a["TILE_N"] * _item(a, "B")),
    "symmetric_product": lambda a: a["TILE"] * a["TILE_K"] * _item(a, "A", "B"),
}
"""Bytes of operands that one step of a matrix kernel's first loop reads, from the arguments of the launch by name; 0
where it multiplies no matrices, as a kernel does not that is not here."""


def of_ptx(code: str) -> tuple[int, int, int, int]:
    """Count instructions of tensor cores and, between every label and a branch back to it, waits for all of them.

    Returns:
        These, and the most bytes that a thread loads from global memory, and stores there, at once; 0 if it never does.
    """
    lines, inside = code.splitlines(), set()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    for i, line in enumerate(lines):
        for target in BRANCH.findall(line):
            inside |= set(range(labels[target], i + 1))  # empty for a branch ahead
    widest = {"ld": [0], "st": [0]}
    for kind, count, bits in ACCESS.findall(code):
        widest[kind].append(int(count or 1) * int(bits) // 8)
    widest["ld"] += [int(size, 0) for size in COPY.findall(code)]
    waits = sum(len(WAIT.findall(lines[i])) for i in inside)
    return len(MULTIPLICATION.findall(code)), waits, max(widest["ld"]), max(widest["st"])


class Offline:
    """Answers what Triton asks a driver in order to compile, for GPUs that are not there: device i is an sm_i."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def record(case: Case, sizes: Sizes = SIZES) -> list[Launch]:
    """Record what ``case`` launches, for all of its dtypes and tiles, and at odd sizes as it chooses for the first."""
    launches: list[Launch] = []
    for dtypes in case.dtypes:
        for tile in case.tiles(dtypes):
            own = replace(sizes, r=min(sizes.r, tile.n)) if tile and case.narrow else sizes
            chosen = patch.object(case.module, "choose_tile", lambda *_, tile=tile: tile) if tile else nullcontext()
            with chosen:
                launches += called(case, own, dtypes)
    return launches + called(case, ODD, case.dtypes[0])


def every_launch(cases: Iterable[Case] = KERNELS) -> list[Launch]:
    """Record one launch of each kernel and specialisation."""
    launches = chain.from_iterable(map(record, cases))
    return list({(launch.kernel, describe(launch)): launch for launch in launches}.values())


def build(launch: Launch, arch: int) -> Any:
    """Compile what Triton's JIT would run for this launch on this architecture."""
    triton.runtime.driver.set_active(Offline(arch))
    kernel = getattr(import_module(launch.module), launch.function)
    return kernel.warmup(*launch.arguments, grid=(1,), **dict(launch.constants))


def compiled(launch: Launch, arch: int) -> Row:
    """Compile one launch for one architecture, and read registers and stack off the result."""
    done = build(launch, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"\b{key}:(\d+)", usage)[0]) for key in ("REG", "STACK"))
    found = [name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, done.asm["ptx"], re.MULTILINE)]
    code: str = done.asm["ptx"]
    values = (registers, done.metadata.shared, stack, " ".join(found), *of_ptx(code), triton.__version__)
    return Row(launch.kernel, describe(launch), arch, *values)


def complaints(row: Row, launch: Launch) -> list[str]:
    """List what is wrong with a compiled kernel; tensor cores and pipelining are not asked for at odd sizes."""
    found = set(row.instructions.split())
    wrong = []
    if row.stack > SPILLED[row.arch]:
        wrong.append(f"registers spill: {row.stack} bytes of stack; take a smaller tile or more warps")
    if row.shared > SHARED_LIMIT[row.arch]:
        wrong.append(f"{row.shared} bytes of shared memory; there are {SHARED_LIMIT[row.arch]}")
    if "trap" in found:
        wrong.append("the code traps: the compiler gave up on it; take another tile")
    values = launch.by_name
    at_odd_sizes = any(values.get(name) in (ODD.m, ODD.n, ODD.r) for name in ("M", "N", "K", "R"))
    at_odd_sizes |= any(size % 16 for size in (values.get("COUNT", 0), *values.get("E", ())) if size > 1)
    if row.kernel in COPIES and not at_odd_sizes and min(row.load_bytes, row.store_bytes) < 16:
        wrong.append(f"loads {row.load_bytes} and stores {row.store_bytes} bytes at once; 16 are possible")
    stage_bytes = STAGE_BYTES[row.kernel](values) if row.kernel in STAGE_BYTES else 0
    if stage_bytes == 0 or at_odd_sizes:
        return wrong
    operand = str(values.get("OPERAND", values.get("DTYPE")))
    if operand != "fp64" and not found & {"mma", "wgmma", "tcgen05"}:
        wrong.append("no tensor cores")
    tall = values.get("TILE_M", values.get("TILE", 0)) >= WGMMA_ROWS
    in_tf32 = operand == "fp32" and values.get("PRECISION") != "ieee" and tall
    if row.arch == 90 and (operand in HALVES or in_tf32) and "wgmma" not in found:
        wrong.append(f"no wgmma for {operand} operands")
    stages = values.get("num_stages", 1)
    if stages >= 2:
        # wgmma reads halves where they lie; other operands go through registers, and leave room for the next ones.
        in_place = row.arch == 90 and operand in HALVES and not values.get("U_LO")
        if in_place and row.kernel in LOOPS and row.loop_waits > bool(values.get("HAS_E")):  # one between two factors
            wrong.append(f"the loop waits for its own products in {row.loop_waits} places")
        least = stage_bytes * (stages if in_place else stages - 1)
        if "cp.async" not in found:
            wrong.append("loads do not run ahead: no cp.async")
        elif row.arch <= 90 and row.shared < least:
            wrong.append(f"loads do not run ahead: {row.shared} bytes of shared memory; {stages} stages take {least}")
    return wrong


def checked(launch: Launch, arch: int) -> tuple[Row | None, list[str]]:
    """Return the row of one compilation, and what is wrong with it."""
    try:
        row = compiled(launch, arch)
    except Exception as error:  # whatever the compiler raises is a verdict on the kernel
        found = [f"does not compile: {error!r}"]
        row = None
    else:
        found = complaints(row, launch)
    return row, [f"{launch.kernel} ({describe(launch)}) on sm_{arch}: {complaint}" for complaint in found]


def report(jobs: int, architectures: Iterable[int] = ARCHITECTURES) -> tuple[list[Row], list[str]]:
    """Compile every launch for every architecture; return the rows and what is wrong."""
    tasks = [(launch, arch) for launch in every_launch() for arch in architectures]
    with ProcessPoolExecutor(jobs) as pool:
        done = list(pool.map(checked, *zip(*tasks, strict=True)))
    return [row for row, _ in done if row is not None], [complaint for _, found in done for complaint in found]
