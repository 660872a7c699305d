"""Builds the CUDA extension ``prokl._C`` from csrc/ with nvcc, pybind11 and ninja; torch and a GPU are not needed.

PROKL_BUILD_CUDA is "auto" (the default: build where these tools are), "1" (fail without them) or "0" (never).
PROKL_CUDA_ARCHS lists the architectures, as in "80;90;100".
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location(
    "toolkit", ROOT / "prokl" / "backends" / "toolkit.py"
)  # prokl itself imports torch
assert _spec is not None and _spec.loader is not None
toolkit = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toolkit)
ToolkitError = toolkit.ToolkitError

MODES = ("auto", "1", "0")
USUAL_ARCHITECTURES = ("80", "90", "100")
COMPILE = ("-std=c++17", "-O3", "-Xptxas", "-v")
"""All that decides what a kernel becomes; bench/compile_report/csrc.py reads what ptxas says of it."""
HOST = ("-Xcompiler", "-fPIC,-fvisibility=hidden")
LINK = ("-shared", "-cudart", "static", "-Xlinker", "--exclude-libs,ALL")
"""The runtime is linked in, so that the module imports without CUDA, and hidden: torch brings one of its own, whose
functions would be called in its place."""
OLDEST_NVCC = (11, 8)
"""The first whose runtime has cudaLaunchKernelEx."""
RECENT = f"nvcc {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} or newer"
REMEDIES = {
    "nvcc": "put it on PATH, or name it in CUDACXX or its toolkit in CUDA_HOME",
    RECENT: "name a newer one in CUDACXX, or its toolkit in CUDA_HOME",
    "pybind11": "pip install pybind11, or build in isolation",
    "ninja": "pip install ninja, or build in isolation",
}


def sources() -> list[Path]:
    """List what is compiled, each file by itself."""
    return sorted(path for path in (ROOT / "csrc").iterdir() if path.suffix in (".cu", ".cpp"))


def asked(environ: Mapping[str, str]) -> str:
    """Read PROKL_BUILD_CUDA."""
    value = environ.get("PROKL_BUILD_CUDA", "auto")
    if value not in MODES:
        raise ToolkitError(
            f"Invalid PROKL_BUILD_CUDA={value!r}: must be one of {MODES}. "
            '"auto" builds the CUDA extension where its tools are, "1" insists on it, "0" leaves it out.'
        )
    return value


def find_ninja() -> str | None:
    """Find the package's program where it is installed, else the one on PATH."""
    try:
        import ninja
    except ImportError:
        return shutil.which("ninja")
    return str(Path(ninja.BIN_DIR, "ninja"))


def missing(environ: Mapping[str, str]) -> list[str]:
    """List the tools that are not there."""
    nvcc = toolkit.find_nvcc(environ)
    recent = nvcc is None or tuple(map(int, toolkit.nvcc_version(nvcc).split(".")))[:2] >= OLDEST_NVCC
    found = {
        "nvcc": nvcc,
        RECENT: recent or None,
        "pybind11": importlib.util.find_spec("pybind11"),
        "ninja": find_ninja(),
    }
    return [name for name, where in found.items() if where is None]


def named_architectures(environ: Mapping[str, str]) -> list[str] | None:
    """Read PROKL_CUDA_ARCHS, in ascending order; None where it is not set."""
    value = environ.get("PROKL_CUDA_ARCHS")
    if value is None:
        return None
    for name in value.split(";"):
        if not re.fullmatch(r"[1-9][0-9]+[af]?", name) or toolkit.number(name) < toolkit.OLDEST:
            raise ToolkitError(
                f"Invalid PROKL_CUDA_ARCHS={value!r}: {name!r} must be a compute capability without its point, at "
                f"least {toolkit.OLDEST}. Separate several by semicolons, as in PROKL_CUDA_ARCHS='80;90;100'."
            )
    return sorted(set(value.split(";")), key=lambda name: (toolkit.number(name), name))


def dry_run(architecture: str) -> list[str]:
    """Return the options with which nvcc says what it would do to compile for the architecture."""
    return ["--dryrun", *generate([architecture]), "-x", "cu", "-c", os.devnull]


def takes(nvcc: str, architecture: str) -> bool:
    """Return True if this nvcc compiles for the architecture."""
    try:
        toolkit.ask(nvcc, *dry_run(architecture))
    except ToolkitError:
        return False
    return True


