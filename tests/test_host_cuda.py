"""The CPU's stand-in for CUDA, tests/host_cuda, runs kernels rightly and shows what is wrong with them."""

import ctypes
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests import host_extension
from tests.host_extension import HOST_CUDA, order

PROBES = HOST_CUDA / "probes.cu"
ORDERS = [("forward", 0), ("reversed", 0), ("shuffled", 1), ("shuffled", 2)]


class Probes:
    """The functions of probes.cu: tensors go as their addresses, and what they say comes back as text."""

    def __init__(self, library):
        self.library = library
        self.functions = ctypes.CDLL(str(library))

    def __call__(self, name, *arguments):
        function = getattr(self.functions, name)
        function.restype = ctypes.c_char_p
        return function(*(address(a) if isinstance(a, torch.Tensor) else a for a in arguments)).decode()


def address(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


host_module = host_extension.host_module  # a fixture


@pytest.fixture(scope="module")
def probes():
    host_extension.skip_without_compiler()
    return Probes(host_extension.compile_library("probes", [PROBES]))


def triple(*numbers):
    return torch.tensor(numbers).to(torch.int32)  # wraps what only an unsigned number holds


def reversed_by(probes, synchronised, blocks=3, threads=256):
    data = torch.arange(blocks * threads, dtype=torch.float32).view(blocks, threads)
    assert probes("reverse", data, blocks, threads, synchronised) == "no error"
    return data


@pytest.mark.parametrize("kind, seed, threads", [("forward", 0, 31), ("reversed", 0, 1024), ("shuffled", 1, 1000)])
def test_what_threads_wrote_before_a_barrier_is_there_after_it(probes, kind, seed, threads):
    with order(probes.library, threads=kind, seed=seed):
        data = reversed_by(probes, True, threads=threads)
    assert torch.equal(data, torch.arange(3.0 * threads).view(3, threads).flip(1))


def test_a_missing_barrier_changes_the_result_with_the_order(probes):
    results = []
    for kind, seed in ORDERS:
        with order(probes.library, threads=kind, seed=seed):
            results.append(reversed_by(probes, False))
    assert all(result.isnan().any() for result in results)  # read before it was written
    assert len({tuple(result.isnan().flatten().tolist()) for result in results}) == len(ORDERS)


def test_thousands_of_barriers_keep_threads_in_step(probes):
    out = torch.zeros(256, dtype=torch.int32)
    with order(probes.library, threads="shuffled"):
        assert probes("rounds", out, 256, 2000) == "no error"
    assert torch.equal(out, (torch.arange(256, dtype=torch.int32) + 2000) % 256)


def test_threads_that_returned_make_a_barrier_divergent(probes):
    said = probes("early_return")
    assert re.fullmatch(
        r"Divergent threads: 32 at __syncthreads in .*probes\.cu:\d+, 16 returned; "
        r"in block \(0, 0, 0\) of a grid of \(1, 2, 1\)",
        said,
    ), said


def test_the_block_that_diverges_is_named(probes):
    with order(probes.library, blocks="reversed"):
        assert "in block (0, 1, 0) of a grid of (1, 2, 1)" in probes("early_return")


def test_two_barriers_in_two_branches_are_divergent(probes):
    said = probes("two_barriers")
    lines = re.findall(r"__syncthreads in \S+?:(\d+)", said)
    assert said.startswith("Divergent threads: ") and len(set(lines)) == 2, said


def test_lanes_that_wait_for_different_things_are_divergent(probes):
    said = probes("two_masks")
    assert said.startswith("Divergent threads: ") and "__syncwarp with mask 0x" in said, said


def test_lanes_in_different_warp_functions_are_divergent(probes):
    said = probes("two_functions", torch.zeros(32, dtype=torch.int32))
    assert "1 at __any_sync" in said and "at __ballot_sync" in said


def test_a_lane_outside_its_own_mask_is_refused(probes):
    assert probes("foreign_mask").startswith("Lane 1 is not in its own mask at __syncwarp with mask 0x1;")


@pytest.mark.parametrize("name, dtype", [("float", torch.float32), ("double", torch.float64), ("int", torch.int32)])
def test_shuffles_move_and_sum_a_warps_values(probes, name, dtype):
    out = torch.zeros(96, 5, dtype=dtype)
    with order(probes.library, threads="shuffled", seed=1):
        assert probes(f"warp_{name}", out, 96) == "no error"
    thread = torch.arange(96).to(dtype)
    first = thread // 32 * 32
    total = 32 * first + 496  # the sum of 0 to 31 is 496
    assert torch.equal(out[::32, 0], total[::32])
    assert torch.equal(out[:, 1], total)
    assert torch.equal(out[:, 2], first + 3)
    assert torch.equal(out[:, 3], thread // 8 * 8 + 1)
    assert torch.equal(out[:, 4], torch.where(thread % 8 < 6, thread + 2, thread))


def test_votes_gather_the_lanes_of_their_mask(probes):
    out = torch.zeros(64, 3, dtype=torch.int32)
    with order(probes.library, threads="shuffled", seed=1):
        assert probes("vote", out, 64) == "no error"
    thread = torch.arange(64)
    assert set(out[:, 0].tolist()) == {sum(1 << lane for lane in range(0, 32, 3))}
    assert torch.equal(out[:, 1], (thread >= 32).int())
    assert torch.equal(out[:, 2], torch.where(thread % 32 < 16, 0xFFFF, -(1 << 31)).int())


def test_lanes_that_returned_are_not_waited_for_and_give_nan(probes):
    out = torch.zeros(32)
    assert probes("returned_lanes", out) == "no error"
    assert torch.equal(out[:16:2], torch.ones(8)) and out[16::2].isnan().all()


@pytest.mark.parametrize("name, dtype, offset", [("float", torch.float32, 64), ("double", torch.float64, 0)])
def test_shared_memory_that_nobody_wrote_reads_nan(probes, name, dtype, offset):
    reversed_by(probes, True)  # leaves numbers behind
    out = torch.zeros(32, dtype=dtype)
    assert probes(f"unwritten_{name}", out, 64 * out.itemsize, offset) == "no error"
    assert out.isnan().all()


@pytest.mark.parametrize("shared, byte", [(0, 0), (1024, 150_000)])
def test_a_write_beyond_shared_memory_raises_and_says_where(probes, shared, byte):
    assert probes("overrun", shared, byte, 2) == (
        f"Shared memory was written at byte {byte}, beyond dynamicSmemBytes={shared}; "
        "in block (2, 0, 0) of a grid of (4, 1, 1)"
    )


def test_a_write_to_the_last_byte_of_shared_memory_is_fine(probes):
    assert probes("overrun", 1024, 1023, 2) == "no error"


def test_shared_memory_above_48_kib_has_to_be_asked_for(probes):
    assert probes("large", 48 * 1024) == "no error"
    assert probes("large", 48 * 1024 + 1) == "invalid argument"
    assert probes("allow", 100_000) == "no error"
    assert probes("large", 100_000) == "no error"
    assert probes("large", 100_001) == "invalid argument"
    assert probes("nothing", triple(1, 1, 1), triple(1, 1, 1), 100_000) == "invalid argument"  # another kernel
    assert probes("allow", 227 * 1024) == "no error"
    assert probes("large", 227 * 1024) == "no error"
    assert probes("allow", 227 * 1024 + 1) == "invalid argument"
    assert probes("allow", -1) == "invalid argument"


@pytest.mark.parametrize(
    "grid, block, accepted",
    [
        ((70000, 1, 1), (1, 1, 1), True),
        ((1, 1, 1), (4, 4, 64), True),
        ((1, 1, 1), (32, 33, 1), False),
        ((0, 1, 1), (1, 1, 1), False),
        ((1, 1, 65536), (1, 1, 1), False),
    ],
)
def test_only_launches_that_a_gpu_takes_are_accepted(probes, grid, block, accepted):
    said = probes("nothing", triple(*grid), triple(*block), 0)
    assert said == ("no error" if accepted else "invalid configuration argument")


def test_every_thread_of_every_block_runs_once(probes):
    grid, block = (3, 2, 4), (5, 3, 7)
    out = torch.zeros(*grid[::-1], *block[::-1], 7, dtype=torch.int32)
    with order(probes.library, threads="shuffled", blocks="shuffled", seed=1):
        assert probes("visit", out, triple(*grid), triple(*block)) == "no error"
    bz, by, bx, tz, ty, tx = torch.meshgrid(*map(torch.arange, out.shape[:-1]), indexing="ij")
    assert torch.equal(out, torch.stack([bx, by, bz, tx, ty, tz, torch.ones_like(bx)], -1).int())


def sequence(probes, grid, block, **kinds):
    count, blocks, threads = (torch.zeros(size, dtype=torch.int32) for size in (1, grid * block, grid * block))
    with order(probes.library, **kinds):
        assert probes("sequence", count, blocks, threads, grid, block) == "no error"
    return blocks.tolist(), threads.tolist()


def test_threads_and_blocks_run_in_the_chosen_order(probes):
    ascending, descending = list(range(40)), list(range(39, -1, -1))
    assert sequence(probes, 1, 40)[1] == ascending
    assert sequence(probes, 1, 40, threads="reversed", blocks="reversed")[1] == descending
    assert sequence(probes, 40, 1)[0] == ascending
    assert sequence(probes, 40, 1, blocks="reversed")[0] == descending
    for grid, block, kind, which in ((1, 40, "threads", 1), (40, 1, "blocks", 0)):
        first, again, other = (sequence(probes, grid, block, **{kind: "shuffled"}, seed=s)[which] for s in (1, 1, 2))
        assert first == again != other
        assert sorted(first) == sorted(other) == ascending and first != ascending
    assert sequence(probes, 1, 40)[1] == ascending  # the order ends with its context


def test_atomic_max_keeps_the_largest_and_gives_what_was_there(probes):
    largest, bits = torch.tensor([-1000], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    seen = torch.zeros(64, dtype=torch.int32)
    with order(probes.library, blocks="shuffled", seed=1):
        assert probes("maximum", largest, bits, seen) == "no error"
    assert largest == -37 and bits.view(torch.float32) == 63
    assert seen.min() == -1000 and seen.max() <= -37


def test_an_exception_in_a_thread_comes_out_of_the_launch(probes):
    assert probes("throwing") == "thrown by thread 5"


def test_launches_that_failed_leave_nothing_behind(probes):
    def mappings():
        with open("/proc/self/maps") as stream:
            return len(stream.readlines())

    expected = reversed_by(probes, True, threads=1024)  # as many stacks as there ever are
    bad = ("throwing", "early_return", "two_barriers", "barrier_and_warp", "foreign_mask")
    for name in bad:
        assert probes(name) != "no error"
    before = mappings()
    for _ in range(50):
        for name in bad:
            assert probes(name) != "no error"
            assert torch.equal(reversed_by(probes, True, threads=1024), expected)
    assert mappings() <= before + 8  # memory of other things; a thread's stack and its guard are two


def test_memset_fills_exactly_its_bytes(probes):
    data = torch.zeros(16, dtype=torch.uint8)
    assert probes("clear", data, 255, 10) == "no error"
    assert data.tolist() == [255] * 10 + [0] * 6


def test_min_max_and_roots_are_cudas(probes):
    out = torch.full((9,), torch.nan)
    assert probes("arithmetic", out) == "no error"
    assert torch.equal(out, torch.tensor([1, 1, 1, 1, 1, 0.5, 0.25, 0.125, 2**0.5]))


def test_two_builds_of_the_extension_are_two_modules(host_module, tmp_path):
    assert host_module.architectures == "host"
    again = Path(shutil.copy(host_module.__file__, tmp_path))
    other = host_extension.load(again)
    assert other.float32.factor is not host_module.float32.factor
    assert Path(other.__file__) == again
    assert all(module not in (host_module, other) for module in sys.modules.values())


def test_a_source_that_does_not_compile_raises_what_the_compiler_said(tmp_path, monkeypatch):
    host_extension.skip_without_compiler()
    monkeypatch.setattr(host_extension, "RUNTIME", ())
    monkeypatch.setattr(host_extension, "cache_folder", lambda: tmp_path)
    source = tmp_path / "sources" / "broken.cu"
    source.parent.mkdir()
    source.write_text("int broken = missing_name;\n")
    with pytest.raises(RuntimeError, match="missing_name"):
        host_extension.compile_library("broken", [source])


def test_a_source_that_changes_while_it_is_compiled_is_not_kept(tmp_path, monkeypatch):
    host_extension.skip_without_compiler()
    monkeypatch.setattr(host_extension, "cache_folder", lambda: tmp_path)
    source = tmp_path / "sources" / "one.cu"
    source.parent.mkdir()
    source.write_text("int one = 1;\n")

    def edited(sources, flags, scratch, library):
        source.write_text("int one = 2;\n")
        return ""

    monkeypatch.setattr(host_extension, "link", edited)
    with pytest.raises(RuntimeError, match="changed while they were compiled"):
        host_extension.compile_library("one", [source])
    assert not list(tmp_path.glob("one-*"))


def test_a_changed_source_or_flag_is_another_library(tmp_path):
    host_extension.skip_without_compiler()
    source = tmp_path / "one.cu"
    source.write_text("int one = 1;\n")
    first = host_extension.fingerprint([source], ())
    assert host_extension.fingerprint([source], ()) == first
    assert host_extension.fingerprint([source], ("-DNAME",)) != first
    (tmp_path / "beside.cuh").write_text("// a header\n")
    assert host_extension.fingerprint([source], ()) != first


def test_a_cache_that_others_can_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host_extension.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = host_extension.cache_folder()
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="others can write it"):
        host_extension.cache_folder()


def test_sources_compile_without_warnings(probes, host_module):
    for library in (probes.library, Path(host_module.__file__)):
        assert (library.parent / "warnings.txt").read_text() == ""


def test_warnings_are_kept(tmp_path, monkeypatch):
    host_extension.skip_without_compiler()
    monkeypatch.setattr(host_extension, "RUNTIME", ())
    monkeypatch.setattr(host_extension, "cache_folder", lambda: tmp_path)
    source = tmp_path / "sources" / "unused.cu"
    source.parent.mkdir()
    source.write_text("static int unused() { return 0; }\n")
    library = host_extension.compile_library("unused", [source])
    assert "-Wunused-function" in (library.parent / "warnings.txt").read_text()
