"""Every stage, part of one and operation that a backend overrides, beside what it stands for in float64.

Both take what a step or a refresh over the backend gives them, in the states that the microbenchmarks start from.
"""

import functools

import pytest
import torch

from bench.micro.case import FP32_POLAR, FP64, Sizes, doubled, flat, numbers
from bench.micro.stages import SURPRISING, copied, kl_inputs, noted, pro_inputs
from prokl.algorithm.algebra import Direction
from prokl.backends import torch_ops, torch_pairs, triton_ops, triton_pairs
from prokl.kernels.launch import INTERPRETED
from prokl.pair import RESIDUAL
from tests.problems import largest

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = Sizes(2, 9, 21, 4)
INPUTS = {"pro-klshampoo": pro_inputs, "kl-shampoo": kl_inputs}
BACKENDS = {"triton": triton_ops, "triton, pairs": triton_pairs, "torch, pairs": torch_pairs}


def stages(module, method):
    where = (False, INTERPRETED) if module in (triton_ops, triton_pairs) else (False,)
    return module.STAGES[method](*where)


def overridden(module):
    """Names of the operations that a backend has of its own."""
    classes = {cls for method in INPUTS for cls in type(stages(module, method)).__mro__}
    found = {key for cls in classes if cls.__module__ == module.__name__ for key in vars(cls)}
    return sorted(key for key in found - {"name", "rounding"} if not key.startswith("_"))


@functools.cache
def called(backend, method):
    """(name, arguments, result) of every operation of a backend's in a step with a surprising gradient."""
    module = BACKENDS[backend]
    own, dtypes = stages(module, method), FP64 if module is triton_ops else FP32_POLAR
    i = INPUTS[method](SIZES, dtypes, numbers(DEVICE), SURPRISING)
    calls = noted(own, [name for name in overridden(module) if hasattr(own, name)], i)
    L, Q_L = i["state"]["L"], i["state"]["Q_L"]
    return [*calls, ("congruence", ((L, Q_L), {}), own.congruence(L, Q_L))]  # which is for the extension's refresh


def off(name, found, wanted):
    """By how much results are off by norm; what comes in parts is added up before."""
    if name == "whiten":  # the factor is left to the next operation, or not
        found, wanted = (Direction(X, scale).dense() for X, scale in (found, wanted))
    errors = []
    for x, y in zip(flat(found), flat(wanted), strict=True):
        x = x if x.shape == y.shape else x.sum(1, keepdim=x.ndim == y.ndim)
        errors.append(float((x.double() - y).norm() / y.norm()))
    return largest(errors)


@pytest.mark.parametrize("backend, name", [(b, name) for b, own in BACKENDS.items() for name in overridden(own)])
def test_what_a_backend_overrides_is_its_default_in_float64_but_for_what_pairs_lose(backend, name):
    """A pair is off by 2^-17 of an entry; U as one half, on its own, by 2^-9."""
    errors = []
    for method in INPUTS:
        plain = stages(torch_ops, method)
        if not hasattr(plain, name):  # a part of what kernels override
            plain = stages(triton_ops, method)
        for key, given, found in called(backend, method):
            if key == name:
                args, kwargs = doubled(copied(given))
                errors.append(off(name, found, getattr(plain, name)(*args, **kwargs)))
    print(f"{backend}: {name}, at most {largest(errors):.1e}")
    assert largest(errors) <= (1e-12 if backend == "triton" else 2**-8 if name == "right_factor" else 2**-14)


def test_pairs_take_a_larger_residual_for_rounding():
    plain, *paired = (stages(module, "pro-klshampoo") for module in (torch_ops, triton_pairs, torch_pairs))
    for own in paired:
        assert own.noise(21, torch.float32, torch.float32) == RESIDUAL**2
    assert plain.noise(21, torch.float32, torch.float32) < RESIDUAL**2
