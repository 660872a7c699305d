"""Takes up what ``./run prepare`` made, as far as it fits this machine: ``python -m bench.unpack``.

The tools that this Python lacks are installed from their wheels, the CUDA extension is put in its place, compiled
kernels into the folder that TRITON_CACHE_DIR names. Neither network nor torch is needed but to ask whether the GPU runs
the extension.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from bench.command import Parser, UsageError, command

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "prepared"
TOOLS = ("setuptools>=77", "pybind11>=2.12", "ninja", "pytest", "pytest-benchmark", "pytest-xdist")
"""What builds the package and what tests and times it; the first three as in pyproject.toml."""
SOURCES = "sources.sha256"
"""What csrc was when the extension was built."""
PLACED = "placed"
"""Beside the extension once it is in its place, so that it need not be built."""
GROUP = "__grp__"
"""What the names of those files of Triton's cache begin with that say where the files of an entry are."""


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
    """Put the extension where it is imported from; where it does not fit, take it away again and say why."""
    mark, name = folder / PLACED, f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    mark.unlink(missing_ok=True)
    if not (folder / name).exists():
        return f"not used: it was built for another Python, {', '.join(path.name for path in folder.glob('_C.*'))}"
    if (folder / SOURCES).read_text(encoding="utf-8") != fingerprint():
        return "not used: csrc has changed since"
    target = ROOT / "prokl" / name
    own = target.read_bytes() if target.exists() else None
    shutil.copy2(folder / name, target)
    reason = unsupported_reason()
    if reason is not None:
        if own is None:
            target.unlink()
        else:  # built here before
            target.write_bytes(own)
        return f"not used: {reason}"
    mark.touch()
    return "placed"


def copy_kernels(folder: Path, cache: Path) -> str:
    """Copy the entries that a cache of Triton's lacks; each names its files where they are then."""
    copied = 0
    for entry in sorted(path for path in folder.iterdir() if path.is_dir()):
        target = cache / entry.name
        if target.exists():
            continue
        shutil.copytree(entry, target)
        for group in target.glob(f"{GROUP}*"):
            names = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
            paths = {name: str(target / name) for name in names if (target / name).exists()}
            group.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
        copied += 1
    return f"{copied} entries new in {cache}"


@command
def main(argv: Sequence[str]) -> int:
    """Take up all there is, a line each; return the exit status."""
    Parser(prog="python -m bench.unpack", description=(__doc__ or "").partition("\n")[0]).parse_args(argv)
    cache = os.environ.get("TRITON_CACHE_DIR")
    if cache is None:
        raise UsageError("TRITON_CACHE_DIR is not set: name the folder for compiled kernels in it")
    if (FOLDER / "wheels").is_dir():
        print(f"tools: {install_tools(FOLDER / 'wheels')}", flush=True)
    if (FOLDER / "extension").is_dir():
        print(f"extension: {place_extension(FOLDER / 'extension')}", flush=True)
    if (FOLDER / "triton").is_dir():
        print(f"kernels: {copy_kernels(FOLDER / 'triton', Path(cache).resolve())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
