"""Every kernel against its PyTorch form in float64, and what all of them owe alike; see tests/kernel_cases.py."""

import itertools
import math

import pytest
import torch
from triton._C.libtriton import ir
from triton.runtime import interpreter

from prokl.kernels import apply, launch, momentum, operands, product, project, triangle, turn, weigh
from prokl.kernels.launch import Tile
from prokl.pair import Pair
from tests.inputs import same_bits
from tests.kernel_cases import (
    ADMIT,
    BF16,
    DEVICE,
    DOUBLE,
    EVERY,
    HALF,
    PRODUCT,
    PROJECT,
    REFUSED,
    SHIFTED,
    SINGLE,
    SMALL,
    SUM_CASES,
    SYMMETRIC,
    TURN,
    TWO_SYMMETRIC,
    Sizes,
    arithmetic,
    assert_close,
    gaps,
)

GAPPED, FAR = Sizes(3, 37, 50, 19), ((3, 2**30 + 8), (18, 2**27 + 8))
"""FAR: beyond 2^31 within a tile, and at the next one."""
of_every = pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
of_sums = pytest.mark.parametrize("case", SUM_CASES, ids=lambda case: case.name)


def runs():
    """Every dtypes and every variant at ragged sizes, and every other size: each meets two others, not all of them.

    On a GPU also enough of them to fill a pipeline of loads.
    """
    for case in SUM_CASES:
        first, *others = case.sizes
        kinds = range(max(len(case.dtypes), len(case.variants)))
        yield from ((case, first, k % len(case.dtypes), k % len(case.variants)) for k in kinds)
        yield from ((case, s, k % len(case.dtypes), (k + 1) % len(case.variants)) for k, s in enumerate(others))
        if not launch.INTERPRETED:
            yield case, Sizes(4, 200, 700, 120), 0, 0


def named(value):
    return getattr(value, "name", None) or (str(value).replace(" ", "") if isinstance(value, Sizes) else None)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case, size, dtypes, variant", [*runs()], ids=named)
def test_a_kernel_is_its_form_within_derived_rounding(case, size, dtypes, variant):
    i = case.make(size, case.dtypes[dtypes], variant)
    expected = case.expected(i)
    found = case.run(**i)
    assert_close(case, found, i, expected)
    wanted = (case.stored or arithmetic)(i)
    for x in found[1:] if case.written == "M" else found[:1]:
        assert isinstance(x, Pair) or x.dtype == wanted


@pytest.mark.skipif(not launch.INTERPRETED, reason="looks into the interpreter")
@of_sums
def test_no_kernel_gives_tensor_cores_float32_whole(case, monkeypatch):
    """TF32 products have a factor in which TF32 loses nothing: one of the parts of float32, or a half of a pair."""
    seen, of_interpreter = [], interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, precision, *others):
        seen.append(precision)
        kept = any(not (x.data.astype("float32").view("int32") & 0x1FFF).any() for x in (a, b))
        assert kept or precision != ir.INPUT_PRECISION.TF32
        return of_interpreter(self, a, b, d, precision, *others)

    monkeypatch.setattr(operands, "INTERPRETED", False)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    for variant in range(len(case.variants)):
        case.run(**case.make(case.sizes[0], case.dtypes[0], variant))
    assert seen or case.name.startswith("stack")


def shapes_of_tiles():
    """Return the tiles that ship of every case; where the interpreter runs them, warps and stages make no other one."""
    for case in SUM_CASES:
        for dtype, tiles in case.tiles.items():
            shipped = {(t.m, t.n, t.k) if launch.INTERPRETED else t: t for t in tiles}
            yield from ((case, dtype, tile) for tile in shipped.values())


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case, dtype, tile", [*shapes_of_tiles()], ids=lambda x: getattr(x, "name", str(x)))
def test_every_tile_runs_whole_and_in_part_along_every_side(case, dtype, tile):
    i = case.make(case.tile_of(tile), (dtype,) * 9)
    expected = case.expected(i)
    assert_close(case, case.run(**i, tile=tile), i, expected)


@pytest.mark.parametrize("case", [case for case in SUM_CASES if case.tiles], ids=lambda case: case.name)
def test_a_tile_given_by_hand_is_the_one_that_is_launched(case, monkeypatch):
    found = []
    monkeypatch.setattr(launch, "start", lambda *args, **constants: found.append(constants))
    tile = Tile(32, 32 if case.symmetric else 16, 8, 2, 5)
    case.run(**case.make(REFUSED), tile=tile)
    (constants,) = found
    sides = {value for key, value in constants.items() if key.startswith("TILE")}
    assert 32 in sides <= {32, 16, 8} and len(sides) > 1
    assert (constants["num_warps"], constants.get("num_stages", 5)) == (2, 5)


