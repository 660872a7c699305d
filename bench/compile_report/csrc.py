"""Registers, shared memory and spills of every kernel of csrc/, as ptxas reports them; no GPU is needed."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import build_cuda
from bench.command import UsageError
from build_cuda import toolkit

ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers(?:.* (\d+) bytes smem)?")


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture: bytes of static shared memory, and of stack and spills together."""

    source: str
    kernel: str
    arch: str
    registers: int
    shared: int
    spilled: int


def parse(log: str, source: str) -> list[Row]:
    """Return the rows of one compilation from what ``-Xptxas -v`` prints; the kernels' names are still mangled.

    A function that is called and not inlined has its own stack and spills. They are counted to the kernel before it.
    """
    rows = []
    _, *parts = ENTRY.split(log)
    for kernel, arch, text in zip(*[iter(parts)] * 3, strict=True):
        registers, shared = (int(found or 0) for found in REGISTERS.search(text).groups())  # type: ignore[union-attr]
        spilled = sum(int(size) for found in STACK.findall(text) for size in found)
        rows.append(Row(source, kernel, arch, registers, shared, spilled))
    return rows


def complaints(rows: Iterable[Row]) -> list[str]:
    """List the kernels that spill or keep a stack."""
    return [
        f"{row.kernel} on sm_{row.arch}: {row.spilled} bytes of stack and spills beside {row.registers} registers; "
        "keep less there, or bound the kernel to fewer threads"
        for row in rows
        if row.spilled
    ]


def compiled(nvcc: str, source: Path, arch: str) -> list[Row]:
    """Compile one source for one architecture with the options of the build."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder, "out.cubin"))
        command = [nvcc, *build_cuda.COMPILE, "-cubin", f"-arch=sm_{arch}", str(source), "-o", output]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UsageError(f"{source.name} does not compile for sm_{arch}:\n{done.stdout}{done.stderr}")
    rows = parse(done.stdout + done.stderr, source.name)
    # c++filt comes with the host compiler that nvcc needs.
    mangled = "".join(f"{row.kernel}\n" for row in rows)
    names = subprocess.run(["c++filt", "-p"], input=mangled, capture_output=True, text=True, check=True).stdout
    readable = re.sub(r"\(anonymous namespace\)::|\bprokl::", "", names).splitlines()
    return [replace(row, kernel=name) for row, name in zip(rows, readable, strict=True)]


def report(jobs: int) -> tuple[list[Row], list[str]]:
    """Compile every source for every architecture; return the rows and what is wrong.

    Raises:
        UsageError: nvcc is missing or does not compile a source.
    """
    nvcc = toolkit.find_nvcc(os.environ)
    if nvcc is None:
        raise UsageError(f"nvcc was not found: {build_cuda.REMEDIES['nvcc']}")
    sources = [path for path in build_cuda.sources() if path.suffix == ".cu"]
    with ThreadPoolExecutor(jobs) as pool:
        done = pool.map(lambda task: compiled(nvcc, *task), product(sources, build_cuda.USUAL_ARCHITECTURES))
        rows = sorted((row for rows in done for row in rows), key=lambda row: (row.source, row.kernel, int(row.arch)))
    return rows, complaints(rows)
