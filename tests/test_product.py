"""The product kernel, alpha A B + beta C, against float64.

B: matrices; M: rows; N: columns; K: depth.
"""

import pytest
import torch

from prokl.kernels import launch
from prokl.kernels.launch import Tile
from prokl.kernels.product import (
    IEEE,
    TILES,
    TILES_FP32,
    TILES_FP64,
    TILES_HALF,
    UNALIGNED,
    aligned,
    choose_tile,
    product,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
SIZES = [(2, 70, 33, 75), (3, 33, 101, 64), (1, 7, 101, 1), (2, 1, 1, 1), (2, 1, 40, 5), (1, 40, 1, 1)]  # B, M, K, N
# A, B and C. bfloat16 only where the kernel converts it: the interpreter multiplies it wrongly.
DTYPES = [
    (SINGLE, SINGLE, SINGLE),
    (HALF, HALF, HALF),
    (DOUBLE, DOUBLE, DOUBLE),
    (BF16, SINGLE, BF16),
    (SINGLE, HALF, DOUBLE),
    (HALF, DOUBLE, SINGLE),
    (HALF, BF16, HALF),
    (SINGLE, SINGLE, BF16),  # a half-precision gradient minus what the subspace has of it
]
SMALL = Tile(16, 16, 16, 4, 1)


def arguments(B, M, K, N, dtypes=(SINGLE, SINGLE, SINGLE), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=DOUBLE).to(DEVICE, dtype)
        for shape, dtype in zip(((B, M, K), (B, K, N), (B, M, N)), dtypes, strict=True)
    ]


def scales(B, seed=0, dtype=SINGLE):
    generator = torch.Generator().manual_seed(100 + seed)
    return [(0.5 + torch.rand(B, generator=generator)).to(DEVICE, dtype) for _ in range(2)]


def column(scale):
    return scale.double()[:, None, None] if isinstance(scale, torch.Tensor) else scale


def truth_and_size(A, B, C=None, alpha=1.0, beta=1.0):
    """alpha A B + beta C, and the same of the absolute values, both in float64."""
    A, B, alpha, beta = A.double(), B.double(), column(alpha), column(beta)
    want, size = alpha * (A @ B), abs(alpha) * (A.abs() @ B.abs())
    if C is None:
        return want, size
    return want + beta * C.double(), size + abs(beta) * C.double().abs()


def assert_is_product(got, A, B, sum_dtype=None, **rest):
    """Hold ``got`` against float64 within its rounding, element by element.

    K products and sums, two roundings of each scale and the last sum err by at most (K + 5) u (|alpha| |A| |B| +
    |beta| |C|) to first order, twice that where tensor cores truncate or the float64 reference rounds as well;
    leaving out the product of the two low parts of TF32, and rounding these, by less than 2^-19 of it. What is
    stored narrower is rounded once more, by half an eps of it or, below its normal numbers, of the smallest one.
    Measured in the interpreter: at most 0.06 of the bound before storing.
    """
    if sum_dtype is None:
        sum_dtype = launch.arithmetic_dtype(*(t for t in (A, B, rest.get("C")) if t is not None))
    want, size = truth_and_size(A, B, **rest)
    unit = (A.shape[2] + 5) * torch.finfo(sum_dtype).eps + (2**-19 if sum_dtype == SINGLE else 0)
    stored = torch.finfo(got.dtype)
    bound = unit * size
    if stored.eps > torch.finfo(sum_dtype).eps:
        # The interpreter cuts bits off where it stores bfloat16.
        unit = stored.eps if launch.INTERPRETED and got.dtype == BF16 else stored.eps / 2
        bound = bound + unit * (want.abs() + bound) + stored.tiny * stored.eps
    error = (got.double() - want).abs()
    assert got.is_contiguous()
    assert (error <= bound).all(), f"{(error / bound).nan_to_num(nan=torch.inf).max().item():.2g} of the bound"


