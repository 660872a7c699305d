"""Registers, shared memory and spills of every kernel of csrc/, as ptxas reports them in a build; no GPU is needed."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import build_cuda
from bench.command import UsageError

ENTRY = re.compile(r"Compiling entry function '([^']+)' for 'sm_(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers(?:.* (\d+) bytes smem)?")


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture: bytes of static shared memory, and of stack and spills together."""

    kernel: str
    arch: str
    registers: int
    shared: int
    spilled: int


def parse(log: str) -> list[Row]:
    """Return the rows of what ``-Xptxas -v`` prints.

    A function that is called and not inlined has its own stack and spills. They are counted to the kernel before it.
    """
    rows = []
    _, *parts = ENTRY.split(log)
    for kernel, arch, text in zip(*[iter(parts)] * 3, strict=True):
        registers, shared = (int(found or 0) for found in REGISTERS.search(text).groups())  # type: ignore[union-attr]
        spilled = sum(int(size) for found in STACK.findall(text) for size in found)
        rows.append(Row(kernel, arch, registers, shared, spilled))
    return rows


def complaints(rows: Iterable[Row]) -> list[str]:
    """List the kernels that spill or keep a stack."""
    return [
        f"{row.kernel} on sm_{row.arch}: {row.spilled} bytes of stack and spills beside {row.registers} registers; "
        "keep less there, or bound the kernel to fewer threads"
        for row in rows
        if row.spilled
    ]


def report() -> tuple[list[Row], list[str]]:
    """Build the extension for all usual architectures; return the rows and what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        named = {"PROKL_CUDA_ARCHS": ";".join(build_cuda.USUAL_ARCHITECTURES)}
        try:
            build_cuda.build(os.environ | named, Path(folder), Path(folder, "_C.so"))
        except build_cuda.ToolkitError as error:
            raise UsageError(str(error)) from error
        logs = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.log")))
    # c++filt comes with the host compiler that nvcc needs.
    readable = subprocess.run(["c++filt", "-p"], input=logs, capture_output=True, text=True, check=True).stdout
    rows = parse(re.sub(r"\(anonymous namespace\)::|\bprokl::", "", readable))
    return rows, complaints(rows)
