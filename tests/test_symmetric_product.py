"""The kernel of symmetric products, alpha (A A^T - B K B^T) + beta C and alpha A B + beta C, against float64.

B: matrices; M: rows and columns; K: depth; R: depth of the part that is subtracted.
"""

import re

import pytest
import torch
import triton
import triton.language as tl

from prokl.kernels import launch
from prokl.kernels.launch import Tile
from prokl.kernels.product import product
from prokl.kernels.symmetric_product import (
    TILES,
    TILES_FP32,
    TILES_FP64,
    TILES_HALF,
    can_use_symmetric_product,
    choose_tile,
    lower_tile,
    settle_row,
    symmetric_polynomial,
    symmetric_product,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
SIZES = [(2, 70, 33, 9), (3, 65, 70, 40), (1, 7, 101, 1), (2, 1, 1, 1), (2, 1, 40, 5), (1, 40, 1, 64)]  # B, M, K, R
# A and C; B and K of the part that is subtracted. bfloat16 only where the kernel converts it.
DTYPES = [
    (SINGLE, SINGLE, SINGLE, SINGLE),
    (HALF, HALF, HALF, HALF),
    (DOUBLE, DOUBLE, DOUBLE, DOUBLE),
    (SINGLE, BF16, BF16, HALF),
    (HALF, SINGLE, DOUBLE, SINGLE),
]
SMALL = Tile(16, 16, 16, 4, 1)


def normal(*shape, dtype=SINGLE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=DOUBLE).to(DEVICE, dtype)


def symmetric(B, M, dtype=SINGLE, seed=0):
    X = normal(B, M, M, dtype=DOUBLE, seed=seed)
    return ((X + X.mT) / 2).to(dtype)


def arguments(B, M, K, R, dtypes=(SINGLE,) * 4, seed=0):
    a, c, w, inner = dtypes
    return (
        normal(B, M, K, dtype=a, seed=seed),
        symmetric(B, M, c, seed + 1),
        (normal(B, M, R, dtype=w, seed=seed + 2), symmetric(B, R, inner, seed + 3)),
    )


def scales(B):
    return [(0.5 + torch.rand(B, generator=torch.Generator().manual_seed(s))).to(DEVICE) for s in (8, 9)]


def column(scale):
    return scale.double()[:, None, None] if isinstance(scale, torch.Tensor) else scale


def assert_is(got, A, B, C=None, minus=None, alpha=1.0, beta=1.0, sum_dtype=None):
    """Hold ``got`` against alpha (A B^T - W inner W^T) + beta C in float64, element by element.

    K products and sums, R for each factor of the subtracted part, its rounding, two roundings of each scale and the
    last sum err by at most (K + 2 R + 6) u (|alpha| (|A| |B^T| + |W| |inner| |W^T|) + |beta| |C|) to first order,
    twice that where tensor cores truncate or the float64 reference rounds as well; leaving out the products of two
    low parts of TF32, and rounding these, by less than 2 * 2^-19 of it. Storing rounds once more. Measured in the
    interpreter: at most 0.07 of the bound before storing.
    """
    given = [t for t in (A, B, C, *(minus or ())) if t is not None]
    sum_dtype = sum_dtype or launch.arithmetic_dtype(*given)
    A, B, alpha, beta = A.double(), B.double(), column(alpha), column(beta)
    want, size, depth = A @ B.mT, A.abs() @ B.abs().mT, A.shape[2]
    if minus is not None:
        W, inner = (t.double() for t in minus)
        want = want - W @ inner @ W.mT
        size = size + W.abs() @ inner.abs() @ W.abs().mT
        depth += 2 * W.shape[2]
    want, size = alpha * want, abs(alpha) * size
    if C is not None:
        want, size = want + beta * C.double(), size + abs(beta) * C.double().abs()
    stored = torch.finfo(got.dtype)
    bound = ((depth + 6) * torch.finfo(sum_dtype).eps + (2**-18 if sum_dtype == SINGLE else 0)) * size
    if stored.eps > torch.finfo(sum_dtype).eps:
        bound = bound + stored.eps / 2 * (want.abs() + bound) + stored.tiny * stored.eps
    error = (got.double() - want).abs()
    assert got.is_contiguous()
    assert torch.equal(got, got.mT)
    assert (error <= bound).all(), f"{(error / bound).nan_to_num(nan=torch.inf).max().item():.2g} of the bound"


@triton.jit
def decode_kernel(ids_ptr, guesses_ptr, rows_ptr, columns_ptr, settled_ptr, COUNT, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, at < COUNT, 0)
    row, column = lower_tile(ids)
    tl.store(rows_ptr + at, row, at < COUNT)
    tl.store(columns_ptr + at, column, at < COUNT)
    tl.store(settled_ptr + at, settle_row(tl.load(guesses_ptr + at, at < COUNT, 0), ids), at < COUNT)


def decode(ids, guesses):
    out = [torch.full_like(guesses, -1) for _ in range(3)]
    grid = (triton.cdiv(len(ids), 4096),)
    launch.start(decode_kernel, grid, ids.device, ids, guesses, *out, len(ids), BLOCK=4096)
    return out


def test_tile_numbers_decode_to_every_lower_tile_in_order():
    side = 300
    rows, columns = torch.tril_indices(side, side, device=DEVICE)
    ids = torch.arange(side * (side + 1) // 2, device=DEVICE, dtype=torch.int32)
    for got, want in zip(decode(ids, rows), (rows, columns, rows), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_tile_numbers_decode_at_both_ends_of_every_row_up_to_32_bits(off):
    rows = torch.arange(65536, device=DEVICE)  # the last row begins at 2^31 - 2^15
    for columns in (torch.zeros_like(rows), rows, rows // 2):
        ids = rows * (rows + 1) // 2 + columns
        keep = ids < 2**31
        got = decode(ids[keep].to(torch.int32), (rows + off)[keep].clamp(min=0))
        assert torch.equal(got[0], rows[keep])
        assert torch.equal(got[1], columns[keep])
        assert torch.equal(got[2], rows[keep])


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("B, M, K, R", SIZES)
def test_product_with_its_transpose(B, M, K, R, dtypes):
    A, C, minus = arguments(B, M, K, R, dtypes)
    alpha, beta = scales(B)
    assert_is(symmetric_product(A), A, A)
    assert_is(symmetric_product(A, C=C, alpha=0.3, beta=-1.7), A, A, C, alpha=0.3, beta=-1.7)
    assert_is(symmetric_product(A, C=C, alpha=alpha, beta=beta), A, A, C, alpha=alpha, beta=beta)
    got = symmetric_product(A, C=C, minus=minus, alpha=alpha, beta=0.1, out_dtype=DOUBLE)
    assert_is(got, A, A, C, minus, alpha=alpha, beta=0.1)
    assert_is(symmetric_product(A, minus=minus, out_dtype=DOUBLE), A, A, minus=minus)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [SINGLE, HALF, DOUBLE], ids=str)
@pytest.mark.parametrize("B, M", [(2, 70), (3, 65), (2, 1), (1, 150)])
def test_polynomials_of_newton_schulz(B, M, dtype):
    a, b, c = 3.4445, -4.7750, 2.0315
    R = symmetric(B, M, dtype) / M**0.5
    Z = symmetric_polynomial(R, R, C=R, alpha=c, beta=b)
    assert_is(Z, R, R, R, alpha=c, beta=b)
    # Z commutes with R up to its rounding, which only a Z in the dtype of the sum keeps below the bound.
    if dtype != HALF:
        Y = symmetric_polynomial(R, Z, C=R, beta=a)
        assert (Y.double() - (a * R.double() + R.double() @ Z.double())).abs().max() <= 100 * torch.finfo(dtype).eps


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("M, tile", [(150, None), (70, SMALL), (16, SMALL), (1, SMALL), (130, TILES_HALF[0])], ids=str)
def test_lower_half_decides_where_the_result_is_not_symmetric(M, tile):
    A, B, C = (normal(2, M, M, dtype=HALF, seed=s) for s in range(3))
    got = symmetric_polynomial(A, B, C=C, alpha=0.5, beta=2.0, tile=tile, out_dtype=DOUBLE)
    assert torch.equal(got, got.mT)
    want = 0.5 * (A.double() @ B.double().mT) + 2 * C.double()
    assert ((got - want).tril().abs() <= 1e-5 * M).all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_that_ships(tile):
    dtype = HALF if tile in TILES_HALF else SINGLE if tile in TILES_FP32 else DOUBLE
    A, C, minus = arguments(2, tile.m + 5, 2 * tile.k + 3, tile.k + 1, (dtype,) * 4)
    assert_is(symmetric_product(A, C=C, minus=minus, tile=tile, out_dtype=DOUBLE), A, A, C, minus)
    assert_is(symmetric_product(A, C=C, tile=tile), A, A, C)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("side", [1, 2, 5, 9])
def test_many_tiles_of_several_matrices(side):
    A, C, minus = arguments(3, 16 * side - 3, 5, 2)
    assert_is(symmetric_product(A, C=C, minus=minus, tile=SMALL), A, A, C, minus)


@pytest.mark.parametrize("out", [HALF, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("operands", [HALF, SINGLE, DOUBLE], ids=str)
def test_result_is_rounded_once_to_the_dtype_asked_for(operands, out):
    A, C, _ = arguments(2, 70, 40, 1, (operands, SINGLE, SINGLE, SINGLE))
    got = symmetric_product(A, C=C, out_dtype=out)
    assert got.dtype == out
    assert_is(got, A, A, C)
    assert symmetric_product(A, C=C).dtype == operands
    assert symmetric_polynomial(C, C.to(operands)).dtype == torch.promote_types(SINGLE, operands)


@pytest.mark.parametrize("captured, factor", [(0.5, 4), (0.9, 16), (0.99, 54)])
def test_subtracting_the_gram_matrix_loses_accuracy_as_the_captured_energy_grows(captured, factor):
    """Error of A A^T - B K B^T, B = A U, relative to that of X X^T with the explicit X = A - A U U^T, in float32.

    Measured in the interpreter over ten seeds: 2.6 to 2.8, 9.8 to 10.9 and 33 to 36; the bound is 1.5 times that.
    """
    U = torch.linalg.qr(normal(2, 256, 32, dtype=DOUBLE))[0].to(SINGLE)
    inside = normal(2, 64, 32, dtype=DOUBLE, seed=1) @ U.double().mT
    outside = normal(2, 64, 256, dtype=DOUBLE, seed=2)
    outside = outside - outside @ U.double() @ U.double().mT
    inside, outside = (x / x.norm(dim=(1, 2), keepdim=True) for x in (inside, outside))
    A = (captured**0.5 * inside + (1 - captured) ** 0.5 * outside).to(SINGLE)
    exact = A.double() - A.double() @ U.double() @ U.double().mT
    want = exact @ exact.mT

    G = product(A, U)
    explicit = symmetric_product(product(G, U.mT, C=A, alpha=-1.0))
    eye = torch.eye(32, device=DEVICE)
    implicit = symmetric_product(A, minus=(G, 2 * eye - product(U.mT, U)))
    worse = (implicit - want).norm() / (explicit - want).norm()
    assert worse <= factor
    assert worse >= factor / 4  # else the advice to form the residual is out of date


def gaps(t):
    wide = torch.full([2 * x + 1 for x in t.shape], torch.nan, device=DEVICE, dtype=t.dtype)
    return (wide[1::2, 1::2, 1::2] if t.ndim == 3 else wide[1::2]).copy_(t)


def turned(t):
    return t.mT.contiguous().mT if t.ndim == 3 else t


def permuted(t):
    return t.permute(1, 2, 0).contiguous().permute(2, 0, 1) if t.ndim == 3 else t


@pytest.mark.parametrize("change", [gaps, turned, permuted])
def test_strides_do_not_matter(change):
    A, C, minus = arguments(3, 70, 41, 9)
    B, (alpha, beta) = symmetric(3, 70, seed=7), scales(3)
    got = symmetric_product(
        change(A), C=change(C), minus=tuple(map(change, minus)), alpha=change(alpha), beta=change(beta)
    )
    assert_is(got, A, A, C, minus, alpha=alpha, beta=beta)
    got_B = symmetric_polynomial(change(B), change(B), C=change(C), alpha=alpha, beta=change(beta))
    assert_is(got_B, B, B, C, alpha=alpha, beta=beta)
    # The interpreter multiplies a tile in the same order wherever it lies.
    if launch.INTERPRETED:
        assert torch.equal(got, symmetric_product(A, C=C, minus=minus, alpha=alpha, beta=beta))


def test_one_matrix_may_serve_the_whole_batch():
    A, C, minus = arguments(3, 37, 41, 9)
    A, C, W, inner = (t[:1].expand_as(t) for t in (A, C, *minus))
    scale = torch.tensor(0.5, device=DEVICE).expand(3)
    assert_is(symmetric_product(A, C=C, minus=(W, inner), alpha=scale), A, A, C, (W, inner), alpha=scale)
    assert_is(symmetric_polynomial(C, C, C=C, beta=scale), C, C, C, beta=scale)
    column = A[..., :1].expand_as(A)
    assert_is(symmetric_product(column), column, column)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("which", ["A", "B", "C", "W", "inner"])
def test_offsets_beyond_32_bits(which, dim):
    given = {name: symmetric(3, 3, HALF, seed) for seed, name in enumerate(("A", "B", "C", "W", "inner"))}
    stride = [3, 1]
    stride.insert(dim, 2**30 + 8)  # index 2 of this dimension starts at element 2^31 + 16
    base = torch.empty(2 * stride[dim] + 9, device=DEVICE, dtype=HALF)  # virtual memory: a few pages are touched
    far = given | {which: base.as_strided((3, 3, 3), stride).copy_(given[which])}
    for operation in (
        lambda g: symmetric_product(g["A"], C=g["C"], minus=(g["W"], g["inner"])),
        lambda g: symmetric_polynomial(g["A"], g["B"], C=g["C"]),
    ):
        assert torch.equal(operation(far), operation(given))


def test_one_step_along_the_depth_beyond_32_bits():
    A = normal(1, 3, SMALL.k + 1, dtype=HALF)
    stride = 2**31 // SMALL.k + 8
    base = torch.empty(stride * SMALL.k + 3, device=DEVICE, dtype=HALF)  # virtual memory, touched on 17 pages
    far = base.as_strided(A.shape, (0, 1, stride)).copy_(A)
    assert_is(symmetric_product(far, tile=SMALL), A, A)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, where an infinite value meets a zero
def test_nan_stays_in_its_matrix_row_and_column():
    A, C, minus = arguments(3, 150, 24, 9)
    want = symmetric_product(A, C=C, minus=minus)
    A[1, 70, 5] = torch.nan
    minus[0][2, 3, 4] = torch.inf
    got = symmetric_product(A, C=C, minus=minus)
    spoilt = torch.zeros_like(got, dtype=torch.bool)
    for b, i in ((1, 70), (2, 3)):
        spoilt[b, i] = spoilt[b, :, i] = True
    assert torch.equal(got.isfinite(), ~spoilt)
    assert torch.equal(got[~spoilt], want[~spoilt])


def test_a_zero_beta_leaves_the_addend_unread_only_where_it_is_a_number():
    A, C, _ = arguments(2, 20, 24, 1)
    C[0] = torch.nan
    want = symmetric_product(A)
    assert torch.equal(symmetric_product(A, C=C, beta=0), want)
    got = symmetric_product(A, C=C, beta=torch.zeros(2, device=DEVICE))
    assert got[0].isnan().all()
    assert torch.equal(got[1], want[1])


def test_inputs_are_not_written():
    A, C, (W, inner) = arguments(2, 37, 41, 9)
    given = [A, C, W, inner, symmetric(2, 37, seed=7), *scales(2)]
    before = [t.clone() for t in given]
    symmetric_product(A, C=C, minus=(W, inner), alpha=given[5], beta=given[6])
    symmetric_polynomial(C, given[4], C=C, alpha=given[5], beta=given[6])
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_no_matrices_give_empty_results(monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    A, C, minus = arguments(0, 5, 6, 2)
    none = torch.ones(0, device=DEVICE)
    got = symmetric_product(A, C=C, minus=minus, alpha=none, out_dtype=HALF)
    assert got.shape == (0, 5, 5) and got.dtype == HALF
    assert symmetric_polynomial(C, C, C=C, beta=none).shape == (0, 5, 5)


def test_precision_applies_to_operands_of_float32(monkeypatch):
    constants = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: constants.append(kwargs))
    for dtype in (HALF, BF16, SINGLE, DOUBLE):
        A, _, minus = arguments(1, 4, 4, 4, (dtype, SINGLE, SINGLE, SINGLE))
        symmetric_product(A, minus=minus, precision="tf32")
    symmetric_polynomial(symmetric(1, 4, HALF), symmetric(1, 4, BF16), precision="tf32")
    used = [c for c in constants if "PRECISION_VW" in c]
    bf16 = ("fp32", "tf32") if launch.INTERPRETED else ("bf16", "ieee")  # the interpreter's bfloat16 products are wrong
    assert [str(c["OPERAND"]) for c in used] == ["fp16", bf16[0], "fp32", "fp64", "fp32"]
    assert [c["PRECISION"] for c in used] == ["ieee", bf16[1], "tf32", "ieee", "tf32"]
    assert [c["PRECISION_VW"] for c in used] == ["tf32", "tf32", "tf32", "ieee", "tf32"]


def test_the_chooser_takes_wide_tiles_where_they_fill_the_gpu_and_are_aligned():
    for dtype, tiles in ((HALF, TILES_HALF), (SINGLE, TILES_FP32), (DOUBLE, TILES_FP64)):
        for B, m in ((1, 1), (1, 768), (48, 768), (1, 2816), (7, 128)):
            for wide in (False, True):
                for precision in launch.PRECISIONS:
                    assert choose_tile(B, m, dtype, precision, wide) in tiles
    assert choose_tile(48, 768, HALF) == TILES_HALF[0]
    assert choose_tile(1, 768, HALF) == choose_tile(500, 64, HALF) == TILES_HALF[1]
    assert choose_tile(48, 768, HALF, wide=False) == choose_tile(48, 768, SINGLE) == TILES_HALF[2]
    assert choose_tile(48, 768, SINGLE, "ieee") == TILES_FP32[1]


@pytest.mark.parametrize("name", ["A", "B", "C", "minus[0]", "minus[1]", "alpha", "beta"])
def test_a_wrong_tensor_raises_with_its_name(name):
    A, C, (W, inner) = arguments(3, 5, 5, 2)
    given = {"A": A, "B": C, "C": C, "minus[0]": W, "minus[1]": inner, "alpha": scales(3)[0], "beta": scales(3)[1]}
    t = given[name]
    for what, wrong in {"shape": t[..., None], "dtype": t.to(torch.int64), "is on": t.to("meta")}.items():
        g = given | {name: wrong}
        rest = {k: g[k] for k in ("C", "alpha", "beta")}
        with pytest.raises(ValueError, match=rf"^{re.escape(name)} (has )?{what}"):
            if name != "B":
                symmetric_product(g["A"], minus=(g["minus[0]"], g["minus[1]"]), **rest)
            symmetric_polynomial(g["A"], g["B"], **rest)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda A, S: symmetric_product(A[..., :0]), r"A has shape \(3, 5, 0\); must be \(B, m, k\) with m, k >= 1"),
        (lambda A, S: symmetric_product(A, C=A), r"C has shape \(3, 5, 6\); must be \(3, 5, 5\)"),
        (lambda A, S: symmetric_product(A, minus=(A, S)), r"minus\[1\] has shape \(3, 5, 5\); must be \(3, 6, 6\)"),
        (lambda A, S: symmetric_product(A, minus=(A[..., :0], S)), r"minus\[0\] has shape \(3, 5, 0\)"),
        (lambda A, S: symmetric_product(A, precision="high"), r"Invalid precision='high'"),
        (lambda A, S: symmetric_product(A, out_dtype=torch.int32), r"Invalid out_dtype=torch.int32"),
        (lambda A, S: symmetric_product(A, alpha=S[0, 0]), r"alpha has shape \(5,\); must be \(3,\)"),
        (lambda A, S: symmetric_polynomial(A, S), r"A has shape \(3, 5, 6\); must be \(B, m, m\) with m >= 1"),
        (lambda A, S: symmetric_polynomial(S, A), r"B has shape \(3, 5, 6\); must be \(3, 5, 5\)"),
        (lambda A, S: symmetric_polynomial(S, S, precision="high"), r"Invalid precision='high'"),
        (lambda A, S: symmetric_product(A, tile=Tile(64, 32, 32, 4, 2)), r"Invalid tile=Tile\(m=64, n=32"),
    ],
)
def test_a_value_out_of_bounds_raises_with_the_bound(call, message):
    with pytest.raises(ValueError, match=message):
        call(normal(3, 5, 6), symmetric(3, 5))


def test_the_predicate_says_what_the_launcher_takes():
    A, C, minus = arguments(2, 5, 6, 2, (HALF, DOUBLE, BF16, SINGLE))
    assert can_use_symmetric_product(A, C, *minus)
    assert not can_use_symmetric_product(A, C.to("meta"))
    assert not can_use_symmetric_product(A, C.to(torch.int64))
    assert not can_use_symmetric_product()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("M, K", [(384, 512), (250, 333)])
def test_error_is_at_most_twice_that_of_torch(monkeypatch, dtype, M, K):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    A, C, _ = arguments(4, M, K, 1, (dtype, dtype, SINGLE, SINGLE))
    S = symmetric(4, M, dtype) / M**0.5
    tiles = (None, *(TILES_FP32 if dtype == SINGLE else TILES_HALF))
    for tile in tiles:
        for X, got in (
            (A, symmetric_product(A, C=C, alpha=0.3, beta=-1.7, tile=tile)),
            (S, symmetric_polynomial(S, S, C=C, alpha=0.3, beta=-1.7, tile=tile)),
        ):
            want = 0.3 * X.double() @ X.double().mT - 1.7 * C.double()
            plain = torch.baddbmm(C, X, X.mT, alpha=0.3, beta=-1.7)
            assert torch.equal(got, got.mT)
            assert (got.double() - want).norm() <= 2 * (plain.double() - want).norm()
