"""The extension's sources built for the CPU: g++ compiles them against tests/host_cuda, which runs them block by block.

Built libraries are kept under the system's folder for temporary files, one for each state of the sources and flags.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest

from prokl.backends import cuda_qr, extension
from tests.building import run

ROOT = Path(__file__).parent.parent
CSRC, HOST_CUDA = ROOT / "csrc", ROOT / "tests" / "host_cuda"
SOURCES = sorted([*CSRC.glob("*.cu"), *CSRC.glob("*.cpp"), *HOST_CUDA.glob("*.cpp")])
COMPILER = "g++"
# -O3 unrolls and vectorises the loops over tiles, which makes QR two to three times as fast as -O2.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden")
WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas")  # GCC has another spelling for CUDA's `#pragma unroll`


@pytest.fixture(scope="session")
def host_module():
    """The extension for the CPU; what asks for it is skipped where there is no compiler."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"needs {COMPILER}")
    library = compiled_extension()
    # pybind11 gives the first module of a name again, whatever the file, so every library gets a name of its own.
    spec = importlib.util.spec_from_file_location(f"{library.parent.name}._C", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def extension_on_cpu(host_module, monkeypatch):
    """The extension's sources in place of prokl._C, so that prokl.cuda_qr takes CPU tensors."""
    monkeypatch.setattr(extension, "load", lambda: (host_module, None))
    return host_module


@pytest.fixture
def takes_the_extension(extension_on_cpu):
    """A context in which every one of the extension's factorisations has to be called."""

    @contextlib.contextmanager
    def every():
        with contextlib.ExitStack() as stack:
            names = ("track", "semidefinite_qr", "coordinates_qr")
            called = [stack.enter_context(patch.object(cuda_qr, n, wraps=getattr(cuda_qr, n))) for n in names]
            yield
        assert all(operation.called for operation in called)

    return every


def extension_flags():
    import pybind11

    folders = (pybind11.get_include(), sysconfig.get_paths()["include"])
    return (*(f"-isystem{folder}" for folder in folders), '-DPROKL_CUDA_ARCHS="host"')


def compiled_extension():
    """Compile csrc with the runtime of tests/host_cuda, unless that was done before; give the library's file.

    What the compiler warned of is in the file warnings.txt beside it.
    """
    flags = (*FLAGS, *WARNINGS, f"-I{HOST_CUDA}", *extension_flags())
    cache = cache_folder()
    state = fingerprint(flags)
    built = cache / state
    library = built / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    # Test processes side by side wait for the first of them instead of compiling the same.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                whole = Path(scratch) / "whole"  # moved when it is complete: a build that was cut short is never found
                whole.mkdir()
                output = run(COMPILER, *flags, "-shared", "-x", "c++", *SOURCES, "-o", whole / library.name, cwd=ROOT)
                (whole / "warnings.txt").write_text(output)
                if fingerprint(flags) != state:
                    raise RuntimeError("The sources changed while they were compiled: run again.")
                whole.rename(built)
    return library


def fingerprint(flags):
    """Return a hash of all that the library depends on: csrc and tests/host_cuda, flags, compiler and Python."""
    state = hashlib.sha256(repr((flags, sysconfig.get_config_var("SOABI"))).encode())
    state.update(run(COMPILER, *flags, "-dM", "-E", "-x", "c++", os.devnull, cwd=ROOT).encode())
    for path in sorted(path for folder in (CSRC, HOST_CUDA) for path in folder.iterdir() if path.is_file()):
        state.update(f"{path.relative_to(ROOT)}\0".encode())
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def cache_folder():
    """A folder that only this user can write, since what is in it is executed."""
    folder = Path(tempfile.gettempdir()) / f"prokl-host-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise RuntimeError(f"Invalid {folder}: others can write it; remove it, or set TMPDIR to another folder.")
    return folder


@contextlib.contextmanager
def shuffled(library, seed):
    """Run threads between barriers, and blocks, in an order shuffled by the seed, which is not 0."""
    shuffle = ctypes.CDLL(library.__file__).host_cuda_shuffle
    shuffle.argtypes = (ctypes.c_ulonglong,)
    shuffle(seed)
    try:
        yield
    finally:
        shuffle(0)


@contextlib.contextmanager
def shared_limit(library, limit):
    """Stand for a device whose blocks may have this many bytes of shared memory."""
    set_limit = ctypes.CDLL(library.__file__).host_cuda_shared_limit
    set_limit.argtypes = (ctypes.c_size_t,)
    set_limit(limit)
    try:
        yield
    finally:
        set_limit(0)


def launches(library):
    count = ctypes.CDLL(library.__file__).host_cuda_launches
    count.restype = ctypes.c_ulonglong
    return count()
