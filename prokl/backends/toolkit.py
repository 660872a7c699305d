"""The CUDA toolkit: where nvcc is, and what it compiles for.

Only the standard library is imported: the build reads this file where torch is missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

OLDEST = 80
"""The oldest architecture that the kernels are written for (Ampere)."""
USUAL_NVCC = "/usr/local/cuda/bin/nvcc"
"""The place where NVIDIA's installer puts nvcc; rarely on PATH."""


SKIP = "PROKL_BUILD_CUDA=0 installs without the CUDA extension."
OTHER = f"Repair it, or name another nvcc in CUDACXX; {SKIP}"


class ToolkitError(Exception):
    """The toolkit that was asked for cannot be used; the text says why and what to do."""


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """Find nvcc: $CUDACXX, $CUDA_HOME/bin, $CUDA_PATH/bin, $PATH, then the usual place; None without one.

    Raises:
        ToolkitError: CUDACXX names no program.
    """
    path = environ.get("PATH")
    named = environ.get("CUDACXX")
    if named:
        program = shutil.which(named, path=path)
        if program is None:
            raise ToolkitError(f"Invalid CUDACXX={named!r}: must be a program. Name nvcc, or unset it; {SKIP}")
        return program
    folders = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    for candidate in (*(str(Path(folder, "bin", "nvcc")) for folder in folders), "nvcc", USUAL_NVCC):
        program = shutil.which(candidate, path=path)
        if program is not None:
            return program
    return None


def ask(nvcc: str, *arguments: str) -> str:
    """Run nvcc and return what it prints.

    Raises:
        ToolkitError: it cannot be run, or fails.
    """
    command = [nvcc, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ToolkitError(f"{nvcc} cannot be run: {error}. {OTHER}") from error
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip() or "it says nothing"
        raise ToolkitError(f"{' '.join(command)} exited {done.returncode}: {output.rstrip('.')}. {OTHER}")
    return done.stdout


def nvcc_version(nvcc: str) -> str:
    """Return the version of nvcc, such as "13.0.88"."""
    printed = ask(nvcc, "--version")
    match = re.search(r"\bV(\d+(?:\.\d+)+)", printed)
    if match is None:
        raise ToolkitError(f"{nvcc} --version names no version: {printed.strip()!r}. {OTHER}")
    return match[1]


def number(architecture: str) -> int:
    """Return 90 for "90" and for "90a"."""
    return int(architecture.rstrip("af"))


def forward(architectures: Sequence[str]) -> str | None:
    """Return the architecture whose PTX is added for GPUs yet to come: the newest without features of its own."""
    plain = [name for name in architectures if name.isdigit()]
    return max(plain, key=int) if plain else None
