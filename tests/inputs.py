"""Weights, gradients and bit-for-bit comparison for the tests of what bad input gets.

The optimizers run on three paths: the reference, the batched step, and the batched step as it runs where the host
must not read the device ("blind": the same code on the CPU with that knowledge taken away).
"""

import math
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import prokl
from prokl.engine import weights

PRO, KL = prokl.ProKLShampoo, prokl.KLShampoo
both = pytest.mark.parametrize("cls", [PRO, KL])
NAN, INF = math.nan, math.inf
VARIANTS = ("pro-klshampoo", "smok-hop", "subspace-only", "complement-only")
METHODS = {
    **{variant: (PRO, {"variant": variant, "rank": 3}) for variant in VARIANTS},
    "klshampoo": (KL, {}),
}
BACKENDS = ("reference", "torch")
PATHS = (*BACKENDS, "blind")
TAU = 3  # steps between refreshes, small enough for a test to reach several


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Value of `backend`; "blind" is the batched step where the host must not read the device."""
    if request.param != "blind":
        return request.param
    forbid_host_reads(monkeypatch)
    return "torch"


HOST_READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "allclose", "masked_select")
HOST_READS = tuple(f"aten::{name}" for name in (*HOST_READS, "_unique2", "repeat_interleave"))
"""Operators of PyTorch that read a value of the device on the host."""
READING_CALLS = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__array__", "__dlpack__")
"""Calls that do, of which CPU tensors show no operator to a dispatch mode."""


def reads_host(func, args):
    """Return True for a call of PyTorch's that would wait for the device to answer, were its tensors there."""
    name = getattr(func, "__name__", "")
    mask = args[1] if name in ("__getitem__", "__setitem__", "index_put_") and len(args) > 1 else None
    by_mask = any(isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(mask))
    to_host = name == "to" and "cpu" in args[1:]
    clock = sys._getframe(2).f_code is weights.clock.__code__  # which lies on the host wherever its weight is
    return (name in READING_CALLS and not clock) or by_mask or to_host


class ForbidCalls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert not reads_host(func, args), func
        return func(*args, **(kwargs or {}))


class ForbidHostReads(TorchDispatchMode):
    """Raises AssertionError where the host would wait for the device, were the tensors there."""

    def __enter__(self):
        self.calls = ForbidCalls()
        self.calls.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self.calls.__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in HOST_READS, func
        return func(*args, **(kwargs or {}))


def forbid_host_reads(monkeypatch):
    """Take from the batched step, and from AdamW's, the knowledge that reading a CPU tensor is free."""
    for module in ("backends.select", "engine.adamw"):
        monkeypatch.setattr(f"prokl.{module}.is_host_readable", lambda device: False)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weight(*shape, seed=0, dtype=torch.float32):
    return torch.nn.Parameter(normal(*shape, seed=1000 + seed, dtype=dtype))


def step(optimizer, weights, gradients):
    for p, g in zip(weights, gradients, strict=True):
        p.grad = None if g is None else g.clone()
    optimizer.step()


def bits(t):
    return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