ADDENDS_AND_SCALES = [
    lambda C, alpha, beta: {},
    lambda C, alpha, beta: {"C": C, "alpha": 0.3, "beta": -1.7},
    lambda C, alpha, beta: {"C": C, "alpha": alpha, "beta": beta},
    lambda C, alpha, beta: {"C": C, "alpha": alpha, "beta": 0.1},
    lambda C, alpha, beta: {"alpha": 2.0, "beta": beta},
]
# Every pair of a size, dtypes and an addend with scales, but not every three of them.
CASES = [
    (*size, dtypes, ADDENDS_AND_SCALES[(i + j) % len(ADDENDS_AND_SCALES)])
    for i, size in enumerate(SIZES)
    for j, dtypes in enumerate(DTYPES)
]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("B, M, K, N, dtypes, options", CASES)
def test_product_with_addend_and_scales(B, M, K, N, dtypes, options):
    A, right, C = arguments(B, M, K, N, dtypes)
    options = options(C, *scales(B))
    assert_is_product(product(A, right, **options), A, right, **options)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_that_ships(tile):
    dtype = HALF if tile in TILES_HALF else SINGLE if tile in TILES_FP32 else DOUBLE
    A, right, C = arguments(2, tile.m + 5, 2 * tile.k + 3, tile.n + 7, (dtype,) * 3)
    got, energy = product(A, right, C=C, energy=True, tile=tile, out_dtype=DOUBLE)
    assert_is_product(got, A, right, C=C)
    assert_is_energy(energy, got)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("rows, columns", [(19, 3), (8, 2), (3, 9), (1, 5), (17, 1)])
def test_grouped_order_visits_every_tile_once(rows, columns):
    A, right, _ = arguments(2, 16 * rows - 3, 5, 16 * columns - 7)
    got, energy = product(A, right, energy=True, tile=SMALL)
    assert_is_product(got, A, right)
    assert_is_energy(energy, got)


@pytest.mark.parametrize("out", [HALF, BF16, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("operands", [HALF, SINGLE, DOUBLE], ids=str)
def test_result_is_rounded_once_to_the_dtype_asked_for(operands, out):
    if launch.INTERPRETED and (operands, out) == (DOUBLE, BF16):
        pytest.skip("the interpreter converts float64 to bfloat16 wrongly")
    A, right, C = arguments(2, 33, 40, 50, (operands, operands, SINGLE))
    got = product(A, right, C=C, out_dtype=out)
    assert got.dtype == out
    assert_is_product(got, A, right, C=C)


def test_default_dtype_is_the_wider_of_the_factors():
    for a, b in ((HALF, HALF), (HALF, SINGLE), (BF16, HALF), (SINGLE, DOUBLE), (BF16, SINGLE)):
        A, right, C = arguments(1, 3, 4, 5, (a, b, SINGLE))
        assert product(A, right, C=C).dtype == torch.promote_types(a, b)


def assert_is_energy(energy, D):
    """Hold the parts of ``energy`` against the sum of squares of D, which was stored unrounded.

    All terms are positive, so each of the ceil(log2) levels of a tree, or of the at most N additions in a row, costs
    one u; squares and the sum over tiles are a few more. Measured in the interpreter: at most 0.03 of it.
    """
    energy, want = energy.sum(dim=1), D.double().square().sum((1, 2))
    bound = (D.shape[2] + 20) * torch.finfo(energy.dtype).eps * want
    assert ((energy.double() - want).abs() <= bound).all(), ((energy.double() - want).abs() / bound).max()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE], ids=str)
def test_energy_is_of_the_result_before_rounding_and_the_same_every_time(dtype):
    A, right, C = arguments(3, 70, 33, 67, (dtype,) * 3)
    alpha, beta = scales(3)
    D, energy = product(A, right, C=C, alpha=alpha, beta=beta, energy=True, out_dtype=DOUBLE)
    assert energy.ndim == 2 and len(energy) == 3 and energy.dtype == (DOUBLE if dtype == DOUBLE else SINGLE)
    assert_is_energy(energy, D)
    again = product(A, right, C=C, alpha=alpha, beta=beta, energy=True, out_dtype=BF16 if dtype == SINGLE else HALF)[1]
    assert torch.equal(again, energy)


def test_strides_do_not_matter():
    A, right, C = arguments(3, 37, 41, 70)
    alpha, beta = scales(3)

    def gaps(t):
        wide = torch.full([2 * x + 1 for x in t.shape], torch.nan, device=DEVICE, dtype=t.dtype)
        view = wide[1::2, 1::2, 1::2] if t.ndim == 3 else wide[1::2]
        return view.copy_(t)

    def transposed(t):
        return t.mT.contiguous().mT if t.ndim == 3 else t

    def permuted(t):
        return t.permute(1, 2, 0).contiguous().permute(2, 0, 1) if t.ndim == 3 else t

    want = product(A, right, C=C, alpha=alpha, beta=beta)
    for view in (gaps, transposed, permuted):
        got = product(view(A), view(right), C=view(C), alpha=alpha, beta=view(beta))
        assert_is_product(got, A, right, C=C, alpha=alpha, beta=beta)
        assert launch.INTERPRETED <= torch.equal(got, want), view
    one = [t[:1].expand_as(t) for t in (A, right, C, alpha, beta)]
    got = product(one[0], one[1], C=one[2], alpha=one[3], beta=one[4])
    assert torch.equal(got, got[:1].expand_as(got))
    assert launch.INTERPRETED <= torch.equal(got[0], want[0])
    row, scalar = C[:, :1].expand_as(C), torch.tensor(0.5, device=DEVICE).expand(3)
    assert_is_product(product(A, right, C=row, beta=scalar), A, right, C=row, beta=scalar)