@pytest.mark.parametrize(
    "case, dtypes, operands",
    [
        (PRODUCT, [(HALF,) * 3, (BF16, BF16, SINGLE), (HALF, BF16, HALF), (HALF, SINGLE, HALF), (HALF, HALF, DOUBLE)],
         ["fp16", "bf16", "fp32", "fp32", "fp64"]),
        (SYMMETRIC, [(HALF, SINGLE), (BF16, SINGLE), (SINGLE, SINGLE), (DOUBLE, SINGLE)],
         ["fp16", "bf16", "fp32", "fp64"]),
        (PROJECT, [(HALF,) * 3, (BF16,) * 3, (HALF, HALF, BF16), (HALF, HALF, SINGLE), (HALF, HALF, DOUBLE)],
         ["fp16", "bf16", "fp32", "fp32", "fp64"]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)  # fmt: skip
def test_half_operands_are_multiplied_in_half(case, dtypes, operands, monkeypatch):
    constants = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: constants.append(kwargs))
    for own in dtypes:
        case.run(**case.make(Sizes(1, 4, 4, 4), own, variant=None))
    # The interpreter's bfloat16 products are wrong.
    wanted = ["fp32" if name == "bf16" and launch.INTERPRETED else name for name in operands]
    assert [str(c["OPERAND"]) for c in constants] == wanted


BATCHES, SIDES, OPERANDS, EITHER = (1, 7, 48, 500), (1, 50, 64, 768, 3072), (HALF, SINGLE, DOUBLE), (True, False)
CHOICES = [
    (apply, (SIDES, SIDES, (0, 11, 16, 128), OPERANDS)),
    (momentum, (OPERANDS, EITHER)),
    (project, ((1, 16, 17, 32, 33, 64, 300), (SINGLE, DOUBLE), EITHER, EITHER)),
    (product, (BATCHES, SIDES, SIDES, OPERANDS, EITHER)),
    (turn, ((1, 32, 33, 128), OPERANDS)),
    (weigh, ((1, 32, 33, 128), OPERANDS)),
    (triangle, (BATCHES, SIDES, OPERANDS, EITHER, EITHER, EITHER)),
]


@pytest.mark.parametrize("module, arguments", CHOICES, ids=lambda x: getattr(x, "__name__", ""))
def test_every_tile_that_ships_is_chosen_and_no_other(module, arguments):
    shipped = {tile for name, tiles in vars(module).items() if name.startswith("TILES") for tile in tiles}
    assert {module.choose_tile(*given) for given in itertools.product(*arguments)} == shipped


def transposed(t):
    return t.mT.contiguous().mT if t.ndim == 3 else gaps(t)


def permuted(t):
    return t.permute(1, 2, 0).contiguous().permute(2, 0, 1) if t.ndim == 3 else gaps(t)


def of_one(t):
    """One matrix, and one scale, that serve the whole batch."""
    return t[:1].expand_as(t)


def whole_tensors(i):
    return [k for k, t in i.items() if isinstance(t, torch.Tensor)]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    "case", [c for c in EVERY if whole_tensors(c.make(REFUSED, variant=None))], ids=lambda c: c.name
)
def test_strides_do_not_matter(case):
    """All tensors, then one alone, whose strides are all its own then: none may be read with another's."""
    names = whole_tensors(case.make(GAPPED, variant=None))
    usual = case.run(**case.make(GAPPED, variant=None))
    alone = [[name] for name in names] if len(names) > 1 else []
    for change, groups in ((gaps, [names, *alone]), (transposed, [names]), (permuted, [names])):
        for which in groups:
            i = case.make(GAPPED, variant=None)
            expected = case.expected(i)
            i |= {k: change(i[k]) for k in which}
            assert not any(i[k].is_contiguous() for k in which)
            found = case.run(**i)
            assert_close(case, found, i, expected)
            # Another order of strides may be another fusion of operations on a GPU.
            if launch.INTERPRETED:
                assert all(map(same, found, usual))
    i = case.make(GAPPED, variant=None)
    i |= {k: of_one(i[k]).contiguous() if k == case.written else of_one(i[k]) for k in names}
    expected = case.expected(i)
    assert_close(case, case.run(**i), i, expected)


