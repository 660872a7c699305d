"""Compiles what the launchers launch, with the specialisation that Triton's JIT would choose, without a GPU.

Every case of :mod:`bench.micro.kernels` is called with tensors that have shape and dtype but no memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget

from bench.compile_report.launches import Launch, called
from bench.micro.case import Case, Sizes
from bench.micro.kernels import KERNELS

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may have; an A100 has 163 KB, and cards of 8.6 and 8.9 run the same tiles with 99."""
SPILLED = {80: 64, 90: 32, 100: 320}
"""Bytes of stack that a thread may take, for registers that are put away once; fewest where tiles were chosen by
measuring. On an H200 a symmetric polynomial's tile of four warps was a fifth faster than that of eight also while it
took 288 bytes."""
SIZES = Sizes(B=48, m=768, n=3072, r=128)
"""A bucket of GPT-2 124M's kind: full tiles are chosen, and all sizes are multiples of 16, as they are in practice."""
ODD = Sizes(B=3, m=517, n=1031, r=37)
"""Sizes and strides that are multiples of nothing, which take more registers for addresses and masks."""


@dataclass(frozen=True)
class Row:
    """One specialisation of a kernel on one architecture: a thread's registers; bytes of shared memory and stack."""

    launch: str
    arch: int
    registers: int = 0
    shared: int = 0
    stack: int = 0
    error: str = ""  # what the compiler raised


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
    return list({launch.key: launch for launch in chain.from_iterable(map(record, cases))}.values())


def build(launch: Launch, arch: int) -> Any:
    """Compile what Triton's JIT would run for this launch on this architecture."""
    triton.runtime.driver.set_active(Offline(arch))
    kernel = getattr(import_module(launch.module), launch.function)
    return kernel.warmup(*launch.arguments, grid=(1,), **dict(launch.constants))


def compiled(launch: Launch, arch: int) -> Row:
    """Compile one launch for one architecture, and read registers and stack off the result."""
    try:
        done = build(launch, arch)
    except Exception as error:  # whatever the compiler raises is a verdict on the kernel
        return Row(str(launch), arch, error=repr(error))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"\b{key}:(\d+)", usage)[0]) for key in ("REG", "STACK"))
    traps = "the code traps" if re.search(r"^\s*trap;", done.asm["ptx"], re.MULTILINE) else ""
    return Row(str(launch), arch, registers, done.metadata.shared, stack, traps)


def complaints(row: Row) -> list[str]:
    """List what is wrong with a compiled kernel."""
    wrong = [f"does not compile: {row.error}"] if row.error else []
    if row.stack > SPILLED[row.arch]:
        wrong.append(f"registers spill: {row.stack} bytes of stack; take a smaller tile or more warps")
    if row.shared > SHARED_LIMIT[row.arch]:
        wrong.append(f"{row.shared} bytes of shared memory; there are {SHARED_LIMIT[row.arch]}")
    return wrong


def report(jobs: int, architectures: Iterable[int] = ARCHITECTURES) -> tuple[list[Row], list[str]]:
    """Compile every launch for every architecture; return the rows and what is wrong."""
    tasks = [(launch, arch) for launch in every_launch() for arch in architectures]
    with ProcessPoolExecutor(jobs) as pool:
        rows = list(pool.map(compiled, *zip(*tasks, strict=True)))
    return rows, [f"{row.launch} on sm_{row.arch}: {complaint}" for row in rows for complaint in complaints(row)]