def test_one_batch_of_a_factor_may_serve_all_matrices():
    A, right, _ = arguments(3, 20, 30, 40)
    shared = right[:1].expand(3, -1, -1)
    assert_is_product(product(A, shared), A, shared)
    assert_is_product(product(shared.mT, A.mT), shared.mT, A.mT)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("which", range(3), ids="ABC".__getitem__)
def test_offsets_beyond_32_bits(which, dim):
    factors = arguments(3, 3, 3, 3, (HALF,) * 3)
    t = factors[which]
    stride = list(t.stride())
    stride[dim] = 2**30 + 8  # index 2 of this dimension starts at element 2^31 + 16
    size = 1 + sum(2 * x for x in stride)
    # Virtual memory, of which a few pages are touched.
    factors[which] = torch.empty(size, device=DEVICE, dtype=HALF).as_strided((3, 3, 3), stride).copy_(t)
    A, right, C = factors
    assert_is_product(product(A, right, C=C), A, right, C=C)


def test_one_step_along_the_depth_beyond_32_bits():
    A, right, _ = arguments(1, 3, SMALL.k + 1, 3, (HALF,) * 3)
    stride = 2**31 // SMALL.k + 8
    base = torch.empty(stride * SMALL.k + 3, device=DEVICE, dtype=HALF)  # virtual memory, touched on 17 pages
    far = base.as_strided(A.shape, (0, 1, stride)).copy_(A)
    assert_is_product(product(far, right, tile=SMALL), A, right)
    assert_is_product(product(right.mT, far.mT, tile=SMALL), right.mT, A.mT)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, where an infinite value meets a zero
def test_nan_stays_in_its_matrix_row_and_column_and_that_of_the_addend_where_it_is():
    A, right, C = arguments(3, 20, 24, 70)
    want = product(A, right, C=C)
    A[1, 3, 5] = torch.nan
    right[2, 4, 66] = torch.inf
    C[0, 2, 7] = torch.nan
    got = product(A, right, C=C)
    spoilt = torch.zeros_like(got, dtype=torch.bool)
    spoilt[1, 3] = spoilt[2, :, 66] = spoilt[0, 2, 7] = True
    assert torch.equal(got.isfinite(), ~spoilt)
    assert torch.equal(got[~spoilt], want[~spoilt])


def test_a_zero_beta_leaves_the_addend_unread_only_where_it_is_a_number():
    A, right, C = arguments(2, 20, 24, 40)
    C[0] = torch.nan
    assert torch.equal(product(A, right, C=C, beta=0), product(A, right))
    got = product(A, right, C=C, beta=torch.zeros(2, device=DEVICE))
    assert got[0].isnan().all()
    assert torch.equal(got[1], product(A, right)[1])


def test_inputs_are_not_written():
    given = [*arguments(2, 37, 41, 70), *scales(2)]
    before = [t.clone() for t in given]
    A, right, C, alpha, beta = given
    product(A, right, C=C, alpha=alpha, beta=beta, energy=True)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_no_matrices_give_empty_results():
    A, right, C = arguments(0, 5, 6, 7)
    D, energy = product(A, right, C=C, alpha=torch.ones(0, device=DEVICE), energy=True, out_dtype=HALF)
    assert D.shape == (0, 5, 7) and D.dtype == HALF
    assert len(energy) == 0 and energy.dtype == SINGLE


def test_half_operands_are_multiplied_in_half_only_where_both_are(monkeypatch):
    constants = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: constants.append(kwargs))
    for a, b, c in ((HALF,) * 3, (BF16, BF16, SINGLE), (HALF, BF16, HALF), (HALF, SINGLE, HALF), (HALF, HALF, DOUBLE)):
        A, right, C = arguments(1, 4, 4, 4, (a, b, c))
        product(A, right, C=C, precision="tf32")
    bf16 = ("fp32", "tf32") if launch.INTERPRETED else ("bf16", "ieee")  # the interpreter's bfloat16 products are wrong
    assert [str(c["OPERAND"]) for c in constants] == ["fp16", bf16[0], "fp32", "fp32", "fp64"]
    assert [str(c["SUM"]) for c in constants] == ["fp32", "fp32", "fp32", "fp32", "fp64"]
    assert [c["PRECISION"] for c in constants] == ["ieee", bf16[1], "tf32", "tf32", "ieee"]