def same(x, y):
    return torch.equal(x.both, y.both) if isinstance(x, Pair) else torch.equal(x, y)


def far_ones():
    """Every tensor and every dimension, at the next tile where there is a step from one to it."""
    for case in SUM_CASES:
        if case.tiles and case not in (SHIFTED, TWO_SYMMETRIC, TURN):  # another's kernel, or contiguous tensors
            for name, sides in case.given().items():
                if isinstance(sides, str) and "pair" not in sides:
                    dims = range(1 + len(sides.strip(".+?")))
                    yield from ((case, name, dim, *far) for dim in dims for far in FAR[: 1 + (dim > 0)])


@pytest.mark.parametrize("case, name, dim, side, stride", [*far_ones()], ids=lambda x: getattr(x, "name", str(x)))
def test_offsets_beyond_32_bits(case, name, dim, side, stride):
    size = Sizes(3, side, side, side)
    of_tensors = [*(k for k, v in case.inputs.items() if isinstance(v, str)), "C"]
    paired = any("pair" in str(v) for v in case.inputs.values())
    i = case.make(size, [BF16 if paired else HALF if k == name else SINGLE for k in of_tensors], variant=None)
    expected = case.expected(i)
    strides = [side] * (i[name].ndim - 2) + [1] * (i[name].ndim > 1)
    strides.insert(dim, stride)
    base = torch.empty(2**31 + 2**28, device=DEVICE, dtype=i[name].dtype)  # virtual memory: few pages are touched
    i[name] = base.as_strided(i[name].shape, strides).copy_(i[name])
    assert_close(case, case.run(**i, tile=SMALL), i, expected)
    if DEVICE == "cuda":  # up to ten gigabytes, which the processes beside this one need, too
        del i, base
        torch.cuda.empty_cache()


@of_every
def test_only_what_is_to_be_written_is(case):
    i = case.make(GAPPED, variant=None)
    after = memory_of(i)
    before = {k: t.clone() for k, t in after.items()}
    case.run(**i)
    written = [k for k, t in before.items() if not same_bits(t, after[k])]
    assert written == ([case.written] if case.written else [])


def memory_of(i):
    return {k: t.both if isinstance(t, Pair) else t for k, t in i.items() if isinstance(t, torch.Tensor | Pair)}


@of_every
def test_no_matrices_start_no_kernel(case, monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    size = Sizes(0, 5, 9, 4)
    i, one = case.make(size), case.make(REFUSED)
    shapes = [x.shape for x, _ in case.expected(one)] if case is not ADMIT else []
    found = case.run(**i)
    assert all(len(x.hi if isinstance(x, Pair) else x) == 0 for x in found)
    assert not shapes or [tuple(x.shape[1:]) for x in found] == [tuple(s[1:]) for s in shapes]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # NumPy's
@of_sums
def test_non_finite_values_show_where_the_form_has_them(case):
    names = whole_tensors(case.make(GAPPED, variant=None))
    usual = case.run(**case.make(GAPPED, variant=None))
    for b, name in enumerate(k for k in names if k not in ("active", "bounded", "energies")):
        i = case.make(GAPPED, variant=None)
        i[name][(2 * (b % 2), *(size - 1 for size in i[name].shape[1:]))] = math.inf if b % 2 else math.nan
        wanted = case.exact(i)[0]
        for x, y, value in zip(case.run(**i), usual, wanted, strict=True):
            x, y = (t.whole() if isinstance(t, Pair) else t for t in (x, y))
            assert torch.equal(x.isfinite(), value.isfinite())
            assert torch.equal(x[value.isfinite()], y[value.isfinite()])
        assert not all(value.isfinite().all() for value in wanted)


@of_every
def test_without_the_interpreter_tensors_of_a_cpu_are_refused(case, monkeypatch):
    monkeypatch.setattr(launch, "DEVICES", ())
    with pytest.raises(ValueError, match=r"must be on one of \(\): use the PyTorch form elsewhere"):
        case.run(**case.make(REFUSED))


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_wrong_tensor_raises_with_its_name(case):
    i = case.make(REFUSED, variant=None)
    for name in (k for k in whole_tensors(i) if k != "W"):  # of which a kernel has the address
        t, flags = i[name], i[name].dtype == torch.bool
        other = {"shape": t[..., None], "dtype": t.to(SINGLE if flags else torch.int64), "is on": t.to("meta")}
        for what, wrong in other.items():
            with pytest.raises(ValueError, match=rf"^{name} (has )?{what}"):
                case.run(**(i | {name: wrong}))
