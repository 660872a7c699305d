"""What ptxas makes of csrc/, without a GPU: ``python -m bench.csrc_report [--out bench/results/csrc.csv]``.

Every source is compiled for every architecture with the options of the build. Registers, shared memory, stack and
spills of every kernel are printed and written; the exit status says whether none spills or keeps a stack, and whether
all find the shared memory that their launches ask for, which the installed extension tells.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import build_cuda
from bench.compiled.listing import table, write
from bench.errors import UsageError, command
from build_cuda import toolkit
from prokl import extension

EXCUSED: dict[str, str] = {}
"""Kernels that may spill or keep a stack, and why it does no harm."""
SHARED_LIMIT = {"80": 163 * 1024, "90": 227 * 1024, "100": 227 * 1024}
"""Bytes of shared memory that one block may have."""
TYPES = {"float": "float32", "double": "float64"}
JOBS = 2
ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Row:
    """A line of the table; sizes are in bytes."""

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
    """The rows of one compilation, from what ``-Xptxas -v`` prints; the kernels' names are still mangled.

    A function that is called and not inlined has its own stack and spills. They are counted to the kernel before it.
    """
    rows: list[Row] = []
    for line in log.splitlines():
        if found := ENTRY.search(line):
            rows.append(Row(source, found[1], found[2], 0, 0, 0, 0, 0, 0, nvcc))
            continue
        if not rows:
            continue
        last = rows[-1]
        if found := STACK.search(line):
            stack, stores, loads = map(int, found.groups())
            rows[-1] = replace(
                last,
                stack=last.stack + stack,
                spill_stores=last.spill_stores + stores,
                spill_loads=last.spill_loads + loads,
            )
        elif found := REGISTERS.search(line):
            shared = SHARED.search(line)
            rows[-1] = replace(last, registers=int(found[1]), static_shared=int(shared[1]) if shared else 0)
    return rows


def short(demangled: str) -> str:
    """``name<arguments>`` of a kernel's full signature."""
    depth = 0
    for end in range(len(demangled) - 1, -1, -1):  # the parameters are in the last parentheses
        depth += {")": 1, "(": -1}.get(demangled[end], 0)
        if depth == 0:
            break
    name = demangled[:end] if end and demangled.endswith(")") else demangled
    return name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("prokl::", "")


def demangled(rows: Sequence[Row]) -> list[Row]:
    """The rows with readable names, where there is a program that makes them."""
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None:
        return list(rows)
    names = "".join(f"{row.kernel}\n" for row in rows)
    done = subprocess.run([tool], input=names, capture_output=True, text=True, check=True)
    return [replace(row, kernel=short(name)) for row, name in zip(rows, done.stdout.splitlines(), strict=True)]


def complaints(rows: Iterable[Row]) -> Iterator[str]:
    """What is wrong."""
    for row in rows:
        if row.stack + row.spill_stores + row.spill_loads > 0 and row.kernel not in EXCUSED:
            yield (
                f"{row.kernel} on sm_{row.arch}: {row.stack} bytes of stack, {row.spill_stores} stored and "
                f"{row.spill_loads} loaded by spills beside {row.registers} registers; keep less there, or bound "
                "the kernel to fewer threads"
            )
        shared, limit = row.static_shared + row.launch_shared, SHARED_LIMIT[row.arch]
        if shared > limit:
            yield f"{row.kernel} on sm_{row.arch}: {shared} bytes of shared memory; must be at most {limit}"


def with_launches(rows: Iterable[Row]) -> list[Row]:
    """The rows with what the launches ask for at most.

    Raises:
        UsageError: there is no extension to ask, or it does not know a kernel.
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
    """The rows of one source on one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder, "out.cubin"))
        command = [nvcc, *build_cuda.COMPILE, "-cubin", f"-arch=sm_{arch}", str(source), "-o", output]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UsageError(f"{source.name} does not compile for sm_{arch}:\n{done.stdout}{done.stderr}")
    return parse(done.stdout + done.stderr, source.name, version)


def report() -> list[Row]:
    """All rows.

    Raises:
        UsageError: nvcc is missing, or does not compile a source.
        ToolkitError: nvcc does not answer.
    """
    nvcc = toolkit.find_nvcc(os.environ)
    if nvcc is None:
        raise UsageError(f"nvcc was not found: {build_cuda.REMEDIES['nvcc']}")
    version = toolkit.nvcc_version(nvcc)
    tasks = product(
        [path for path in build_cuda.sources() if path.suffix == ".cu"],
        build_cuda.USUAL_ARCHITECTURES,
    )
    with ThreadPoolExecutor(JOBS) as pool:
        done = list(pool.map(lambda task: compiled(nvcc, version, *task), tasks))
    rows = with_launches(demangled([row for rows in done for row in rows]))
    return sorted(rows, key=lambda row: (row.source, row.kernel, int(row.arch)))


@command
def main(argv: Sequence[str]) -> int:
    """Compile, print, write; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.csrc_report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="CSV", help="also write the table there")
    options = parser.parse_args(argv)
    try:
        rows = report()
    except build_cuda.ToolkitError as error:
        raise UsageError(str(error)) from error
    print(table(rows))
    if options.out:
        write(options.out, rows, Row)
    wrong = list(complaints(rows))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
