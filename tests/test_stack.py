"""The stack kernel against torch.cat of the matrices that it is told the addresses of."""

import math
import os

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from prokl.backends.pointers import PointerTable
from prokl.kernels import launch
from prokl.kernels.launch import Tile
from prokl.kernels.stack import TILES, TILES_FP64, choose_tile, stack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 1), (1, 200), (5, 3), (64, 64), (70, 130), (48, 160)]
GUARD = 77.0
COUNT = 17  # matrices of a whole bucket
FEW = ("aligned rows of a wider one", "columns", "every other element of columns")  # a layout for each way to load


def layouts(m, n):
    """Name -> (matrices, strides, offset), in elements, of what a parameter or a gradient can be."""
    wide = -(-n // 16) * 16 + 16  # rows that start at multiples of 16 bytes
    return {
        "rows": (1, (m * n, n, 1), 0),
        "rows, unaligned": (1, (m * n, n, 1), 3),
        "aligned rows of a wider one": (1, (m * wide, wide, 1), 16),
        "unaligned start of aligned rows": (1, (m * wide, wide, 1), 1),
        "columns": (1, (m * n, 1, m), 0),
        "aligned columns": (1, (0, 1, -(-m // 16) * 16 + 16), 16),
        "unaligned columns": (1, (0, 1, m + 5), 7),
        "every other element": (1, (0, 2 * n + 3, 2), 5),
        "every other element of columns": (1, (0, 2, 2 * m + 1), 5),
        "stack": (3, (m * n, n, 1), 0),
        "stack of columns with gaps": (2, (m * n + 16, 1, m), 16),
    }


class Bucket:
    """Matrices (m,n) of every layout, each in an allocation of its own filled with GUARD, and two that are absent."""

    def __init__(self, m, n, dtype, names=None, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.m, self.n, self.dtype = m, n, dtype
        self.matrices, self.counts, self.buffers = [None], [1], []
        for name, (count, strides, offset) in layouts(m, n).items():
            if names is not None and name not in names:
                continue
            last = offset + sum((k - 1) * s for k, s in zip((count, m, n), strides, strict=True))
            buffer = torch.full((last + 40,), GUARD, dtype=dtype, device=DEVICE)
            view = buffer.as_strided((count, m, n), strides, offset)
            view.copy_(torch.randn((count, m, n), generator=g, dtype=torch.float64))
            self.buffers.append(buffer)
            self.matrices.append(view)
            self.counts.append(count)
        self.matrices.append(None)
        self.counts.append(2)
        self.addresses = PointerTable(sum(self.counts), DEVICE)
        self.addresses.update(self.matrices, self.counts)

    @property
    def table(self):
        return self.addresses.table

    def dense(self):
        """(B,m,n) with zeros for the absent ones."""
        empty = torch.zeros(2, self.m, self.n, dtype=self.dtype, device=DEVICE)
        pairs = zip(self.matrices, self.counts, strict=True)
        return torch.cat([empty[:count] if t is None else t for t, count in pairs])

    def given(self):
        """(B,): which matrices are there."""
        pairs = zip(self.matrices, self.counts, strict=True)
        return torch.tensor([t is not None for t, count in pairs for _ in range(count)], device=DEVICE)

    def outside(self):
        """Every element of the allocations that belongs to no matrix."""
        elements = []
        for buffer, t in zip(self.buffers, (t for t in self.matrices if t is not None), strict=True):
            inside = torch.zeros(buffer.shape, dtype=torch.bool, device=DEVICE)
            inside.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
            elements.append(buffer[~inside])
        return torch.cat(elements)


def assert_energy(energy, dense, tile=None):
    """Relative error of the sum of squares within rounding to count, in unit roundoffs u of its dtype.

    1 for each square; a tile adds along 12 levels on the GPU and at most 22 in NumPy's pairwise sum. In float64 the
    truth itself carries as much.
    Measured over SIZES and dtypes: at most 0.12 of it.
    """
    tile = tile or Tile(64, 64, 1, 4, 1)
    assert energy.dtype == (torch.float64 if dense.dtype == torch.float64 else torch.float32)
    bound = (1 + 22) * torch.finfo(energy.dtype).eps / 2 * (2 if energy.dtype == torch.float64 else 1)
    m, n = dense.shape[1:]
    squares = F.pad(dense.double().square(), (0, -n % tile.n, 0, -m % tile.m))
    truth = squares.unflatten(2, (-1, tile.n)).unflatten(1, (-1, tile.m)).sum(dim=(2, 4)).flatten(1)
    assert energy.shape == truth.shape
    assert ((energy.double() - truth).abs() <= bound * truth).all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float32,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_layout_is_stacked_as_it_is(size, dtype):
    bucket = Bucket(*size, dtype)
    negate = dtype in (torch.bfloat16, torch.float64)
    G, energy = stack(bucket.table, *size, dtype=dtype, negate=negate)
    assert G.dtype == dtype and G.is_contiguous()
    assert torch.equal(G, -bucket.dense() if negate else bucket.dense())
    assert_energy(energy, bucket.dense(), choose_tile(dtype))
    assert (bucket.outside() == GUARD).all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tile", [*TILES, *TILES_FP64, Tile(16, 32, 1, 4, 1), Tile(128, 16, 1, 4, 1)], ids=str)
def test_every_tile(tile):
    bucket = Bucket(70, 130, torch.float64, FEW)
    G, energy = stack(bucket.table, 70, 130, dtype=torch.float64, tile=tile)
    assert torch.equal(G, bucket.dense())
    assert_energy(energy, bucket.dense(), tile)


def test_the_matrices_are_not_written():
    bucket = Bucket(37, 66, torch.float32)
    before = [buffer.clone() for buffer in bucket.buffers]
    stack(bucket.table, 37, 66, dtype=torch.float32, negate=True)
    assert all(torch.equal(x, y) for x, y in zip(bucket.buffers, before, strict=True))


def test_an_expanded_gradient():
    one = torch.full((), 3.0, device=DEVICE)
    row = torch.arange(20.0, device=DEVICE)
    matrices = [one.expand(1, 9, 20), row.expand(2, 9, 20), row[:9, None].expand(1, 9, 20)]
    addresses = PointerTable(4, DEVICE)
    addresses.update(matrices, [1, 2, 1])
    G, _ = stack(addresses.table, 9, 20, dtype=torch.float32)
    assert torch.equal(G, torch.cat(matrices))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_own_norm_only(bad):
    bucket = Bucket(40, 90, torch.float32)
    bucket.matrices[4][0, 39, 89] = bad
    G, energy = stack(bucket.table, 40, 90, dtype=torch.float32)
    assert torch.equal(G.nan_to_num(nan=5.0), bucket.dense().nan_to_num(nan=5.0))
    assert energy.isfinite().all(dim=1).tolist() == [b != 4 for b in range(G.shape[0])]


def test_squares_of_half_precision_do_not_overflow():
    t = torch.full((1, 8, 8), 6e4, dtype=torch.float16, device=DEVICE)
    addresses = PointerTable(1, DEVICE)
    addresses.update([t], [1])
    assert_energy(stack(addresses.table, 8, 8, dtype=torch.float16)[1], t)


def test_a_part_of_a_table_and_a_table_with_gaps():
    bucket = Bucket(5, 40, torch.float32)
    wide = bucket.table.repeat_interleave(2, dim=1)
    for part, rows in ((bucket.table[:, 2:7], slice(2, 7)), (wide[:, 1::2], slice(None)), (bucket.table[:, 3:4], [3])):
        G, _ = stack(part, 5, 40, dtype=torch.float32)
        assert torch.equal(G, bucket.dense()[rows])


def test_offsets_beyond_32_bits():
    stride = 2**30 + 8  # the third row starts at element 2^31 + 16
    base = torch.empty(2 * stride + 16, dtype=torch.float16, device=DEVICE)  # virtual memory: few pages are touched
    values = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    rows = base.as_strided((1, 3, 5), (0, stride, 1)).copy_(values)
    addresses = PointerTable(1, DEVICE)
    addresses.update([rows], [1])
    assert torch.equal(stack(addresses.table, 3, 5, dtype=torch.float16)[0], values)
    addresses.update([rows.mT], [1])
    assert torch.equal(stack(addresses.table, 5, 3, dtype=torch.float16)[0], values.mT)


def test_no_matrices_start_no_kernel(monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    G, energy = stack(PointerTable(0, DEVICE).table, 5, 9, dtype=torch.bfloat16)
    assert G.shape == (0, 5, 9) and G.dtype == torch.bfloat16 and energy.shape == (0, 1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"addresses": torch.zeros(3, dtype=torch.int64)}, r"^addresses has shape \(3,\); must be \(3, B\)"),
        ({"addresses": torch.zeros((2, 4), dtype=torch.int64)}, r"^addresses has shape \(2, 4\); must be \(3, 4\)"),
        ({"addresses": torch.zeros((3, 4), dtype=torch.int32)}, r"^addresses has dtype torch.int32"),
        ({"addresses": torch.zeros((3, 4), dtype=torch.int64, device="meta")}, r"^addresses is on meta"),
        ({"m": 0}, r"^Invalid m=0, n=9: must be at least 1"),
        ({"n": -1}, r"^Invalid m=5, n=-1: must be at least 1"),
        ({"dtype": torch.int32}, r"^Invalid dtype=torch.int32: must be one of"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    table = torch.zeros((3, 4), dtype=torch.int64, device=DEVICE)
    arguments = {"addresses": table, "m": 5, "n": 9, "dtype": torch.float32} | change
    with pytest.raises(ValueError, match=message):
        stack(**arguments)


@pytest.mark.gpu
def test_a_captured_graph_follows_matrices_that_move():
    addresses = PointerTable(1, DEVICE)
    first, second = torch.randn(2, 1, 70, 130, device=DEVICE)
    addresses.update([first], [1])
    stack(addresses.table, 70, 130, dtype=torch.float32)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        G, _ = stack(addresses.table, 70, 130, dtype=torch.float32)
    for t in (second, second.mT.contiguous().mT, first):
        addresses.update([t], [1])
        graph.replay()
        assert torch.equal(G, t)
