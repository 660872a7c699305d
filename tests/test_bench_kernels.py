"""The cases that are compiled, checked and timed: their forms agree, and what is wrong is found to be."""

from dataclasses import replace

import pytest
import torch

from bench.micro import kl_cases, qr_cases
from bench.micro.case import BF16, FP32, FP32_POLAR, FP64, Sizes
from bench.micro.checks import AGREE, Numbers, complaint, disagreement, errors
from bench.micro.kernel_cases import CASES
from bench.micro.primitive_cases import PRIMITIVES
from prokl import ops
from prokl.kernels.launch import INTERPRETED

SIZES = Sizes(2, 24, 40, 8)
CPU = torch.device("cpu")
WITH_KERNELS = [*CASES, *(case for case in PRIMITIVES if case.call is not None and case.verify is None)]


def dtypes_of(case):
    """Those to check in: the interpreter gets half precision wrong."""
    return (FP32_POLAR, *(d for d in case.dtypes if d == FP64)) if INTERPRETED else case.dtypes


PAIRS = [(case, dtypes) for case in WITH_KERNELS for dtypes in dtypes_of(case)]


def inputs(case, dtypes=FP32_POLAR, size=SIZES, device=CPU):
    return lambda: case.inputs(size, dtypes, Numbers(device))


def named(name):
    return next(case for case in (*PRIMITIVES, *CASES) if case.name == name)


@pytest.mark.parametrize("case, dtypes", PAIRS, ids=[f"{case.name}, {dtypes.name}" for case, dtypes in PAIRS])
def test_every_kernel_agrees_with_its_plain_form(case, dtypes):
    device = torch.device("cpu" if INTERPRETED else "cuda")
    size = SIZES if INTERPRETED else Sizes(4, 200, 328, 40)
    fresh = inputs(case, dtypes, size, device)
    assert complaint(case, lambda i: case.dense(case.call(i, None)), fresh) == ""


@pytest.mark.parametrize("size", [SIZES, Sizes(2, 24, 24, 8)], ids=["wide", "square"])
@pytest.mark.parametrize("case", [c for c in PRIMITIVES if c.verify is None], ids=lambda case: case.name)
def test_every_primitive_and_its_counterpart_agree_with_their_plain_forms(case, size):
    for own in (case, case.counterpart):
        fresh = inputs(own, size=size)
        assert disagreement(own, fresh) < AGREE
        assert complaint(own, lambda i, own=own: own.dense(own.torch(i)), fresh) == ""
        assert complaint(own, own.plain or own.torch, fresh) == ""


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter, so a machine without CUDA")
@pytest.mark.parametrize("case", PRIMITIVES, ids=lambda case: case.name)
def test_counterparts_are_right_over_the_table_of_a_gpu_too(case, monkeypatch):
    for module in (kl_cases, qr_cases):
        monkeypatch.setattr(module, "best", lambda device: ops.select("triton", device))
    other = case.counterpart
    run = other.torch if other.call is None else lambda i: other.call(i, None)
    assert complaint(other, run, inputs(other)) == ""


WRONG = {
    "a thousandth": lambda x: 1.001 * x,
    "nan": lambda x: x * float("nan"),
    "rolled": lambda x: x.roll(1, 0),
    "shape": lambda x: x[:1],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_found(wrong):
    case = named("symmetric product")
    assert complaint(case, lambda i: wrong(case.torch(i)), inputs(case)).startswith("error ")


def test_one_wrong_result_of_several_is_found():
    case = named("projection and preconditioning")
    for place in range(4):

        def run(i, place=place):
            found = list(case.torch(i))
            found[place] = found[place] * (1 + 1e-4)
            return found

        error, plain, allowed = errors(case, run, inputs(case))
        assert plain < allowed < error == pytest.approx(1e-4, rel=0.1)


def test_a_plain_form_that_is_another_formula_is_found():
    case = named("Newton-Schulz")
    other = replace(case, plain=lambda i: 1.001 * case.plain(i))
    assert "apart in float64" in complaint(other, other.plain, inputs(case))


def test_a_torch_form_without_a_plain_one_is_the_plain_form():
    case = named("product")
    assert case.plain is None and complaint(case, case.torch, inputs(case)) == ""


def test_half_precision_is_held_to_what_the_plain_form_reaches_in_it():
    case = named("Newton-Schulz")
    (error, plain, allowed), exact = (
        errors(case, lambda i: case.dense(case.torch(i)), inputs(case, d)) for d in (FP32, FP32_POLAR)
    )
    # Five steps of the quintic in bfloat16, of eps 2^-7, and in float32.
    assert 1e-3 < error < allowed < 0.3 and plain < 0.06 and exact[0] < 1e-5


@pytest.mark.parametrize("case", [c for c in (*CASES, *PRIMITIVES) if c.timed], ids=lambda case: case.name)
def test_work_is_counted_per_matrix(case):
    one, two = Sizes(1, 64, 96, 16), Sizes(2, 64, 96, 16)
    for own in filter(None, (case, case.counterpart)):
        assert own.flops(two) == 2 * own.flops(one) >= 0
        assert own.bytes(two, FP32) == 2 * own.bytes(one, FP32) > 0
        assert 0 <= own.polar_flops(one) <= own.flops(one)
    assert case.flops(one) > 0


def test_work_is_that_of_the_formulas():
    s = Sizes(3, 64, 256, 16)
    pre, ns, apply, product, _, tracking, refresh = PRIMITIVES
    # G U, M U, both residuals; P, halved; P G^par S^-1/2; P G^perp.
    assert pre.flops(s) == 3 * (8 * 64 * 256 * 16 + 64 * 64 * 65 + 2 * 64 * 16 * (64 + 32) + 2 * 64 * 64 * 256)
    # Five steps on Gram matrices with a restart every two: 11 m^3 + 9 m^2 n.
    assert ns.flops(s) == ns.polar_flops(s) == 3 * 64**2 * (11 * 64 + 9 * 256)
    assert ns.flops(replace(s, n=64)) == 3 * 64**3 * 5 * 4
    assert apply.flops(s) == 3 * 2 * 64 * 256 * 16 and product.flops(s) == 3 * 64 * 65 * 256
    assert tracking.flops(s) == pytest.approx(3 * (2 * 256 * 16**2 + 16**3 / 3))
    assert refresh.flops(s) == pytest.approx(3 * sum(2 * k**3 + 2 * k**3 + k**3 / 3 for k in (64, 16)))
    both = [case.counterpart.flops(s) for case in (pre, product, tracking)]
    assert both == pytest.approx([3 * 4 * (64**2 * 256 + 64 * 256**2), 3 * 256 * 257 * 64, 3 * (4 + 1 / 3) * 256**3])
    assert product.bytes(s, BF16) == 3 * 4 * (64 * 256 + 64**2)
