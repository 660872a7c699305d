"""Contexts change no bit of a step: default dtype and device, autocast, no_grad, torch.compile.

"meta" stands for a GPU as the default device: what lands there has no values, and cannot be pinned.
"""

import copy
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import prokl
from prokl import diagnostics
from prokl.algorithm.shapes import MatrixShape
from prokl.backends.pointers import PointerTable
from prokl.distributed.waves import not_finite
from tests.inputs import KL, NAN, PRO, both, normal, weight
from tests.training import differences, gradients, named, same

SETTINGS = {
    "Pro-KLShampoo": (PRO, torch.float32, {"rank": 3}),
    "Pro-KLShampoo, float64": (PRO, torch.float64, {"rank": 3}),
    "Pro-KLShampoo, rounded at random": (PRO, torch.bfloat16, {"rank": 3}),
    "Pro-KLShampoo, master": (PRO, torch.bfloat16, {"rank": 3, "bf16_weights": "master"}),
    "Pro-KLShampoo, reference": (PRO, torch.float32, {"rank": 3, "backend": "reference"}),
    "Pro-KLShampoo, paper": (PRO, torch.float32, {"rank": 3, **prokl.PAPER}),
    "Smok-Hop": (PRO, torch.float32, {"rank": 3, "variant": "smok-hop"}),
    "KL-Shampoo": (KL, torch.float32, {}),
    "KL-Shampoo, reference": (KL, torch.float32, {"backend": "reference"}),
}


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND = {
    "default device": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
}


def trained(setting, around):
    """Train within a context, by way of a checkpoint; return the optimizer and what is seen of it there."""
    cls, dtype, settings = SETTINGS[setting]
    weights = named((6, 9), (9, 6), (3, 4, 5), (6, 4), dtype=dtype)
    groups = [{"params": weights[:3]}, {"params": weights[3:], "split": 2}]
    groups.append({"params": [("bias", weight(5))], "algorithm": "adamw", "lr": 0.01})
    everyone = [p for group in groups for _, p in group["params"]]
    given = [gradients(everyone, t) for t in range(8)]
    given[3][0].fill_(NAN)
    with around():
        optimizer = cls(groups, lr=0.02, precondition_frequency=3, **settings)
        for t, own in enumerate(given):
            for p, G in zip(everyone, own, strict=True):
                p.grad = G
            optimizer.step()
            if t == 4:
                loaded = copy.deepcopy(optimizer.state_dict())
                assert all(t.device.type == "cpu" for own in loaded["state"].values() for t in own.values())
                optimizer.load_state_dict(loaded)
        seen = [optimizer.skipped(), optimizer.clipped(), diagnostics.scalars(optimizer), diagnostics.phi(optimizer)]
    return optimizer, seen


@pytest.fixture(scope="module")
def plain():
    """Return what each setting comes to in no context."""
    return {setting: trained(setting, nullcontext) for setting in SETTINGS}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_surrounds_a_step_changes_nothing(setting, around, plain):
    optimizer, seen = trained(setting, around)
    expected, told = plain[setting]
    assert differences(optimizer, expected) <= {(4, "step")}  # AdamW's own count is of the default dtype
    for own, other in zip(seen, told, strict=True):
        assert own.keys() == other.keys()
        assert all(same(value, other[key]) for key, value in own.items())


