"""The store kernel against PyTorch's form of it, bit for bit."""

import math

import pytest
import torch

from prokl.backends.io import Slot, TorchIO
from prokl.kernels import launch
from prokl.kernels.store import TILE, store
from tests.inputs import same_bits
from tests.kernel_cases import DEVICE

GUARD = 77.0
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# A scalar, vectors, matrices of less and of more than a program's elements, one of exactly as many.
SIZES = [(), (1,), (5,), (7, 9), (TILE // 64, 64), (70, 67)]


def numbers(*shape, dtype, seed=0):
    """Return numbers of every size, so that conversions round, and become subnormal; a NaN, an infinity and a -0.0."""
    g = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=g, dtype=torch.float64) * 10 ** (4 * torch.randn(shape, generator=g)).clamp(-9, 4)
    odd = torch.tensor([math.nan, math.inf, -0.0], dtype=torch.float64)[: t.numel() - 1]
    t.view(-1)[1 : 1 + len(odd)] = odd
    return t.to(dtype).to(DEVICE)


def masks_of(B):
    """Two masks that differ, and leave some matrices to both and to neither."""
    b = torch.arange(B, device=DEVICE)
    return b % 2 == 0, b % 3 != 1


def kept(B, size, dtype, gap):
    """A destination (B, ...) with room between its matrices, and the memory that it lies in."""
    elements = math.prod(size)
    memory = torch.full((B * (elements + gap) + 1,), GUARD, dtype=dtype, device=DEVICE)
    inner = torch.empty(size).stride()
    return memory.as_strided((B, *size), (elements + gap, *inner)), memory


def assert_stored(values, masks, dtypes=(torch.float32,), gap=0):
    """The kernel leaves in all memory what PyTorch leaves there; ``masks`` are those of every value."""
    slots, memory = [], []
    for i, (value, own) in enumerate(zip(values, masks, strict=True)):
        to, whole = kept(len(value), value.shape[1:], dtypes[i % len(dtypes)], gap)
        slots.append(Slot(to, value, tuple(own)))
        memory.append(whole)
    before = [t.clone() for t in memory]
    TorchIO.store(slots)
    wanted = [t.clone() for t in memory]
    for t, old in zip(memory, before, strict=True):
        t.copy_(old)
    store(slots)
    for found, expected in zip(memory, wanted, strict=True):
        assert same_bits(found.nan_to_num(nan=5.0), expected.nan_to_num(nan=5.0))
        assert torch.equal(found.isnan(), expected.isnan())
    assert not all(map(same_bits, before, wanted))


@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("masks", [0, 1, 2])
def test_every_size_is_stored_where_the_masks_say_so(masks, gap, B):
    values = [numbers(B, *size, dtype=torch.float32, seed=i) for i, size in enumerate(SIZES)]
    assert_stored(values, [masks_of(B)[:masks]] * len(values), gap=gap)


@pytest.mark.parametrize("count", [1, 2, 11, 20])
def test_any_slots_take_one_launch_and_convert_as_pytorch_does(count, monkeypatch):
    launches, start = [], launch.start
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: launches.append(args) or start(*args, **kwargs))
    masks = [
        torch.tensor(own, device=DEVICE) for own in ([True, False, True], [True, True, False], [False, True, True])
    ]
    several = SIZES[2:]
    values = [numbers(3, *several[i % 4], dtype=DTYPES[(i + i // 4) % 4], seed=i) for i in range(count)]
    assert_stored(values, [(), *(masks[i % 3 :] for i in range(1, count))], DTYPES)
    assert len(launches) == 1


def test_values_of_any_strides():
    square = numbers(3, 6, 6, dtype=torch.float32)
    number, row = torch.full((), 2.0, device=DEVICE), numbers(4, dtype=torch.float32)
    values = [square.mT, square[:, ::2], number.expand(3), row.expand(3, 4), numbers(4, 6, 3, dtype=torch.float32)[1:]]
    assert_stored(values, [masks_of(3)] * len(values), gap=2)


def test_masked_and_empty_slots_are_neither_read_nor_written():
    mask = torch.tensor([True, False, False, False, True, False], device=DEVICE)[::2]
    to, nothing, value = (torch.full((3, k), x, device=DEVICE) for k, x in ((2, 0.0), (0, 0.0), (2, 1.0)))
    value[1] = math.nan
    store([Slot(nothing, nothing, (mask,)), Slot(to, value, (mask,)), Slot(value, value)])
    assert to.tolist() == [[1.0] * 2, [0.0] * 2, [1.0] * 2]
    assert value[[0, 2]].eq(1).all() and value[1].isnan().all()  # a slot may be its own value


@pytest.mark.parametrize("slots", [[], [Slot(torch.zeros(0, 3), torch.zeros(0, 3))]])
def test_nothing_to_store_starts_no_kernel(slots, monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    store([Slot(*(t.to(DEVICE) for t in slot[:2])) for slot in slots])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"to": torch.zeros(3, 5, 4).mT}, r"^slots\[1\].to has strides \(20, 1, 4\); each"),
        ({"to": torch.zeros(2, 4, 5)}, r"^slots\[1\].to has shape \(2, 4, 5\); must be \(3, 4, 5\)"),
        ({"to": torch.zeros(3, 4, 5, dtype=torch.int64)}, r"^slots\[1\].to has dtype torch.int64"),
        ({"value": torch.zeros(3, 4, 6)}, r"^slots\[1\].value has shape \(3, 4, 6\); must be \(3, 4, 5\)"),
        ({"value": torch.zeros(3, 4, 5, dtype=torch.bool)}, r"^slots\[1\].value has dtype torch.bool"),
        (
            {"masks": (torch.ones(3, dtype=torch.bool), torch.ones(3))},
            r"^slots\[1\].masks\[1\] has dtype torch.float32",
        ),
        ({"masks": (torch.ones(2, dtype=torch.bool),)}, r"^slots\[1\].masks\[0\] has shape \(2,\); must be \(3,\)"),
        ({"value": torch.zeros(3, 4, 5, device="meta")}, r"^slots\[1\].value is on meta; must be on"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(change, message):
    first = torch.zeros(3, 2, device=DEVICE)
    slot = Slot(torch.zeros(3, 4, 5), torch.zeros(3, 4, 5))._replace(**change)
    to, value = (t if t.device.type == "meta" else t.to(DEVICE) for t in slot[:2])
    with pytest.raises(ValueError, match=message):
        store([Slot(first, torch.ones(3, 2, device=DEVICE)), Slot(to, value, tuple(t.to(DEVICE) for t in slot.masks))])
    assert not first.any()


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    to = torch.zeros(2**31 + 2**20, dtype=torch.int8, device=DEVICE).view(torch.bfloat16).view(2, -1)
    wide = to.as_strided((3, 7), (2**29, 1))
    value = torch.ones(3, 7, device=DEVICE)
    store([Slot(wide, value)])
    assert torch.equal(wide.float(), value) and int(to.count_nonzero()) == 21


@pytest.mark.gpu
def test_a_captured_graph_follows_masks_and_values():
    to, value, mask = torch.zeros(3, 50, device=DEVICE), torch.ones(3, 50, device=DEVICE), masks_of(3)[0]
    slots = [Slot(to, value, (mask,))]
    store(slots)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store(slots)
    mask.fill_(True)
    value.fill_(3.0)
    graph.replay()
    assert (to == 3).all()
