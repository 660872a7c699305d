"""Makes what a GPU machine without network would lack or wait for: ``./run prepare``, into build/prepared.

* wheels: the tools that build and test the package
* extension: the CUDA extension, for the Python that runs this, which is the one of ``PYTHON=...``
* triton: the kernels of the benchmarks, compiled; see :mod:`bench.compiled.ahead`

That Python must have the minor version of the machine's, and of its packages torch, in any build, Triton in the
machine's version, pip, setuptools, pybind11 and ninja. ``./run gpu`` uses the folder where it lies in its place, and
does without what does not fit.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.command import Parser, UsageError, command
from bench.unpack import FOLDER, ROOT, SOURCES, TOOLS, fingerprint

LIMIT = 40 * 2**20
"""Bytes that the folder may have, so that it travels with a working tree."""
LARGEST = 3
"""Files named where it has more."""


def run(what: str, arguments: Sequence[str], **variables: str) -> None:
    """Run this Python in the checkout.

    Raises:
        UsageError: it fails; what it said stands above.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment | variables)
    if done.returncode != 0:
        raise UsageError(
            f"{what} failed with exit status {done.returncode}, see above: {sys.executable} may lack a package; "
            "or leave it out with --only"
        )


def wheels(folder: Path, arch: int) -> None:
    """Download the tools and what they need, for this Python and platform."""
    asked = ["-m", "pip", "download", "-q", "--only-binary=:all:", "-c", "constraints.txt", "-d", str(folder), *TOOLS]
    run("pip download", asked)


def extension(folder: Path, arch: int) -> None:
    """Build the CUDA extension, and note of which sources."""
    scratch = FOLDER.with_name("prepared-extension")
    asked = ["setup.py", "-q", "build_ext", "--build-lib", str(scratch), "--build-temp", str(scratch)]
    run("setup.py build_ext", asked, PROKL_BUILD_CUDA="1", PROKL_CUDA_ARCHS=str(arch))
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    shutil.copy2(scratch / "prokl" / name, folder / name)
    (folder / SOURCES).write_text(fingerprint(), encoding="utf-8")


def triton(folder: Path, arch: int) -> None:
    """Compile the kernels; of every one the binary alone is kept."""
    asked = ["-m", "bench.compiled.ahead", str(arch)]
    run("bench.compiled.ahead", asked, TRITON_CACHE_DIR=str(folder), TRITON_STORE_BINARY_ONLY="1")
    for text in folder.rglob("*.source"):  # which is kept beside the binary all the same
        text.unlink()


PARTS: dict[str, Callable[[Path, int], None]] = {"wheels": wheels, "extension": extension, "triton": triton}


def check_size(folder: Path, limit: int = LIMIT) -> int:
    """Return the bytes of a folder.

    Raises:
        UsageError: there are more than ``limit``.
    """
    sizes = {path.relative_to(folder): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    if total > limit:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:LARGEST]
        named = ", ".join(f"{path} {sizes[path] / 2**20:.1f} MiB" for path in largest)
        raise UsageError(
            f"{folder} has {total / 2**20:.1f} MiB: must be at most {limit / 2**20:g}. Remove what need not travel; "
            f"the largest are {named}"
        )
    return total


@command
def main(argv: Sequence[str]) -> int:
    """Make the parts anew; return the exit status."""
    parser = Parser(prog="./run prepare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--arch", type=int, default=90, help="the GPU's compute capability without its point (90)")
    a = parser.parse_args(argv)
    print(f"for Python {platform.python_version()} of {sys.executable}, sm_{a.arch}, in {FOLDER}", flush=True)
    for name in a.only:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / name).mkdir(parents=True)
        PARTS[name](FOLDER / name, a.arch)
    print(f"{check_size(FOLDER) / 2**20:.1f} MiB of at most {LIMIT / 2**20:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