def test_the_chooser_takes_wide_tiles_where_they_fill_the_gpu_and_are_aligned():
    for dtype, tiles in ((HALF, TILES_HALF), (SINGLE, TILES_FP32), (DOUBLE, TILES_FP64)):
        for B, m, n in ((1, 1, 1), (1, 768, 1), (48, 768, 768), (1, 2816, 4096), (7, 128, 64)):
            for wide in (False, True):
                for precision in launch.PRECISIONS:
                    assert choose_tile(B, m, n, dtype, precision, wide) in tiles
    assert choose_tile(48, 768, 3072, HALF) == TILES_HALF[0]
    assert choose_tile(48, 768, 3072, SINGLE) == TILES_FP32[0]
    assert choose_tile(1, 768, 768, HALF) == choose_tile(500, 768, 64, HALF) == TILES_HALF[1]
    assert choose_tile(48, 768, 3072, HALF, wide=False) == UNALIGNED
    assert choose_tile(48, 768, 3072, SINGLE, wide=False) == choose_tile(1, 64, 64, SINGLE) == TILES_FP32[1]
    assert choose_tile(48, 768, 3072, SINGLE, "ieee") == IEEE


def test_aligned_is_what_triton_can_load_in_16_bytes():
    t = torch.empty(2, 32, 48, dtype=HALF)
    for view in (t, t.mT, t[:, :5], t[:1].expand(7, -1, -1), t[..., 16:], t[..., :3], t[:, :1].expand_as(t)):
        assert aligned(view)
    for view in (t[..., ::2], t[..., 1:], t.permute(2, 0, 1), torch.empty(2, 32, 47), torch.empty(2, 3, 8, dtype=HALF)):
        assert not aligned(view)
        assert not aligned(t, view)


@pytest.mark.parametrize("name", ["A", "B", "C", "alpha", "beta"])
def test_a_wrong_tensor_raises_with_its_name(name):
    A, right, C = arguments(3, 5, 6, 7)
    alpha, beta = scales(3)
    given = {"A": A, "B": right, "C": C, "alpha": alpha, "beta": beta}
    t = given[name]
    for what, wrong in {"shape": t[..., None], "dtype": t.to(torch.int64), "is on": t.to("meta")}.items():
        with pytest.raises(ValueError, match=rf"^{name} (has )?{what}"):
            product(**(given | {name: wrong}))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"A": torch.ones(3, 5, 0)}, r"A has shape \(3, 5, 0\); must be \(batch, m, k\) with m, k >= 1"),
        ({"A": torch.ones(5, 6)}, r"A has shape \(5, 6\)"),
        ({"B": torch.ones(3, 6, 0)}, r"B has shape \(3, 6, 0\); must be \(batch, k, n\) with n >= 1"),
        ({"B": torch.ones(3, 5, 7)}, r"B has shape \(3, 5, 7\); must be \(3, 6, "),
        ({"C": torch.ones(3, 1, 7)}, r"C has shape \(3, 1, 7\); must be \(3, 5, 7\)"),
        ({"alpha": torch.ones(1)}, r"alpha has shape \(1,\); must be \(3,\)"),
        ({"beta": torch.tensor(1.0)}, r"beta has shape \(\); must be \(3,\)"),
        ({"precision": "high"}, r"Invalid precision='high'"),
        ({"out_dtype": torch.int32}, r"Invalid out_dtype=torch.int32: must be one of"),
    ],
)
def test_a_value_out_of_bounds_raises_with_the_bound(change, message):
    A, right, C = arguments(3, 5, 6, 7)
    change = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        product(**({"A": A, "B": right, "C": C} | change))


@pytest.mark.gpu
@pytest.mark.parametrize("operands", [BF16, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_error_is_at_most_twice_that_of_torch(operands, transposed):
    A, right, C = arguments(4, 384, 512, 768, (operands,) * 3)
    if transposed:
        A, right = A.mT.contiguous().mT, right.mT.contiguous().mT
    want, _ = truth_and_size(A, right, C=C, alpha=0.3, beta=-1.7)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        plain = torch.baddbmm(C, A, right, alpha=0.3, beta=-1.7)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    for tile in (None, *(TILES_FP32 if operands == SINGLE else TILES_HALF)):
        got = product(A, right, C=C, alpha=0.3, beta=-1.7, tile=tile)
        assert (got.double() - want).norm() <= 2 * (plain.double() - want).norm()
