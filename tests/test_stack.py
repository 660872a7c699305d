"""The stack kernel against torch.cat of matrices of every layout, beyond what tests/test_kernels.py asks of it."""

import pytest
import torch

from prokl.backends.pointers import PointerTable
from prokl.kernels.stack import stack
from tests.kernel_cases import DEVICE, STACK, assert_close

SIZES = [(1, 1), (1, 200), (5, 3), (64, 64), (48, 160)]
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


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(  # every size, and every dtype at the ragged one
    "size, dtype",
    [((70, 130), dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float64)]
    + [(size, torch.float32 if i % 2 else torch.bfloat16) for i, size in enumerate(SIZES)],
    ids=str,
)
def test_every_layout_is_stacked_as_it_is_and_nothing_is_written(size, dtype):
    bucket = Bucket(*size, dtype)
    before = [buffer.clone() for buffer in bucket.buffers]
    negate = dtype in (torch.bfloat16, torch.float64)
    G, energy = stack(bucket.table, *size, dtype=dtype, negate=negate)
    assert G.dtype == dtype and G.is_contiguous()
    assert torch.equal(G, -bucket.dense() if negate else bucket.dense())
    assert_close(STACK, [G, energy.sum(dim=1)], {"W": bucket.dense(), "negate": negate})
    assert all(map(torch.equal, bucket.buffers, before))


def test_squares_of_half_precision_do_not_overflow():
    t = torch.full((1, 8, 8), 6e4, dtype=torch.float16, device=DEVICE)
    assert_close(STACK, STACK.run(W=t), {"W": t})


def test_a_part_of_a_table_and_a_table_with_gaps():
    bucket = Bucket(5, 40, torch.float32)
    wide = bucket.table.repeat_interleave(2, dim=1)
    for part, rows in ((bucket.table[:, 2:7], slice(2, 7)), (wide[:, 1::2], slice(None)), (bucket.table[:, 3:4], [3])):
        G, _ = stack(part, 5, 40, dtype=torch.float32)
        assert torch.equal(G, bucket.dense()[rows])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"addresses": torch.zeros((2, 4), dtype=torch.int64)}, r"^addresses has shape \(2, 4\); must be \(3, 4\)"),
        ({"addresses": torch.zeros((3, 4), dtype=torch.int32)}, r"^addresses has dtype torch.int32"),
        ({"addresses": torch.zeros((3, 4), dtype=torch.int64, device="meta")}, r"^addresses is on meta"),
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