def architectures(environ: Mapping[str, str], nvcc: str) -> list[str]:
    """Choose the architectures: those of PROKL_CUDA_ARCHS, or of the usual ones those that nvcc takes."""
    named = named_architectures(environ)
    known = [name for name in named or USUAL_ARCHITECTURES if takes(nvcc, name)]
    if known == named or (named is None and known):
        return known
    refused = [name for name in named or USUAL_ARCHITECTURES if name not in known]
    listed = [code.removeprefix("sm_") for code in toolkit.ask(nvcc, "--list-gpu-code").split()]
    for name in refused:
        if name in listed:  # so what fails is another thing, as a host compiler that is not there: nvcc says which
            toolkit.ask(nvcc, *dry_run(name))
    choice = ", ".join(code for code in sorted(listed, key=toolkit.number) if toolkit.number(code) >= toolkit.OLDEST)
    raise ToolkitError(
        f"Invalid PROKL_CUDA_ARCHS={';'.join(named or USUAL_ARCHITECTURES)!r}: nvcc {toolkit.nvcc_version(nvcc)} does "
        f"not compile for {', '.join(refused)}; must be among {choice}. Name others, or another nvcc in CUDACXX."
    )


def generate(names: Sequence[str]) -> list[str]:
    """Return the options for machine code of each architecture, and for PTX of the newest."""
    ptx = toolkit.forward(names)
    flags = []
    for name in names:
        code = f"[sm_{name},compute_{name}]" if name == ptx else f"sm_{name}"
        flags += ["-gencode", f"arch=compute_{name},code={code}"]
    return flags


def _words(words: Sequence[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def _path(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def ninja_file(nvcc: str, names: Sequence[str], target: Path) -> str:
    """Write the build: each source by nvcc, which hands C++ to the host's compiler, then the link."""
    import pybind11

    python = sysconfig.get_paths()
    includes = dict.fromkeys((pybind11.get_include(), python["include"], python["platinclude"]))
    binding = [*(f"-I{include}" for include in includes), f'-DPROKL_CUDA_ARCHS="{";".join(names)}"']
    compile_any = [nvcc, *COMPILE, *HOST, *generate(names)]
    # What the compiler says, ptxas's figures among it, goes to a log, and is shown where it fails.
    rest = "-MD -MF $out.d -c $in -o $out >$out.log 2>&1 || { cat $out.log; exit 1; }\n  depfile = $out.d\n  deps = gcc"
    lines = [
        "ninja_required_version = 1.5",
        f"rule cu\n  description = $out\n  command = {_words(compile_any)} {rest}",
        f"rule cpp\n  description = $out\n  command = {_words([*compile_any, *binding])} {rest}",
        f"rule link\n  description = $out\n  command = {_words([nvcc, *LINK])} $in -o $out",
    ]
    lines += [f"build {source.name}.o: {source.suffix[1:]} {_path(source)}" for source in sources()]
    lines.append(f"build {_path(target)}: link {' '.join(f'{source.name}.o' for source in sources())}")
    return "\n".join(lines) + "\n"


def build(environ: Mapping[str, str], folder: Path, target: Path) -> None:
    """Compile what has changed since the last time in ``folder``, and link ``target``.

    Raises:
        ToolkitError: a tool is missing, refuses what it is asked for, or fails.
    """
    absent = missing(environ)
    if absent:
        reasons = "; ".join(f"{name} was not found: {REMEDIES[name]}" for name in absent)
        raise ToolkitError(f"The CUDA extension cannot be built. {reasons}. {toolkit.SKIP}")
    nvcc = toolkit.find_nvcc(environ)
    folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    names = architectures(environ, nvcc)
    print(f"building the CUDA extension for {', '.join(names)} with {nvcc} {toolkit.nvcc_version(nvcc)}", flush=True)
    (folder / "build.ninja").write_text(ninja_file(nvcc, names, target), encoding="utf-8")
    done = subprocess.run([str(find_ninja())], cwd=folder)
    if done.returncode != 0:
        raise ToolkitError(
            f"The CUDA extension does not compile: ninja exited {done.returncode}, see above. {toolkit.SKIP}"
        )


class BuildCuda(build_ext):
    """Builds the one extension there is with ninja in place of setuptools' own compiler."""

    def build_extension(self, ext: Extension) -> None:
        """Build the extension to where setuptools wants it."""
        try:
            build(os.environ, Path(self.build_temp, "csrc").resolve(), Path(self.get_ext_fullpath(ext.name)).resolve())
        except ToolkitError as error:
            raise CompileError(str(error)) from error


def extensions(environ: Mapping[str, str], commands: Sequence[str]) -> list[Extension]:
    """Return what setup() is to build: the extension, or nothing where it is not asked for or, under "auto", cannot be.

    A package without extensions gets a wheel for every platform.
    """
    wanted = asked(environ)
    if wanted == "0":
        return []
    named_architectures(environ)  # a wrong value is told before anything is built
    absent = missing(environ) if wanted == "auto" else []
    if absent:
        # Other commands run before the build's own requirements are installed.
        if {"bdist_wheel", "build", "build_ext", "editable_wheel"} & set(commands):
            print(f"building without the CUDA extension: {', '.join(absent)} not found", flush=True)
        return []
    return [Extension("prokl._C", [str(path.relative_to(ROOT)) for path in sources()])]