def test_pointers_for_kernels_are_made_on_the_host():
    """No step above uses these."""
    W, table = normal(2, 3, 4), PointerTable(2, "cpu")
    with torch.device("meta"):
        table.update([W], [2])
    assert table.table[0].tolist() == [W.data_ptr(), W.data_ptr() + 3 * 4 * W.element_size()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ranks_answers_about_a_missing_gradient_add_up(dtype):
    """A sum over ranks of unlike dtypes hangs, or adds bits of other numbers.

    It is made where the weight is: a divided step would wait for a copy from the host.
    """
    shape, p = MatrixShape(2, 3, 4), torch.empty(2, 3, 4, device="meta")
    with default_dtype(dtype):
        found = [not_finite(SimpleNamespace(stand_in=one, shapes=[shape], p=p)) for one in (None, weight(2, 3, 4))]
        found.append(not_finite(SimpleNamespace(stand_in=SimpleNamespace(grad=normal(2, 3, 4)), shapes=[shape], p=p)))
    assert {flags.dtype for flags in found} == {torch.float32}
    assert [flags.device.type for flags in found] == ["meta", "meta", "cpu"]


def small(cls):
    """A model with matrices and vectors, its optimizer, and a function of its loss, which makes gradients."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)), torch.randn(16, 8)
    optimizer = cls(prokl.param_groups(model, lr=0.01, adamw_lr=1e-3, matrix=["2.weight"]))

    def loss():
        optimizer.zero_grad()
        outputs = model(x)
        outputs.float().square().mean().backward()
        return outputs.detach()

    return optimizer, loss


@both
def test_a_compiled_function_that_steps_is_exact(cls):
    """Beside an AdamW group, whose steps are tensors: Dynamo would take those of the matrices for such."""
    ends = []
    for compiled in (False, True):
        optimizer, loss = small(cls)

        def update(optimizer=optimizer, loss=loss):
            outputs = loss()
            optimizer.step()
            return outputs

        update = torch.compile(update, backend="eager") if compiled else update
        ends.append(([update() for _ in range(4)], optimizer))
    (one, plain), (other, compiled) = ends
    assert all(map(torch.equal, one, other)) and differences(plain, compiled) == set()


@pytest.mark.parametrize("on", [False, True])
def test_a_closure_keeps_the_autocast_around_the_step(on):
    optimizer, loss = small(PRO)
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        assert optimizer.step(loss).dtype == (torch.bfloat16 if on else torch.float32)


@pytest.mark.slow
def test_importing_the_package_brings_nothing_large():
    large = "[m for m in sys.modules if m.split('.')[0] in ('triton', 'matplotlib')]"
    code = f"""
import sys, prokl
assert not {large} and "torch._dynamo" not in sys.modules and not [m for m in sys.modules if "kernels" in m]
assert not prokl.engine.engine.torch.cuda.is_initialized()
prokl.ops.explain(None, "cpu"), prokl.ops.explain_qr("cpu"), prokl.cuda_qr.qr, prokl.diagnostics.scalars
assert not {large}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WITHOUT_DISTRIBUTED = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name == "torch._C" else None
        if spec is not None:
            load = spec.loader.exec_module
            def exec_module(module):
                load(module)
                for made in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                    vars(module).pop(made, None)
            spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Without)
import torch
assert not torch.distributed.is_available()
import prokl
p = torch.nn.Parameter(torch.eye(4, 6))
optimizer = prokl.ProKLShampoo([p])
for _ in range(2):
    p.grad = torch.eye(4, 6)
    optimizer.step()
optimizer.load_state_dict(optimizer.gather_state_dict())
assert optimizer.state[p]["step"] == 1
"""


@pytest.mark.slow
def test_a_torch_that_was_built_without_ranks_is_enough():
    """Builds for some embedded boards and for AMD's GPUs on Windows are such."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_DISTRIBUTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextmanager
def matmul_precision(how):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(how)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("cls, own", [(PRO, {"ns_dtype": torch.float32}), (KL, {})])
def test_a_cpus_products_are_of_float32_or_a_warning_says_so(cls, own, backend):
    """Torch asks oneDNN for products of this size; rounding to bfloat16 would leave 1e-2, another order 1e-6."""
    found, warned = [], []
    for how in ("highest", "medium"):
        with matmul_precision(how), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            W = weight(192, 256)
            optimizer = cls([W], lr=1.0, backend=backend, **own)
            for t in range(3):
                W.grad = normal(192, 256, seed=t)
                optimizer.step()
        found.append(W.detach())
        warned.append([w for w in caught if "set_float32_matmul_precision" in str(w.message)])
    assert not warned[0]
    assert warned[1] or (found[1] - found[0]).norm() < 1e-4 * (found[0] - weight(192, 256).detach()).norm()


@pytest.mark.parametrize("how, warns", [("medium", True), ("high", True), ("highest", False)])
def test_a_cpu_that_rounds_factors_of_products_is_warned_about(how, warns, monkeypatch):
    """An AMX unit is one that does: its products are those of factors in bfloat16."""
    exact = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: exact(a.bfloat16().float(), b.bfloat16().float()))
    with matmul_precision(how), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PRO([weight(4, 6)])
        PRO([weight(4, 6, dtype=torch.float64)])
    assert ["set_float32_matmul_precision" in str(w.message) for w in caught] == [True] * warns
