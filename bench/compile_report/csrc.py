"""Registers, shared memory, stack and spills of every kernel of csrc/, as ptxas reports them; no GPU is needed."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import build_cuda
from bench.command import UsageError
from build_cuda import toolkit
from prokl.backends import extension

SHARED_LIMIT = {"80": 163 * 1024, "90": 227 * 1024, "100": 227 * 1024}
"""Bytes of shared memory that one block may have."""
TYPES = {"float": "float32", "double": "float64"}
ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers(?:.* (\d+) bytes smem)?")


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture; sizes are in bytes."""

    source: str
    kernel: str
    arch: str
    registers: int
    static_shared: int
    launch_shared: int
    stack: int
    spill_stores: int
    spill_loads: int
    nvcc: str


def parse(log: str, source: str, nvcc: str) -> list[Row]:
    """Return the rows of one compilation from what ``-Xptxas -v`` prints; the kernels' names are still mangled.

    A function that is called and not inlined has its own stack and spills. They are counted to the kernel before it.
    """
    rows = []
    _, *parts = ENTRY.split(log)
    for kernel, arch, text in zip(*[iter(parts)] * 3, strict=True):
        registers, shared = (int(found or 0) for found in REGISTERS.search(text).groups())  # type: ignore[union-attr]
        stack, stores, loads = (sum(map(int, column)) for column in zip(*STACK.findall(text), strict=True))
        rows.append(Row(source, kernel, arch, registers, shared, 0, stack, stores, loads, nvcc))
    return rows


def demangled(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with readable names; c++filt comes with the host compiler that nvcc needs."""
    names = "".join(f"{row.kernel}\n" for row in rows)
    done = subprocess.run(["c++filt", "-p"], input=names, capture_output=True, text=True, check=True)
    readable = re.sub(r"\(anonymous namespace\)::|\bprokl::", "", done.stdout).splitlines()
    return [replace(row, kernel=name) for row, name in zip(rows, readable, strict=True)]


def complaints(rows: Iterable[Row]) -> Iterator[str]:
    """Yield what is wrong."""
    for row in rows:
        if row.stack + row.spill_stores + row.spill_loads > 0:
            yield (
                f"{row.kernel} on sm_{row.arch}: {row.stack} bytes of stack, {row.spill_stores} stored and "
                f"{row.spill_loads} loaded by spills beside {row.registers} registers; keep less there, or bound "
                "the kernel to fewer threads"
            )
        shared, limit = row.static_shared + row.launch_shared, SHARED_LIMIT[row.arch]
        if shared > limit:
            yield f"{row.kernel} on sm_{row.arch}: {shared} bytes of shared memory; must be at most {limit}"


def with_launches(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the most shared memory that launches ask for, which the installed extension knows.

    Raises:
        UsageError: there is no extension, or it does not know a kernel.
    """
    module, reason = extension.load()
    if module is None:
        raise UsageError(f"the launches' shared memory is not known: {reason}")
    known = {f"qr_{t}.cu": dict(getattr(module, name).shared_memory()) for t, name in TYPES.items()}

    def asked(row: Row) -> int:
        name, _, arguments = row.kernel.rstrip(">").partition("<")
        asked_for = known[row.source]
        found = asked_for.get(name, asked_for.get(f"{name}<{arguments.split(', ')[-1]}>"))
        if found is None:
            raise UsageError(f"the extension's shared_memory() leaves out {row.kernel}: add it in csrc/entry.cuh")
        return found

    return [replace(row, launch_shared=asked(row)) for row in rows]


def compiled(nvcc: str, version: str, source: Path, arch: str) -> list[Row]:
    """Compile one source for one architecture with the options of the build."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder, "out.cubin"))
        command = [nvcc, *build_cuda.COMPILE, "-cubin", f"-arch=sm_{arch}", str(source), "-o", output]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UsageError(f"{source.name} does not compile for sm_{arch}:\n{done.stdout}{done.stderr}")
    return parse(done.stdout + done.stderr, source.name, version)


def report(jobs: int) -> tuple[list[Row], list[str]]:
    """Compile every source for every architecture; return the rows and what is wrong.

    Raises:
        UsageError: nvcc is missing or does not compile a source, or the extension is not installed.
    """
    nvcc = toolkit.find_nvcc(os.environ)
    if nvcc is None:
        raise UsageError(f"nvcc was not found: {build_cuda.REMEDIES['nvcc']}")
    try:
        version = toolkit.nvcc_version(nvcc)
    except build_cuda.ToolkitError as error:
        raise UsageError(str(error)) from error
    sources = [path for path in build_cuda.sources() if path.suffix == ".cu"]
    with ThreadPoolExecutor(jobs) as pool:
        done = pool.map(lambda task: compiled(nvcc, version, *task), product(sources, build_cuda.USUAL_ARCHITECTURES))
        rows = with_launches(demangled([row for rows in done for row in rows]))
    return sorted(rows, key=lambda row: (row.source, row.kernel, int(row.arch))), list(complaints(rows))
