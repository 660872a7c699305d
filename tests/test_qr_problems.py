"""Every form of the batched QR on every class of problems that breaks one, within one set of bounds."""

import math
import zlib

import pytest
import torch

import prokl.backends.qr
from tests.inputs import same_bits
from tests.qr_bounds import assert_is_qr, condition, ratios
from tests.qr_forms import EVERY_FORM, FORMS, words
from tests.qr_problems import CLASSES, PLAIN, SCALED, poisoned

DTYPES = [torch.float32, torch.float64]
SIZES = [((3, 60, 12), torch.float32), ((3, 60, 12), torch.float64), ((4, 150, 70), torch.float32)]
"""(B, n, k) and dtype."""
EVERY_SIZE = ("tiny", "huge", "mixed", "one column", "square")
"""Classes that differ by size or dtype, or contain others."""


def cases():
    """List (operation, form, class, size, dtype): EVERY_SIZE at all sizes, every other class at one, in turn."""
    return [
        (operation, form, name, *size)
        for operation, forms in FORMS.items()
        for f, form in enumerate(forms)
        for c, name in enumerate(CLASSES[operation])
        # Spectra cross three bases: with c // 3 every spectrum, and every basis, meets every size in each form.
        for size in (SIZES if name.split(",")[0] in EVERY_SIZE else [SIZES[(f + c + c // 3) % len(SIZES)]])
    ]


CASES = cases()


def draw(operation, name, size, dtype):
    # Not hash(), which differs from process to process.
    seed = zlib.crc32(f"{operation} {name}".encode())
    return CLASSES[operation][name](*size, dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("operation, form, name, size, dtype", CASES, ids=words)
def test_every_form_is_a_qr_of_every_class(operation, form, name, size, dtype, form_of):
    inputs = draw(operation, name, size, dtype)
    before = [t.clone() for t in inputs]
    Q = form_of(operation, form)(*inputs)
    assert_is_qr(operation, inputs, Q)
    assert all(map(same_bits, inputs, before))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=words)
@pytest.mark.parametrize("operation, form", EVERY_FORM, ids=words)
def test_what_is_not_finite_stays_in_its_matrix(operation, form, dtype, value, form_of):
    inputs = draw(operation, SCALED[operation], (3, 60, 12), dtype)
    function = form_of(operation, form)
    apart = function(*inputs)
    Q = function(*poisoned(operation, 1, value, inputs))
    assert same_bits(Q[0], apart[0]) and same_bits(Q[2], apart[2])


# A host that may branch takes the second pass for all matrices of a batch or for none.
@pytest.mark.parametrize("dtype", DTYPES, ids=words)
@pytest.mark.parametrize("operation, form", [(o, f) for o, f in EVERY_FORM if f != "torch on a host"], ids=words)
def test_on_a_device_a_matrix_gives_the_same_bits_alone_as_beside_any_other(operation, form, dtype, form_of):
    function = form_of(operation, form)
    inputs = draw(operation, "mixed", (4, 60, 12), dtype)
    Q = function(*inputs)
    for b in range(4):
        assert same_bits(Q[b : b + 1], function(*(t[b : b + 1] for t in inputs)))


@pytest.mark.parametrize("scale, broken", [(1 + 1e-3, "orthogonality"), (-1, "diagonal")])
def test_the_bounds_catch_wrong_lengths_and_signs(scale, broken):
    inputs = draw("qr", "random", (2, 60, 12), torch.float64)
    Q = prokl.backends.qr.householder_qr(*inputs)
    assert max(ratios("qr", inputs, Q).values()) <= 1
    Q[1, :, 3] *= scale
    found = ratios("qr", inputs, Q)
    assert found[broken] > 1 and found["same Q"] > 1
    with pytest.raises(AssertionError, match=broken):
        assert_is_qr("qr", inputs, Q)


def test_the_bounds_catch_columns_in_another_order():
    inputs = draw("qr", "random", (1, 60, 12), torch.float64)
    Q = prokl.backends.qr.householder_qr(*inputs)
    Q[..., [0, 11]] = Q[..., [11, 0]]
    found = ratios("qr", inputs, Q)
    assert found["orthogonality"] <= 1 and found["span of 12"] <= 1
    assert found["backward error"] > 1 and found["span of 1"] > 1 and found["same Q"] > 1


def test_the_bounds_catch_a_turned_span_where_the_derived_ones_say_nothing():
    inputs = draw("qr", "condition 1e+04", (1, 150, 70), torch.float32)
    Q = prokl.backends.qr.householder_qr(*inputs)
    assert 0 < ratios("qr", inputs, Q)["span of 70 as measured"] <= 1
    beside = torch.linalg.qr(torch.cat([Q, torch.ones(1, 150, 1)], dim=-1))[0][..., 70]
    Q[..., 69] = 0.5 * Q[..., 69] + 0.75**0.5 * beside
    found = ratios("qr", inputs, Q)
    assert found["orthogonality"] <= 1 and found["span of 70 as measured"] > 1


def test_the_bounds_catch_a_short_column_without_digits():
    inputs = draw("qr", "column scales", (1, 60, 12), torch.float64)
    shortest = inputs[0].norm(dim=-2).argmin()
    inputs[0][:, :, shortest] += 1e-6 * inputs[0][:, :, shortest].roll(1, -1)
    Q = prokl.backends.qr.householder_qr(*inputs)
    inputs[0][:, :, shortest] -= 1e-6 * inputs[0][:, :, shortest].roll(1, -1)
    # An error of 1e-18 in a matrix of norm 20, which ||A||_F would not show.
    assert ratios("qr", inputs, Q)["backward error"] > 1


def test_the_bounds_catch_a_nan():
    inputs = draw("qr", "random", (2, 60, 12), torch.float64)
    Q = prokl.backends.qr.householder_qr(*inputs)
    Q[0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="nan"):
        assert_is_qr("qr", inputs, Q)


@pytest.mark.parametrize("cond", [1e2, 1e4, 1e6, 1e8])
def test_the_classes_have_the_condition_that_they_are_named_after(cond):
    (A,) = draw("qr", f"condition {cond:.0e}", (2, 60, 12), torch.float64)
    assert torch.linalg.cond(A).tolist() == pytest.approx([cond, cond], rel=1e-6)  # 1e8 eps is 2e-8


def test_singular_classes_are_singular_in_the_dtype_and_the_others_are_not():
    eps = torch.finfo(torch.float32).eps
    singular = {
        name for name in PLAIN if min(condition("qr", draw("qr", name, (2, 60, 12), torch.float64))) * 12 * eps >= 1
    }
    assert singular == {"rank-deficient", "zero column", "zero", "condition 1e+06", "condition 1e+08"}
