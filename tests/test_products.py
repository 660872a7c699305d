"""The kernels of products, of symmetric ones and of pairs, beyond what tests/test_kernels.py asks of every kernel.

A pair's halves must be PyTorch's bit for bit: what training pays for balanced products is studied there.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import prokl
from bench.micro.case import Sizes
from prokl.kernels import launch, operands
from prokl.kernels.momentum import momentum
from prokl.kernels.operands import aligned
from prokl.kernels.product import TF32, product, product_with_energies
from prokl.kernels.split import split, split_two
from prokl.kernels.triangle import lower_tile, settle_row
from prokl.kernels.weigh import weigh
from prokl.pair import Pair, parts
from tests import tensor_cores
from tests.inputs import normal
from tests.kernel_cases import (
    BF16,
    DEVICE,
    DOUBLE,
    HALF,
    PAIRED_MOMENTUM,
    PAIRED_PRODUCT,
    PRODUCT,
    SINGLE,
    SMALL,
    SYMMETRIC,
    WEIGH,
    assert_close,
    gaps,
)


@pytest.mark.skipif(not launch.INTERPRETED, reason="looks into the interpreter")
def test_float32_takes_three_products_of_tf32_parts(monkeypatch):
    monkeypatch.setattr(operands, "INTERPRETED", False)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", tensor_cores.dot)
    A, B = normal(2, 20, 40, seed=1), normal(2, 40, 33, seed=2)
    assert torch.equal(product(A, B, tile=TF32), tensor_cores.product(A, B, depth=TF32.k))


BOTH = pytest.mark.parametrize("case", [PRODUCT, SYMMETRIC], ids=lambda case: case.name)


ORDERED = [(PRODUCT, 19, 3), (PRODUCT, 8, 2), (PRODUCT, 3, 9), (PRODUCT, 1, 5), (PRODUCT, 17, 1)]
ORDERED += [(SYMMETRIC, rows, 1) for rows in (1, 2, 5, 9)]


@pytest.mark.parametrize("case, rows, columns", ORDERED, ids=lambda x: getattr(x, "name", str(x)))
def test_grouped_and_triangular_orders_visit_every_tile_once(case, rows, columns):
    i = case.make(Sizes(2, 16 * rows - 3, 5, 16 * columns - 7))
    assert_close(case, case.run(**i, tile=SMALL), i)


@BOTH
@pytest.mark.parametrize("out", [HALF, BF16, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("operands", [HALF, SINGLE, DOUBLE], ids=str)
def test_a_result_is_rounded_once_to_the_dtype_asked_for(case, operands, out):
    dtypes = [*[operands] * (len(case.dtypes[0]) - 1), SINGLE]
    i = case.make(Sizes(2, 33, 40, 50), dtypes, variant=2)
    found = case.run(**i, out_dtype=out)
    assert found[0].dtype == out
    assert_close(case, found, i)


@BOTH
def test_a_zero_beta_leaves_the_addend_unread(case):
    i = case.make(Sizes(2, 20, 24, 40), variant=2)
    i["C"][0] = torch.nan
    without = case.run(**{k: t for k, t in i.items() if k not in ("C", "beta")})
    assert torch.equal(case.run(**(i | {"beta": 0}))[0], without[0])


def test_a_symmetric_product_times_zero_is_zero():
    i = SYMMETRIC.make(Sizes(2, 20, 24, 1), variant=3)
    i["alpha"][0], i["A"][0] = 0.0, torch.inf
    (D,) = SYMMETRIC.run(**i)
    assert not D[0].any() and D[1].all()


def test_aligned_is_what_triton_can_load_in_16_bytes():
    t = torch.empty(2, 32, 48, dtype=HALF)
    for view in (t, t.mT, t[:, :5], t[:1].expand(7, -1, -1), t[..., 16:], t[..., :3], t[:, :1].expand_as(t)):
        assert aligned(view)
    for view in (t[..., ::2], t[..., 1:], t.permute(2, 0, 1), torch.empty(2, 32, 47), torch.empty(2, 3, 8, dtype=HALF)):
        assert not aligned(view) and not aligned(t, view)


@triton.jit
def decode_kernel(ids_ptr, guesses_ptr, rows_ptr, columns_ptr, settled_ptr, COUNT, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, at < COUNT, 0)
    row, column = lower_tile(ids)
    tl.store(rows_ptr + at, row, at < COUNT)
    tl.store(columns_ptr + at, column, at < COUNT)
    tl.store(settled_ptr + at, settle_row(tl.load(guesses_ptr + at, at < COUNT, 0), ids), at < COUNT)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_tile_numbers_decode_up_to_32_bits(off):
    """Whatever side the guess is off to; and to every lower tile in order."""
    rows = torch.arange(65536, device=DEVICE)  # the last row begins at 2^31 - 2^15
    every = torch.tril_indices(300, 300, device=DEVICE)
    ends = torch.cat([torch.stack((rows, columns)) for columns in (torch.zeros_like(rows), rows, rows // 2)], dim=1)
    for row, column in (every, ends):
        ids = row * (row + 1) // 2 + column
        keep = ids < 2**31
        row, column, ids = row[keep], column[keep], ids[keep].to(torch.int32)
        found = [torch.full_like(row, -1) for _ in range(3)]
        guesses = (row + off).clamp(min=0)
        grid = (triton.cdiv(len(ids), 4096),)
        launch.start(decode_kernel, grid, ids.device, ids, guesses, *found, len(ids), BLOCK=4096)
        assert all(map(torch.equal, found, (row, column, row)))


# Pairs


def randn(*shape, seed=0, spread=3.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.exp(spread * torch.randn(shape, generator=g))).to(DEVICE)


def test_a_pair_holds_sixteen_bits_and_its_sum_is_exact():
    x = randn(4, 999, spread=20.0)
    pair = Pair.split(x)
    error = (pair.whole().double() - x.double()).abs() / x.double().abs()
    assert error.max() <= 2**-17  # eight bits and half of a unit in the last place, twice
    assert torch.equal(pair.whole().double(), pair.hi.double() + pair.lo.double())
    assert torch.equal(Pair.split(pair.whole()).whole(), pair.whole())
    assert not Pair.split(x.bfloat16().float()).lo.any()


def test_the_parts_of_a_product_are_those_that_count():
    def exact(left, right):
        return sum(a.double() @ b.double() for a, b in parts(left, right))

    x, y = Pair.split(randn(1, 5, 7)), Pair.split(randn(1, 7, 3, seed=1))
    assert [(a is not None, b is not None) for a, b in parts(x, y)] == [(True, True)] * 3
    whole = x.whole().double() @ y.whole().double()
    left_out = (exact(x, y) - whole).abs()
    assert 0 < (left_out / (x.whole().double().abs() @ y.whole().double().abs())).max() <= 2**-16
    assert len(parts(x.hi, y)) == 2 and len(parts(x.hi, y.hi)) == 1
    assert torch.equal(exact(x.hi, y), x.hi.double() @ y.whole().double())  # nothing is left out beside bfloat16


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shape", [(3,), (2, 5, 7), (1, 64, 65), (4, 0, 3)])
def test_the_kernel_splits_as_pytorch_bit_for_bit(shape):
    x, y = randn(*shape, spread=20.0), randn(7, seed=1)
    views = [x, x.mT] if x.ndim == 3 else [x]
    for t in views:
        for found, wanted in zip((split(t), *split_two(t, y), *split_two(y, t)), (t, t, y, y, t), strict=True):
            assert torch.equal(found.both, Pair.split(wanted).both)
    for call in (lambda: split(x.double()), lambda: split_two(x.double(), y)):
        with pytest.raises(ValueError, match="x has dtype torch.float64"):
            call()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tile", [None, SMALL], ids=str)
def test_what_is_stored_as_a_pair_or_in_bfloat16_is_the_whole_one_split_or_rounded(tile):
    i = PAIRED_PRODUCT.make(Sizes(2, 33, 47, 20))
    A, B, C = i["A"], i["B"], i["C"]
    (G, energies), (rounded, same) = (
        product_with_energies(A, B, C=C, out_dtype=own, tile=tile) for own in (None, torch.bfloat16)
    )
    assert torch.equal(rounded, G.bfloat16()) and torch.equal(energies, same)
    i = WEIGH.make(Sizes(2, 33, 1, 20))
    (G_par, (T, energy), *others), (G_own, (T_own, same), *own_ones) = (weigh(**i, pair=own) for own in (True, False))
    assert torch.equal(energy, same)
    assert others[0].dtype == torch.bfloat16 and others[1].dtype == torch.float32
    for sum_of, own in zip((G_par, T, *others), (G_own, T_own, *own_ones), strict=True):
        split_ = isinstance(sum_of, Pair)
        assert torch.equal(sum_of.both, Pair.split(own).both) if split_ else torch.equal(sum_of, own.to(sum_of.dtype))
    i = PAIRED_MOMENTUM.make(Sizes(2, 33, 20, 3))
    X, both = (momentum(**i | {"M": i["M"].clone()}, tile=tile, pair=own)[0] for own in (False, True))
    assert torch.equal(both.both, Pair.split(X).both) and X.any()


@pytest.mark.parametrize("structure", ["equal columns", "signs", "two columns"])
def test_a_gradient_in_the_subspace_leaves_no_residual(structure):
    """The roundings of pairs add up where entries are alike: 2.7e-5 of the gradient was seen, above float32's bound."""
    g = torch.Generator().manual_seed(0)
    for n in range(9, 40):
        W = torch.nn.Parameter(torch.zeros(8, n))
        optimizer = prokl.ProKLShampoo([W], lr=1.0, rank=4, alpha_kl=0.0, backend="torch", precision="balanced")
        row = {"equal columns": torch.ones(n), "two columns": (torch.arange(n) < 2).float()}.get(
            structure, torch.randn(n, generator=g).sign()
        )
        for _ in range(6):
            W.grad = torch.randn(8, 1, generator=g) * row
            optimizer.step()
        assert not W.any(), n


def test_weigh_reads_a_slice_of_another_dtype_where_it_lies():
    i = WEIGH.make(Sizes(2, 5, 1, 4), (BF16,) + (DOUBLE,) * 9)
    assert all(map(torch.equal, WEIGH.run(**i), WEIGH.run(**(i | {"G": gaps(i["G"])}))))
