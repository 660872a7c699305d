"""Makes what a GPU machine without network would lack or wait for: ``./run prepare``, into build/prepared.

* wheels: the tools that build and test the package
* extension: the CUDA extension, for the Python that runs this, which is the one of ``PYTHON=...``
* triton: the kernels of the benchmarks, compiled; see :mod:`bench.compile_report.ahead`

That Python must have the minor version of the machine's, and of its packages torch, in any build, Triton in the
machine's version, pip, setuptools, pybind11 and ninja. ``./run gpu`` uses the folder where it lies in its place, and
does without what does not fit.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.command import UsageError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "prepared"
TOOLS = ("setuptools>=77", "pybind11>=2.12", "ninja", "numpy", "pytest", "pytest-benchmark", "pytest-xdist")
"""Packages that build, test, time and train; the first three as in pyproject.toml."""
NAME = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"  # the extension's file, for this Python
SOURCES = "sources.sha256"  # the file with the hash of csrc when the extension was built
PLACED = "placed"  # beside the extension once it is in its place, so that it need not be built
GROUP = "__grp__"  # prefix of those files of Triton's cache that list the files of an entry


def run(arguments: Sequence[str], **variables: str) -> None:
    """Run this Python in the checkout; raise UsageError if it fails, which says why above."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment | variables)
    if done.returncode != 0:
        raise UsageError(
            f"{' '.join(arguments[:3])} failed with exit status {done.returncode}, see above: {sys.executable} may "
            "lack a package; or leave it out with --only"
        )


def wheels(folder: Path, arch: int) -> None:
    """Download the tools and what they need, for this Python and platform."""
    asked = ["-m", "pip", "download", "-q", "--only-binary=:all:", "-c", "constraints.txt", "-d", str(folder), *TOOLS]
    run(asked)


def extension(folder: Path, arch: int) -> None:
    """Build the CUDA extension, and note of which sources."""
    scratch = FOLDER.with_name("prepared-extension")
    asked = ["setup.py", "-q", "build_ext", "--build-lib", str(scratch), "--build-temp", str(scratch)]
    run(asked, PROKL_BUILD_CUDA="1", PROKL_CUDA_ARCHS=str(arch))
    shutil.copy2(scratch / "prokl" / NAME, folder / NAME)
    (folder / SOURCES).write_text(fingerprint(), encoding="utf-8")


def triton(folder: Path, arch: int) -> None:
    """Compile the kernels; of every one the binary alone is kept."""
    asked = ["-m", "bench.compile_report", "ahead", str(arch)]
    run(asked, TRITON_CACHE_DIR=str(folder), TRITON_STORE_BINARY_ONLY="1")
    for text in folder.rglob("*.source"):  # which is kept beside the binary all the same
        text.unlink()


PARTS: dict[str, Callable[[Path, int], None]] = {"wheels": wheels, "extension": extension, "triton": triton}


def pack(parts: Sequence[str], arch: int) -> None:
    """Make parts anew; raise UsageError where one fails."""
    print(f"for Python {platform.python_version()} of {sys.executable}, sm_{arch}, in {FOLDER}", flush=True)
    for name in parts:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / name).mkdir(parents=True)
        PARTS[name](FOLDER / name, arch)
    total = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    print(f"{total / 2**20:.1f} MiB")


def fingerprint() -> str:
    """Return a hash of all that the extension is compiled from."""
    sources = sorted(path for path in (ROOT / "csrc").iterdir() if path.is_file())
    return hashlib.sha256(b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sources)).hexdigest()


def unsupported_reason() -> str | None:
    """Return why this machine's GPU cannot run the extension in its place; None when it can."""
    import torch

    from prokl.backends import extension

    return extension.unsupported_reason(torch.device("cuda"))


def install_tools(folder: Path) -> str:
    """Install of the wheels what is not there; what is there stays."""
    asked = ["-m", "pip", "install", "-q", "--no-index", "--find-links", str(folder), *TOOLS]
    done = subprocess.run([sys.executable, *asked])
    return "there" if done.returncode == 0 else f"not installed: pip exited {done.returncode}"


def place_extension(folder: Path) -> str:
    """Put the extension where it is imported from; where it does not fit, put back what was there and say why."""
    mark = folder / PLACED
    mark.unlink(missing_ok=True)
    if not (folder / NAME).exists():
        return f"not used: it was built for another Python, {', '.join(path.name for path in folder.glob('_C.*'))}"
    if (folder / SOURCES).read_text(encoding="utf-8") != fingerprint():
        return "not used: csrc has changed since"
    target = ROOT / "prokl" / NAME
    own = target.read_bytes() if target.exists() else None
    shutil.copy2(folder / NAME, target)
    reason = unsupported_reason()
    if reason is None:
        mark.touch()
        return "placed"
    target.unlink()
    if own is not None:  # built here before
        target.write_bytes(own)
    return f"not used: {reason}"


def copy_kernels(folder: Path, cache: Path) -> str:
    """Copy the entries that a cache of Triton's lacks; each names its files where they are then."""
    new = [path for path in sorted(folder.iterdir()) if path.is_dir() and not (cache / path.name).exists()]
    for entry in new:
        target = cache / entry.name
        shutil.copytree(entry, target)
        for group in target.glob(f"{GROUP}*"):
            names = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
            paths = {name: str(target / name) for name in names if (target / name).exists()}
            group.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
    return f"{len(new)} entries new in {cache}"


def unpack() -> None:
    """Take up all there is, a line each: tools from their wheels, the extension, and kernels into TRITON_CACHE_DIR.

    Neither network nor torch is needed but to ask whether the GPU runs the extension.
    """
    cache = os.environ.get("TRITON_CACHE_DIR")
    if cache is None:
        raise UsageError("TRITON_CACHE_DIR is not set: name the folder for compiled kernels in it")
    steps: dict[str, tuple[str, Callable[[Path], str]]] = {
        "wheels": ("tools", install_tools),
        "extension": ("extension", place_extension),
        "triton": ("kernels", lambda folder: copy_kernels(folder, Path(cache).resolve())),
    }
    for name, (what, take) in steps.items():
        if (FOLDER / name).is_dir():
            print(f"{what}: {take(FOLDER / name)}", flush=True)
