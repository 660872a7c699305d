"""The stand-in for CUDA, tests/host_cuda, runs kernels in the order asked for and shows what is wrong with them."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from tests import host_extension
from tests.host_extension import HOST_CUDA, order

THREADS = 256


@pytest.fixture(scope="module")
def probes():
    host_extension.skip_without_compiler()
    return host_extension.compile_library("probes", [HOST_CUDA / "probes.cu"])


def run(probes, name, *arguments):
    """What a launch says, "no error" if all went well; tensors go as their addresses."""
    function = getattr(ctypes.CDLL(str(probes)), name)
    function.restype = ctypes.c_char_p
    return function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments)).decode()


def test_a_missing_barrier_changes_the_result_with_the_order_and_a_barrier_makes_all_orders_one(probes):
    results = []
    for kind, seed in (("forward", 0), ("reversed", 0), ("shuffled", 1), ("shuffled", 2)):
        with order(probes, threads=kind, blocks=kind, seed=seed):
            right, wrong = (torch.arange(3.0 * THREADS).view(3, THREADS) for _ in range(2))
            assert run(probes, "reverse", right, 3, THREADS, True) == "no error"
            assert run(probes, "reverse", wrong, 3, THREADS, False) == "no error"
        assert torch.equal(right, torch.arange(3.0 * THREADS).view(3, THREADS).flip(1))
        results.append(tuple(wrong.isnan().flatten().tolist()))
    assert all(map(any, results)) and len(set(results)) == 4  # shared memory reads NaN before it is written


def test_threads_and_blocks_run_in_the_order_asked_for_each_once(probes):
    def sequence(**kinds):
        count, blocks, threads = (torch.zeros(size, dtype=torch.int32) for size in (1, 120, 120))
        with order(probes, **kinds):
            assert run(probes, "sequence", count, blocks, threads, 3, 40) == "no error"
        return [(b, t) for b, t in zip(blocks.tolist(), threads.tolist(), strict=True)]

    forward = [(b, t) for b in range(3) for t in range(40)]
    assert sequence() == forward and sequence(threads="reversed", blocks="reversed") == forward[::-1]
    first, again, other = (sequence(threads="shuffled", blocks="shuffled", seed=seed) for seed in (1, 1, 2))
    assert first == again != other and sorted(first) == sorted(other) == forward
    assert sequence() == forward  # the order ends with its context


@pytest.mark.parametrize(
    "name, arguments, says",
    [
        ("early_return", (), r"Divergent threads: 32 at __syncthreads in .*probes\.cu:\d+, 16 returned; in block "
                             r"\(0, 0, 0\) of a grid of \(1, 2, 1\)"),
        ("two_barriers", (), r"Divergent threads: .*__syncthreads in \S+:(\d+).*__syncthreads in \S+:(?!\1).*"),
        ("two_masks", (), r"Divergent threads: .*__syncwarp with mask 0x.*"),
        ("overrun", (1024, 1023, 2), "no error"),
        ("overrun", (1024, 150_000, 2), r"Shared memory was written at byte 150000, beyond dynamicSmemBytes=1024; "
                                        r"in block \(2, 0, 0\) of a grid of \(4, 1, 1\)"),
        ("nothing", (70000, 1, 48 * 1024), "no error"),
        ("nothing", (1, 1025, 0), "invalid configuration argument"),
        ("nothing", (0, 1, 0), "invalid configuration argument"),
        ("nothing", (1, 1, 48 * 1024 + 1), "invalid argument"),  # has to be asked for
    ],
)  # fmt: skip
def test_what_a_gpu_would_refuse_or_hang_at_is_told(probes, name, arguments, says):
    for _ in range(2):  # what has failed leaves nothing behind
        assert re.fullmatch(says, run(probes, name, *arguments))
    data = torch.arange(1.0 * THREADS)
    assert run(probes, "reverse", data, 1, THREADS, True) == "no error"
    assert torch.equal(data, torch.arange(1.0 * THREADS).flip(0))


def test_sources_compile_without_warnings(probes, host_module):
    assert host_module.architectures == "host"
    for library in (probes, Path(host_module.__file__)):
        assert (library.parent / "warnings.txt").read_text() == ""


def test_a_changed_source_or_flag_is_another_library_and_what_does_not_compile_raises(tmp_path, monkeypatch):
    host_extension.skip_without_compiler()
    source = tmp_path / "one.cu"
    source.write_text("int one = missing_name;\n")
    first = host_extension.fingerprint([source], ())
    assert host_extension.fingerprint([source], ()) == first != host_extension.fingerprint([source], ("-DNAME",))
    (tmp_path / "beside.cuh").write_text("// a header\n")
    assert host_extension.fingerprint([source], ()) != first
    monkeypatch.setattr(host_extension, "RUNTIME", ())
    with pytest.raises(RuntimeError, match="missing_name"):
        host_extension.compile_library("broken", [source])


def test_a_cache_that_others_can_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host_extension.tempfile, "gettempdir", lambda: str(tmp_path))
    host_extension.cache_folder().chmod(0o777)
    with pytest.raises(RuntimeError, match="others can write it"):
        host_extension.cache_folder()
