"""The kernel of symmetric products, alpha A A^T + beta C and alpha A B + beta C, against float64.

B: matrices; M: rows and columns; K: depth.
"""

import pytest
import torch
import triton
import triton.language as tl

from prokl.backends.torch_ops import TorchStages
from prokl.kernels import launch
from prokl.kernels.launch import Tile
from prokl.kernels.symmetric_forms import coordinates_ema, factor_ema, gram, shifted_polynomial
from prokl.kernels.symmetric_product import (
    TILES,
    TILES_FP32,
    TILES_FP64,
    TILES_HALF,
    choose_tile,
    lower_tile,
    settle_row,
    symmetric_polynomial,
    symmetric_product,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
SIZES = [(2, 70, 33), (3, 65, 70), (1, 7, 101), (2, 1, 1), (2, 1, 40), (1, 40, 1)]  # B, M, K
# A and C; bfloat16 only where the kernel converts it.
DTYPES = [(SINGLE, SINGLE), (HALF, HALF), (DOUBLE, DOUBLE), (SINGLE, BF16), (HALF, SINGLE)]
SMALL = Tile(16, 16, 16, 4, 1)


def normal(*shape, dtype=SINGLE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=DOUBLE).to(DEVICE, dtype)


def symmetric(B, M, dtype=SINGLE, seed=0):
    X = normal(B, M, M, dtype=DOUBLE, seed=seed)
    return ((X + X.mT) / 2).to(dtype)


def arguments(B, M, K, dtypes=(SINGLE, SINGLE), seed=0):
    return normal(B, M, K, dtype=dtypes[0], seed=seed), symmetric(B, M, dtypes[1], seed + 1)


def scales(B):
    return [(0.5 + torch.rand(B, generator=torch.Generator().manual_seed(s))).to(DEVICE) for s in (8, 9)]


def column(scale):
    return scale.double()[:, None, None] if isinstance(scale, torch.Tensor) else scale


def assert_is(got, A, B, C=None, alpha=1.0, beta=1.0, sum_dtype=None):
    """Hold ``got`` against alpha A B^T + beta C in float64, element by element.

    K products and sums, two roundings of each scale and the last sum err by at most
    (K + 6) u (|alpha| |A| |B^T| + |beta| |C|) to first order, twice that where tensor cores truncate or the float64
    reference rounds as well; leaving out the products of two low parts of TF32, and rounding these, by less than
    2 * 2^-19 of it. Storing rounds once more. Measured in the interpreter: at most 0.07 of the bound before storing.
    """
    given = [t for t in (A, B, C) if t is not None]
    sum_dtype = sum_dtype or launch.arithmetic_dtype(*given)
    A, B, alpha, beta = A.double(), B.double(), column(alpha), column(beta)
    want, size, depth = A @ B.mT, A.abs() @ B.abs().mT, A.shape[2]
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


ADDENDS_AND_SCALES = [
    lambda C, alpha, beta: {},
    lambda C, alpha, beta: {"C": C, "alpha": 0.3, "beta": -1.7},
    lambda C, alpha, beta: {"C": C, "alpha": alpha, "beta": beta},
    lambda C, alpha, beta: {"C": C, "alpha": alpha, "beta": 0.1},
]
# Every pair of a size, dtypes and an addend with scales, but not every three of them.
CASES = [
    (*size, dtypes, ADDENDS_AND_SCALES[(i + j) % len(ADDENDS_AND_SCALES)])
    for i, size in enumerate(SIZES)
    for j, dtypes in enumerate(DTYPES)
]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("B, M, K, dtypes, options", CASES)
def test_product_with_its_transpose(B, M, K, dtypes, options):
    A, C = arguments(B, M, K, dtypes)
    options = options(C, *scales(B))
    assert_is(symmetric_product(A, **options), A, A, **options)
    assert_is(symmetric_product(A, out_dtype=DOUBLE, **options), A, A, **options)


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
    A, C = arguments(2, tile.m + 5, 2 * tile.k + 3, (dtype,) * 2)
    assert_is(symmetric_product(A, C=C, tile=tile), A, A, C)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("side", [1, 2, 5, 9])
def test_many_tiles_of_several_matrices(side):
    A, C = arguments(3, 16 * side - 3, 5)
    assert_is(symmetric_product(A, C=C, tile=SMALL), A, A, C)


@pytest.mark.parametrize("out", [HALF, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("operands", [HALF, SINGLE, DOUBLE], ids=str)
def test_result_is_rounded_once_to_the_dtype_asked_for(operands, out):
    A, C = arguments(2, 70, 40, (operands, SINGLE))
    got = symmetric_product(A, C=C, out_dtype=out)
    assert got.dtype == out
    assert_is(got, A, A, C)
    assert symmetric_product(A, C=C).dtype == operands
    assert symmetric_polynomial(C, C.to(operands)).dtype == torch.promote_types(SINGLE, operands)


def gaps(t):
    wide = torch.full([2 * x + 1 for x in t.shape], torch.nan, device=DEVICE, dtype=t.dtype)
    return (wide[1::2, 1::2, 1::2] if t.ndim == 3 else wide[1::2]).copy_(t)


def turned(t):
    return t.mT.contiguous().mT if t.ndim == 3 else t


def permuted(t):
    return t.permute(1, 2, 0).contiguous().permute(2, 0, 1) if t.ndim == 3 else t


@pytest.mark.parametrize("change", [gaps, turned, permuted])
def test_strides_do_not_matter(change):
    A, C = arguments(3, 70, 41)
    B, (alpha, beta) = symmetric(3, 70, seed=7), scales(3)
    got = symmetric_product(change(A), C=change(C), alpha=change(alpha), beta=change(beta))
    assert_is(got, A, A, C, alpha=alpha, beta=beta)
    got_B = symmetric_polynomial(change(B), change(B), C=change(C), alpha=alpha, beta=change(beta))
    assert_is(got_B, B, B, C, alpha=alpha, beta=beta)
    # The interpreter multiplies a tile in the same order wherever it lies.
    if launch.INTERPRETED:
        assert torch.equal(got, symmetric_product(A, C=C, alpha=alpha, beta=beta))


def test_one_matrix_may_serve_the_whole_batch():
    A, C = (t[:1].expand_as(t) for t in arguments(3, 37, 41))
    scale = torch.tensor(0.5, device=DEVICE).expand(3)
    assert_is(symmetric_product(A, C=C, alpha=scale), A, A, C, alpha=scale)
    assert_is(symmetric_polynomial(C, C, C=C, beta=scale), C, C, C, beta=scale)
    column = A[..., :1].expand_as(A)
    assert_is(symmetric_product(column), column, column)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("which", ["A", "B", "C"])
def test_offsets_beyond_32_bits(which, dim):
    given = {name: symmetric(3, 3, HALF, seed) for seed, name in enumerate(("A", "B", "C"))}
    stride = [3, 1]
    stride.insert(dim, 2**30 + 8)  # index 2 of this dimension starts at element 2^31 + 16
    base = torch.empty(2 * stride[dim] + 9, device=DEVICE, dtype=HALF)  # virtual memory: a few pages are touched
    far = given | {which: base.as_strided((3, 3, 3), stride).copy_(given[which])}
    for operation in (
        lambda g: symmetric_product(g["A"], C=g["C"]),
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
    A, C = arguments(3, 150, 24)
    want = symmetric_product(A, C=C)
    A[1, 70, 5] = torch.nan
    A[2, 3, 4] = torch.inf
    got = symmetric_product(A, C=C)
    spoilt = torch.zeros_like(got, dtype=torch.bool)
    for b, i in ((1, 70), (2, 3)):
        spoilt[b, i] = spoilt[b, :, i] = True
    assert torch.equal(got.isfinite(), ~spoilt)
    assert torch.equal(got[~spoilt], want[~spoilt])


def test_a_zero_beta_leaves_the_addend_unread_only_where_it_is_a_number():
    A, C = arguments(2, 20, 24)
    C[0] = torch.nan
    want = symmetric_product(A)
    assert torch.equal(symmetric_product(A, C=C, beta=0), want)
    got = symmetric_product(A, C=C, beta=torch.zeros(2, device=DEVICE))
    assert got[0].isnan().all()
    assert torch.equal(got[1], want[1])


def test_inputs_are_not_written():
    A, C = arguments(2, 37, 41)
    given = [A, C, symmetric(2, 37, seed=7), *scales(2)]
    before = [t.clone() for t in given]
    symmetric_product(A, C=C, alpha=given[3], beta=given[4])
    symmetric_polynomial(C, given[2], C=C, alpha=given[3], beta=given[4])
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_no_matrices_give_empty_results(monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    A, C = arguments(0, 5, 6)
    none = torch.ones(0, device=DEVICE)
    got = symmetric_product(A, C=C, alpha=none, out_dtype=HALF)
    assert got.shape == (0, 5, 5) and got.dtype == HALF
    assert symmetric_polynomial(C, C, C=C, beta=none).shape == (0, 5, 5)


def test_precision_applies_to_operands_of_float32(monkeypatch):
    constants = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: constants.append(kwargs))
    for dtype in (HALF, BF16, SINGLE, DOUBLE):
        symmetric_product(arguments(1, 4, 4, (dtype, SINGLE))[0], precision="tf32")
    symmetric_polynomial(symmetric(1, 4, HALF), symmetric(1, 4, BF16), precision="tf32")
    bf16 = ("fp32", "tf32") if launch.INTERPRETED else ("bf16", "ieee")  # the interpreter's bfloat16 products are wrong
    assert [str(c["OPERAND"]) for c in constants] == ["fp16", bf16[0], "fp32", "fp64", "fp32"]
    assert [c["PRECISION"] for c in constants] == ["ieee", bf16[1], "tf32", "ieee", "tf32"]


def test_the_chooser_takes_wide_tiles_where_they_fill_the_gpu_and_are_aligned():
    for dtype, tiles in ((HALF, TILES_HALF), (SINGLE, TILES_FP32), (DOUBLE, TILES_FP64)):
        for B, m in ((1, 1), (1, 768), (48, 768), (1, 2816), (7, 128)):
            for wide in (False, True):
                for precision in launch.PRECISIONS:
                    assert choose_tile(B, m, dtype, precision, wide) in tiles
    assert choose_tile(48, 768, HALF) == TILES_HALF[0]
    assert choose_tile(1, 768, HALF) == choose_tile(500, 64, HALF) == TILES_HALF[1]
    assert choose_tile(48, 768, HALF, wide=False) == TILES_HALF[2]
    assert choose_tile(48, 768, SINGLE) == choose_tile(48, 768, SINGLE, wide=False) == TILES_FP32[0]
    assert choose_tile(48, 768, SINGLE, second=True) == TILES_FP32[0]
    assert choose_tile(48, 768, SINGLE, wide=False, second=True) == TILES_FP32[1]
    assert choose_tile(48, 768, SINGLE, "ieee") == TILES_FP32[2]


@pytest.mark.parametrize("name", ["A", "B", "C", "alpha", "beta"])
def test_a_wrong_tensor_raises_with_its_name(name):
    A, C = arguments(3, 5, 5)
    given = {"A": A, "B": C, "C": C, "alpha": scales(3)[0], "beta": scales(3)[1]}
    t = given[name]
    for what, wrong in {"shape": t[..., None], "dtype": t.to(torch.int64), "is on": t.to("meta")}.items():
        g = given | {name: wrong}
        rest = {k: g[k] for k in ("C", "alpha", "beta")}
        with pytest.raises(ValueError, match=rf"^{name} (has )?{what}"):
            if name != "B":
                symmetric_product(g["A"], **rest)
            symmetric_polynomial(g["A"], g["B"], **rest)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda A, S: symmetric_product(A[..., :0]), r"A has shape \(3, 5, 0\); must be \(batch, m, k\)"),
        (lambda A, S: symmetric_product(A, C=A), r"C has shape \(3, 5, 6\); must be \(3, 5, 5\)"),
        (lambda A, S: symmetric_product(A, precision="high"), r"Invalid precision='high'"),
        (lambda A, S: symmetric_product(A, out_dtype=torch.int32), r"Invalid out_dtype=torch.int32"),
        (lambda A, S: symmetric_product(A, alpha=S[0, 0]), r"alpha has shape \(5,\); must be \(3,\)"),
        (lambda A, S: symmetric_polynomial(A, S), r"A has shape \(3, 5, 6\); must be \(batch, m, m\) with m >= 1"),
        (lambda A, S: symmetric_polynomial(S, A), r"B has shape \(3, 5, 6\); must be \(3, 5, 5\)"),
        (lambda A, S: symmetric_polynomial(S, S, precision="high"), r"Invalid precision='high'"),
        (lambda A, S: symmetric_product(A, tile=Tile(64, 32, 32, 4, 2)), r"Invalid tile=Tile\(m=64, n=32"),
    ],
)
def test_a_value_out_of_bounds_raises_with_the_bound(call, message):
    with pytest.raises(ValueError, match=message):
        call(normal(3, 5, 6), symmetric(3, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("M, K", [(384, 512), (250, 333)])
def test_error_is_at_most_twice_that_of_torch(monkeypatch, dtype, M, K):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    A, C = arguments(4, M, K, (dtype, dtype))
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


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("m", [1, 5, 70, 130])
def test_a_shifted_polynomial_is_the_polynomial_and_it_with_the_identity_added(m, dtype):
    R = symmetric(2, m, dtype)
    Z, Q = shifted_polynomial(R, R, C=R, alpha=0.3, beta=-1.7, shift=2.5)
    plain, size = symmetric_polynomial(R, R, C=R, alpha=0.3, beta=-1.7), R.double().abs()
    # Sums of m products and an addend, whose order may be another in either: m + 2 roundings each of their sizes.
    rounding = 2 * (m + 2) * torch.finfo(dtype).eps * (0.3 * size @ size + 1.7 * size)
    assert ((Z.double() - plain.double()).abs() <= rounding).all() and torch.equal(Q, Q.mT)
    eye = torch.eye(m, dtype=torch.bool, device=Q.device)
    assert torch.equal(Q[:, ~eye], Z[:, ~eye])
    # Both are roundings of one sum.
    error = (Q[:, eye].double() - Z[:, eye].double() - 2.5).abs()
    assert (error <= torch.finfo(dtype).eps * (Q[:, eye].double().abs() + 2.5)).all()
    with pytest.raises(ValueError, match=r"A has shape"):
        shifted_polynomial(R[0], R, C=R, alpha=0.3, beta=-1.7, shift=2.5)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("m, k", [(1, 1), (5, 3), (70, 20), (20, 130)])
def test_the_emas_of_factors_are_those_of_the_pytorch_form(m, k, dtype):
    """Sums of k products and two addends, in the other's order: k + 6 roundings of the terms' sizes."""
    X, E, S = normal(2, m, k, dtype=dtype), symmetric(2, m, dtype), symmetric(2, m, dtype, 1)
    tail = torch.tensor([0.3, 1e-3], dtype=dtype, device=X.device)
    wide = [t.double() for t in (S, X, E.clone(), tail)]
    sizes = 0.95 * S.double().abs() + 0.1 * X.double().abs() @ X.double().abs().mT
    eps = torch.finfo(dtype).eps
    L = factor_ema(S, X, E, tail, 0.95, 0.1)
    expected = TorchStages(True).factor_ema(*wide, 0.95, 0.1)
    size = sizes + wide[3][:, None, None] * E.double().abs()
    assert torch.equal(L, L.mT) and ((L.double() - expected).abs() <= (k + 6) * eps * size).all()
    new, K = coordinates_ema(S, X, 0.95, 0.1)
    for found, wanted in zip(
        (new, K), TorchStages(True).coordinates_ema(S.double(), X.double(), 0.95, 0.1), strict=True
    ):
        assert torch.equal(found, found.mT)
        assert ((found.double() - wanted).abs() <= 2 * (k + 6) * eps * sizes).all()
    direct = 0.95 * new.double() + 0.1 * X.double() @ X.double().mT
    assert ((K.double() - direct).abs() <= 2 * (k + 6) * eps * sizes).all()
    with pytest.raises(ValueError, match=r"E has shape"):
        factor_ema(S, X, E[:1], tail, 0.95, 0.1)
    with pytest.raises(ValueError, match=r"gamma has shape"):
        factor_ema(S, X, E, tail[:1], 0.95, 0.1)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE], ids=str)
def test_a_gram_matrix_takes_its_scale_twice(dtype):
    X, scale = normal(3, 40, 70, dtype=dtype), torch.tensor([0.5, 2.0, 0.0], device=DEVICE)
    assert torch.equal(gram(X, scale), symmetric_product(X, alpha=scale.square()))
    with pytest.raises(ValueError, match=r"scale has shape"):
        gram(X, scale[:2])
