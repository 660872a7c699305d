"""The table of addresses: what it holds, that it is written only when something moved, and that it stays in place."""

from unittest.mock import patch

import pytest
import torch

from prokl.algorithm.shapes import MatrixShape
from prokl.backends.io import Layout, Member, Rates
from prokl.backends.pointers import PointerTable, RateTable
from prokl.backends.rounding import Rounding
from prokl.backends.triton_ops import TritonIO

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def expected(matrices, counts):
    """The table, read off every single matrix."""
    columns = []
    for t, count in zip(matrices, counts, strict=True):
        columns += [(0, 0, 0)] * count if t is None else [(x.data_ptr(), *x.stride()) for x in t]
    return torch.tensor(columns, dtype=torch.int64).T


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_the_address_table_is_rewritten_only_after_a_move(dtype):
    base, several = torch.zeros(400, dtype=dtype, device=DEVICE), torch.zeros(6, 5, 3, dtype=dtype, device=DEVICE)[::2]
    first = base.as_strided((1, 4, 4), (0, 8, 2))
    addresses = PointerTable(4, DEVICE)
    table, pointer = addresses.table, addresses.table.data_ptr()
    assert (table.dtype, table.device.type) == (torch.int64, DEVICE) and not table.any()
    held = torch.zeros_like(table, device="cpu")
    for matrices, counts in (
        ([first, several], [1, 3]),
        ([first[:], several[:]], (1, 3)),
        ([base.as_strided((1, 4, 4), (0, 8, 2), 1), several], [1, 3]),
        ([base.as_strided((1, 4, 4), (0, 16, 2)), several], [1, 3]),
        ([base.as_strided((1, 4, 4), (0, 8, 1)), several], [1, 3]),
        ([first, several.mT], [1, 3]),
        ([None, several], [1, 3]),
        ([None, several], [1, 3]),
        ([first, several[:2], None], [1, 2, 1]),
        ([first, several[:1], None], [1, 1, 2]),
        ([first.clone(), several[:1], None], [1, 1, 2]),
    ):
        before, wanted = table._version, expected(matrices, counts)
        addresses.update(matrices, counts)
        assert addresses.table is table and table.data_ptr() == pointer
        assert torch.equal(table.cpu(), wanted)
        assert table._version - before == (not torch.equal(wanted, held))
        held = wanted


def test_what_had_to_be_copied_is_not_followed():
    tensors = [torch.zeros(4, 6, device=DEVICE), torch.zeros(4, 6, device=DEVICE)]
    matrices = [t[None] for t in tensors]
    addresses = PointerTable(2, DEVICE)
    for copied in (matrices[1].clone(), None):
        addresses.update(matrices, [1, 1], tensors, "form")
        assert addresses.follow(tensors, "form")
        addresses.update([matrices[0], copied], [1, 1], tensors, "form")
        assert not addresses.follow(tensors, "form")


def test_rates_are_written_on_change_or_read_on_the_device(monkeypatch):
    """Tensors in float32 on a CPU stand for those on the device."""
    on_device = lambda value: isinstance(value, torch.Tensor) and value.dtype == torch.float32  # noqa: E731
    monkeypatch.setattr("prokl.backends.pointers._on_device", on_device)
    rates, shared, own = RateTable(6, DEVICE), torch.tensor(0.5, device=DEVICE), torch.tensor([0.25], device=DEVICE)
    table, pointer, written = rates.table, rates.table.data_ptr(), []
    on_host = torch.tensor(0.1, dtype=torch.float64)
    for values, ends in (
        ([0.5], [6]),
        ([0.5, 0.5], [2, 6]),
        ([0.1, 1e-9, 0.3], [1, 3, 6]),
        ([0.1, 1e-9, 0.3], [1, 4, 6]),
        ([on_host, on_host[None] / 3], [3, 6]),
        ([shared, shared, 0.125], [1, 4, 6]),
        ([0.0, own, own], [1, 4, 6]),
        ([shared, 0.125, own], [1, 4, 6]),
        ([shared] * 3, [1, 4, 6]),
        ([own, 0.0, 0.0], [1, 4, 6]),
        ([0.0], [6]),
    ):
        for _ in range(2):
            shared.mul_(0.5)
            own.mul_(0.5)
            before = table._version
            rates.update(values, ends)
            written.append(table._version - before)
            runs = zip(values, [0, *ends], ends, strict=False)
            held = [float(value) for value, start, end in runs for _ in range(start, end)]
            assert rates.table is table and table.data_ptr() == pointer and table.tolist() == held
    assert written[:10] == [1, 0] * 5 and written[-2:] == [1, 0]


def oriented(gradients, shapes):
    """The gradients as the kernels read them, in the weights' dtype, and how many matrices each has."""
    views = [
        None if g is None else shape.oriented(g.to(torch.float32)) for g, shape in zip(gradients, shapes, strict=True)
    ]
    return views, [shape.count for shape in shapes]


def test_gradients_are_found_however_they_lie():
    sizes, device = [(4, 6), (6, 4), (3, 4, 6), (8, 6), (8, 6)], torch.device(DEVICE)
    shapes = [MatrixShape.of(torch.empty(size)) for size in sizes[:3]]
    shapes += MatrixShape.of(torch.empty(8, 6)).pieces(2)
    weights = [torch.nn.Parameter(torch.zeros(size, device=device)) for size in sizes[:4]]
    weights.append(weights[3])  # two pieces of it
    rows = [range(0, 1), range(1, 2), range(2, 5), range(5, 6), range(6, 7)]
    members = [Member(p, "", shape, own) for p, shape, own in zip(weights, shapes, rows, strict=True)]
    io = TritonIO(members, Layout(7, 4, 6, torch.float32, torch.float32, device), Rounding("plain", [], []))
    others = {
        "turned": lambda: torch.zeros(6, 4, device=device).T,
        "sparse in memory": lambda: torch.zeros(4, 12, device=device)[:, ::2],
        "missing": lambda: None,
    }
    kept, table = [], io.gradient_table
    with patch.object(table, "update", wraps=table.update) as updated:
        for other in (None, None, *others.values(), *others.values(), None, None):
            for p in weights:
                p.grad = torch.zeros_like(p)
            if other is not None:
                weights[0].grad = other()
            found = [p.grad for p in weights]
            kept += found  # so that the next ones lie elsewhere
            io.locate([Rates(0.02, 0.1, range(5))])
            assert torch.equal(table.table.cpu(), expected(*oriented(found, shapes)))
            io.release()
    assert updated.call_count == 8  # the second and the last step only followed
