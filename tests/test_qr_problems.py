"""Every form of the batched QR on every class of problems that breaks one, within one set of bounds."""

import math

import pytest
import torch

import prokl.algorithm.qr
from tests.inputs import same_bits
from tests.qr_bounds import assert_is_qr, ratios
from tests.qr_forms import EVERY_FORM, FORMS, words
from tests.qr_problems import BASIS, CLASSES, SCALED, draw, poisoned

SIZES = [((3, 60, 12), torch.float32), ((3, 60, 12), torch.float64), ((4, 150, 70), torch.float32)]
"""(B, n, k) and dtype."""
EVERY_SIZE = ("tiny", "huge", "mixed")
"""Classes that differ by dtype, or contain others."""
EDGES = [
    ((3, 60, 1), torch.float32),
    ((3, 60, 1), torch.float64),
    ((3, 12, 12), torch.float64),
    ((4, 70, 70), torch.float32),
]
"""Those of one column, and square ones, which are random."""


def cases():
    """List (operation, form, class, size, dtype): EVERY_SIZE at all sizes, every other class at one, in turn."""
    for operation, forms in FORMS.items():
        for f, form in enumerate(forms):
            for c, name in enumerate(CLASSES[operation]):
                # Spectra cross three bases: with c // 3 every spectrum, and every basis, meets every size in each form.
                sizes = SIZES if name in EVERY_SIZE else [SIZES[(f + c + c // 3) % len(SIZES)]]
                yield from ((operation, form, name, *size) for size in sizes)
            yield from ((operation, form, SCALED[operation], *size) for size in EDGES)


CASES = [*cases()]


@pytest.mark.parametrize("operation, form, name, size, dtype", CASES, ids=words)
def test_every_form_is_a_qr_of_every_class(operation, form, name, size, dtype, form_of):
    inputs = draw(operation, name, size, dtype)
    before = [t.clone() for t in inputs]
    Q = form_of(operation, form)(*inputs)
    assert_is_qr(operation, inputs, Q)
    assert all(map(same_bits, inputs, before))


KEEPING_NONE = {("torch on a device", "coordinates"), *(("torch on a host", operation) for operation in FORMS)}
"""Forms and operations that leave what is not finite so: on a host a step looks at its gradients before."""


@pytest.mark.parametrize("value, dtype", [(math.nan, torch.float32), (math.inf, torch.float64)], ids=str)
@pytest.mark.parametrize("operation, form", EVERY_FORM, ids=words)
def test_what_is_not_finite_stays_in_its_matrix(operation, form, dtype, value, form_of):
    inputs = draw(operation, SCALED[operation], (3, 60, 12), dtype)
    function = form_of(operation, form)
    apart = function(*inputs)
    Q = function(*poisoned(operation, 1, value, inputs))
    assert same_bits(Q[0], apart[0]) and same_bits(Q[2], apart[2])
    # Nothing better is known than the old basis, in whose coordinates a factor that is refreshed is given.
    if operation != "qr" and (form, operation) not in KEEPING_NONE:
        assert same_bits(Q[1], inputs[BASIS[operation]][1] if operation in BASIS else torch.eye(12, dtype=dtype))


# A host that may branch takes the second pass for all matrices of a batch or for none.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=words)
@pytest.mark.parametrize("operation, form", [(o, f) for o, f in EVERY_FORM if f != "torch on a host"], ids=words)
def test_a_matrix_gives_the_same_bits_beside_any_other(operation, form, dtype, form_of):
    function = form_of(operation, form)
    inputs = draw(operation, "mixed", (4, 60, 12), dtype)
    Q = function(*inputs)
    for b in range(4):
        assert same_bits(Q[b : b + 1], function(*(t[b : b + 1] for t in inputs)))


def outside(X, Q):
    """Return how much of X's range, relative to its size, the columns of Q miss."""
    return float(torch.linalg.norm(X - Q @ (Q.mT @ X)) / torch.linalg.norm(X))


@pytest.mark.parametrize("form", FORMS["tracking"], ids=words)
def test_what_a_rank_deficient_matrix_has_is_taken_up_first(form, form_of):
    (X,), (U,) = (draw("qr", name, (2, 30, k), torch.float64) for name, k in (("random", 2), ("condition 1e+02", 6)))
    U = torch.linalg.qr(U)[0].contiguous()
    assert outside(X, U) > 0.5 < outside(X, torch.eye(30, 2, dtype=torch.float64))  # keeping the bases would not do
    V = X @ (X.mT @ U)
    for operation, inputs in (("tracking", (V, U.mT @ V, U)), ("refresh", (X @ X.mT,))):
        assert outside(X, form_of(operation, form)(*inputs)[..., :2]) <= 1e-8  # the shift is about 1e-14 of the factor


@pytest.mark.parametrize("form", ["torch on a device", "extension"], ids=words)
def test_a_rank_deficient_matrix_takes_columns_from_u(form, form_of):
    V, K, U = draw("tracking", "rank-deficient, moving", (2, 60, 12), torch.float64)
    rank = int(torch.linalg.matrix_rank(V[0], rtol=1e-10))
    kept, _ = torch.linalg.qr(torch.cat([V[..., :rank], U], dim=-1))
    # Rounding noise, of which Householder makes them, would have nearly all of its length outside.
    assert 0 < rank < 12 and outside(form_of("tracking", form)(V, K, U), kept) <= 0.05


def test_a_shift_is_relative_to_the_matrix():
    K, shift_of = torch.eye(4, dtype=torch.float64).expand(2, 4, 4), prokl.algorithm.qr.shift_of
    assert torch.allclose(shift_of(1e-20 * K), 1e-20 * shift_of(K), rtol=1e-12, atol=0)


def swapped(Q):
    Q[..., [0, 11]] = Q[..., [11, 0]]


def turned(Q):
    beside = torch.linalg.qr(torch.cat([Q, torch.ones(1, 150, 1)], dim=-1))[0][..., 70]
    Q[..., 69] = 0.5 * Q[..., 69] + 0.75**0.5 * beside


BROKEN = {  # class, size, dtype, what is done to Q, the bounds that it breaks, those that it keeps
    "a length": (
        "random", (2, 60, 12), torch.float64, lambda Q: Q[1, :, 3].mul_(1 + 1e-3), {"orthogonality", "same Q"}, ()
    ),
    "a sign": ("random", (2, 60, 12), torch.float64, lambda Q: Q[1, :, 3].neg_(), {"diagonal", "same Q"}, ()),
    "the order": (
        "random", (1, 60, 12), torch.float64, swapped, {"backward error", "span of 1", "same Q"},
        ("orthogonality", "span of 12"),
    ),
    "a span where the derived bounds say nothing": (
        "condition 1e+04", (1, 150, 70), torch.float32, turned, {"span of 70 as measured"}, ("orthogonality",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_bounds_catch(name):
    of_class, size, dtype, change, broken, held = BROKEN[name]
    inputs = draw("qr", of_class, size, dtype)
    Q = prokl.algorithm.qr.householder_qr(*inputs)
    assert max(ratios("qr", inputs, Q).values()) <= 1
    change(Q)
    found = ratios("qr", inputs, Q)
    assert {key for key, ratio in found.items() if ratio > 1} >= broken and all(found[key] <= 1 for key in held)
    Q[0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="nan"):
        assert_is_qr("qr", inputs, Q)


def test_the_bounds_catch_a_short_column_without_digits():
    inputs = draw("qr", "column scales", (1, 60, 12), torch.float64)
    shortest = inputs[0].norm(dim=-2).argmin()
    wrong = inputs[0].clone()
    wrong[:, :, shortest] += 1e-6 * wrong[:, :, shortest].roll(1, -1)
    # An error of 1e-18 in a matrix of norm 20, which ||A||_F would not show.
    assert ratios("qr", inputs, prokl.algorithm.qr.householder_qr(wrong))["backward error"] > 1
