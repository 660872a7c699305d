"""Every operation that a backend overrides, beside what it stands for in float64.

Both take what a step or a refresh over the backend gives them, in the states that the microbenchmarks start from.
"""

import functools

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bench.micro.case import FP32_POLAR, FP64, Sizes, flat, numbers, widened
from bench.micro.states import OPTIMIZER, kl_inputs, pro_inputs, settings
from prokl.algorithm import klshampoo, pro_klshampoo
from prokl.algorithm.algebra import Algebra, Direction
from prokl.algorithm.settings import hyper
from prokl.backends import torch_pairs, triton_ops
from prokl.kernels.launch import INTERPRETED
from prokl.pair import RESIDUAL
from tests.problems import VARIANTS, largest

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = Sizes(2, 9, 21, 4)
SURPRISING = 10.0
"""Times a usual gradient, so that each is bounded, and otherwise than the next."""
BACKENDS = {
    "triton": triton_ops.TritonAlgebra(use_cuda_qr=False, host_readable=INTERPRETED),
    "triton, pairs": triton_ops.PairedTritonAlgebra(use_cuda_qr=False, host_readable=INTERPRETED),
    "torch, pairs": torch_pairs.PairedAlgebra(host_readable=False),
}
PLAIN = Algebra(host_readable=False)


def overridden(ops):
    own = {*vars(type(ops))}
    shared = {"momentum", "projections", "track"} if ops is BACKENDS["triton, pairs"] else set()  # but for its pairs
    others = {"name", "noise", "pairs", "second_stream", "product_as_factor"}  # the last one where QR is a GPU's
    return sorted(key for key in own - others | shared if not key.startswith("_"))


def copied(given):
    """Arguments with tensors of their own, as an operation may overwrite them."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)


@functools.cache
def called(backend):
    """(name, arguments, result) of every operation of a backend's in all methods' steps, with surprising gradients."""
    calls, own = [], type(BACKENDS[backend])

    def noting(name):
        def operation(self, *args, **kwargs):
            given = copied((args, kwargs))
            found = getattr(super(noted, self), name)(*args, **kwargs)
            calls.append((name, given, copied(found)))
            return found

        return operation

    noted = type("Noted", (own,), {name: noting(name) for name in overridden(BACKENDS[backend])})
    ops = object.__new__(noted)
    ops.__dict__ |= BACKENDS[backend].__dict__
    dtypes = FP64 if backend == "triton" else FP32_POLAR
    cases = [(pro_klshampoo, pro_inputs, settings(variant=v, ns_dtype=dtypes.polar)) for v in VARIANTS]
    kl_settings = hyper(OPTIMIZER.defaults, 1, 2, torch.float32, torch.device("cpu"))
    for module, inputs, h in (*cases, (klshampoo, kl_inputs, kl_settings)):
        i = inputs(SIZES, dtypes, numbers(DEVICE), SURPRISING)
        one = torch.ones_like(i["G"][:, 0, 0])
        module.whitened_size(ops, i["G"], copied(i["state"]), h)
        module.step(ops, i["G"], copied(i["state"]), h, one, None)
        module.refresh(ops, i["state"])
    return calls


def off(name, found, wanted):
    """Return the relative error of results by norm; what comes in parts is added up before."""
    if name == "momentum" and found[1] is not None:  # the factor is left to the next operation, or not
        found, wanted = (
            [M, Direction(X.whole() if hasattr(X, "whole") else X, scale)] for M, X, scale in (found, wanted)
        )
    if name == "subspace_parts" and isinstance(found[1], tuple):  # with its energies
        found = [found[0], found[1][0], *found[2:]]
    errors = []
    for x, y in zip(flat(found), flat(wanted), strict=True):
        x = x if x.shape == y.shape else x.sum(1, keepdim=x.ndim == y.ndim)
        errors.append(float((x.double() - y).norm() / y.norm()))
    return largest(errors)


@pytest.mark.parametrize("backend, name", [(b, name) for b, ops in BACKENDS.items() for name in overridden(ops)])
def test_a_backends_operation_is_its_default_in_float64(backend, name):
    """A pair is off by 2^-17 of an entry; U as one half, on its own, by 2^-9."""
    errors = []
    for key, given, found in called(backend):
        if key == name:
            args, kwargs = widened(copied(given))
            if name == "bounded_product" and isinstance(args[1], tuple):
                args = args[0], args[1][0]
            errors.append(off(name, found, getattr(PLAIN, name)(*args, **kwargs)))
    print(f"{backend}: {name}, {len(errors)} times, at most {largest(errors):.1e}")
    assert largest(errors) <= (1e-12 if backend == "triton" else 2**-8 if name == "rounded" else 2**-14)


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if "pairs" in backend])
def test_balanced_steps_round_what_l_averages_and_what_newton_schulz_stands_beside(backend, monkeypatch):
    i, ops, found = pro_inputs(SIZES, FP32_POLAR, numbers(DEVICE)), BACKENDS[backend], {}

    def noting(name, own):
        def operation(left, right, *args, **kwargs):
            found[name] = [getattr(x, "dtype", "pair") for x in (left, right)]
            return own(left, right, *args, **kwargs)

        return operation

    for name in ("symmetric_products", "track", "bounded_product"):
        monkeypatch.setattr(ops, name, noting(name, getattr(ops, name)))
    bf16 = torch.bfloat16
    for variant, of_left in (("pro-klshampoo", bf16), ("subspace-only", "pair")):
        h = settings(variant=variant)
        pro_klshampoo.step(ops, i["G"], copied(i["state"]), h, torch.ones_like(i["G"][:, 0, 0]), None)
        assert found["symmetric_products"] == [bf16, bf16] and found["track"] == [bf16, "pair"]
        assert found["bounded_product"][0] == of_left


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_polynomial_with_a_shift_has_it_on_its_diagonal(backend):
    A = torch.randn(2, 9, 9, dtype=torch.float32, device=DEVICE)
    D, shifted = (BACKENDS[backend].symmetric_polynomial(A, A, C=A @ A.mT, beta=0.5, shift=s) for s in (None, 2.5))
    assert torch.allclose(shifted, D + 2.5 * torch.eye(9, device=DEVICE), rtol=1e-6)


def test_a_shift_in_bfloat16_is_rounded_with_what_it_is_added_to():
    """3.4445 is 3.4375 in bfloat16, and PyTorch would add that; 0.004 makes the sum 3.453125, not 3.4375."""
    A, C = torch.zeros(1, 9, 9, dtype=torch.bfloat16), torch.full((1, 9, 9), 0.004, dtype=torch.bfloat16)
    given = {"C": C, "alpha": 1.0, "beta": 1.0, "shift": 3.4445}
    for D in (PLAIN.symmetric_polynomial(A, A, **given), PLAIN.shifted_polynomial(A, A, **given)[1]):
        assert (D.diagonal(dim1=1, dim2=2) == 3.453125).all()


def test_pairs_take_a_larger_residual_for_rounding():
    for backend, ops in BACKENDS.items():
        noise = ops.noise(21, torch.float32, torch.float32)
        assert noise == RESIDUAL if "pairs" in backend else noise < RESIDUAL
