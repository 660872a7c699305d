"""The eigenvalue EMA kernel against a float64 transcription of Algorithm 2 (3).

B: matrices; M: short side; N: long side; R: rank.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import prokl
from prokl.backends.torch_ops import TorchPrimitives
from prokl.kernels.eigenvalue_ema import TILE, eigenvalue_ema
from prokl.kernels.launch import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
STATE = ("inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_mu")
STATISTICS = ("ell", "rho", "e_res")
PER_WEIGHT = ("eps", "ceiling_L", "ceiling_S", "ceiling_mu")
SIZES = [(1, 1, 2, 1), (3, 5, 9, 4), (2, 70, 130, 33), (2, 2 * TILE + 77, 2 * TILE + 300, TILE + 1)]  # B, M, N, R


def arguments(B, M, N, R, *, state=torch.float32, statistics=torch.float32, seed=0):
    """Arguments for which about half of the new values are clipped, some are damped, and all are of order one."""
    g = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape, dtype):
        return (low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)).to(DEVICE, dtype)

    shapes = {"L": (B, M), "S": (B, R), "mu": (B,)}
    tensors = {
        "inv_sqrt_lambda_L": uniform(0.5, 4, *shapes["L"], dtype=state),
        "inv_sqrt_lambda_S": uniform(0.5, 4, *shapes["S"], dtype=state),
        "inv_sqrt_mu": uniform(0.5, 4, B, dtype=state),
        "ell": uniform(0, N, *shapes["L"], dtype=statistics),
        "rho": uniform(0, 1, *shapes["S"], dtype=statistics),
        "e_res": uniform(0, N, *shapes["L"], dtype=statistics),
        "eps": uniform(0, 0.3, B, dtype=statistics),
        "ceiling_L": uniform(1, 2, B, dtype=statistics),
        "ceiling_S": uniform(1, 2, B, dtype=statistics),
        "ceiling_mu": uniform(0.5, 2, B, dtype=statistics),
    }
    return tensors | {"beta2": 0.95, "n": N}


def call(function, a):
    return function(*(a[k] for k in STATE + STATISTICS), **{k: a[k] for k in a if k not in STATE + STATISTICS})


def with_tensors(a, change):
    return {k: change(v) if isinstance(v, torch.Tensor) else v for k, v in a.items()}


def transcription(a):
    """The update as Algorithm 2 (3) with (P2) reads, one eigenvalue after another in Python floats."""
    new_L, new_S, new_mu = [], [], []
    a = with_tensors(a, lambda t: t.double().tolist())
    keep, gain, n = a["beta2"], 1 - a["beta2"], a["n"]
    for b, eps in enumerate(a["eps"]):

        def damped(s, eps=eps):
            return 1 / (1 / s + eps)

        def clipped(x, ceiling):
            return min(x**-0.5, ceiling)

        s_L, s_S, s_mu = (a[k][b] for k in STATE)
        ell, rho, e_res = (a[k][b] for k in STATISTICS)
        m, r = len(s_L), len(s_S)
        new_L.append(
            [
                clipped(keep / s**2 + gain * (x + damped(s_mu) ** 2 * e) / n, a["ceiling_L"][b])
                for s, x, e in zip(s_L, ell, e_res, strict=True)
            ]
        )
        new_S.append([clipped(keep / s**2 + gain * x, a["ceiling_S"][b]) for s, x in zip(s_S, rho, strict=True)])
        tail = math.fsum(e * damped(s) ** 2 for s, e in zip(new_L[-1], e_res, strict=True)) / (m * (n - r))
        new_mu.append(clipped(keep / s_mu**2 + gain * tail, a["ceiling_mu"][b]))
    return [torch.tensor(x, dtype=torch.float64) for x in (new_L, new_S, new_mu)]


def bounds(m, dtype):
    """Relative error bounds of (L, S, mu), in unit roundoffs u, first order, for terms that are all >= 0.

    Each correctly rounded operation adds 1 u, x^-1/2 halves what x carries, min adds nothing, and beta2, 1 - beta2,
    n and m (n - r) are rounded once.
    S: keep / s^2 3, gain * rho 2, their sum 4, then 4 / 2 + 2 for square root and reciprocal: 4.
    L: damping 3, its square times e_res 8, plus ell 9, over n 11, times gain 13, sum 14, then 14 / 2 + 2: 9.
    mu: damping of L 12, its square times e_res 26, sum 26 + k, over m (n - r) 28 + k, times gain 30 + k, sum
    31 + k, then half of it + 2. k is the longest chain of additions: one a tile, then log2(TILE) = 9 on the GPU,
    at most 22 in NumPy's pairwise sum.
    The transcription's own rounding adds less than as much again, which only shows in float64.
    Measured over SIZES and four seeds: at most 0.32, 0.53 and 0.05 of these bounds.
    """
    u = torch.finfo(dtype).eps / 2
    k = math.ceil(m / TILE) + 22
    return [c * u * (2 if dtype == torch.float64 else 1) for c in (9, 4, (31 + k) / 2 + 2)]


def assert_within_bounds(got, truth, m):
    for name, x, y, bound in zip("L S mu".split(), got, truth, bounds(m, got[0].dtype), strict=True):
        error = ((x.double().cpu() - y) / y).abs().max().item()
        assert error <= bound, f"{name}: relative error {error:.2e} above {bound:.2e}"


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("state", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_the_transcription_for_every_storage_dtype(state, size):
    a = arguments(*size, state=state)
    for scale in (1, 100):  # many values clipped, and none
        b = a | {k: scale * a[k] for k in ("ceiling_L", "ceiling_S", "ceiling_mu")}
        got = call(eigenvalue_ema, b)
        assert {x.dtype for x in got} == {torch.float64 if state == torch.float64 else torch.float32}
        assert_within_bounds(got, transcription(b), size[1])


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("statistics", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_statistics_may_have_another_dtype_than_the_state(statistics):
    a = arguments(3, 37, 64, 11, statistics=statistics)
    got = call(eigenvalue_ema, a)
    assert got[0].dtype == (torch.float64 if statistics == torch.float64 else torch.float32)
    assert_within_bounds(got, transcription(a), 37)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_the_pytorch_primitive(size):
    a = arguments(*size, state=torch.float64, statistics=torch.float64)
    assert_within_bounds(
        call(eigenvalue_ema, a), [x.cpu() for x in call(TorchPrimitives(True).eigenvalue_ema, a)], size[1]
    )


@pytest.mark.filterwarnings("ignore:divide by zero")  # NumPy's, in lanes that are masked
@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.999])
def test_beta2_weighs_old_against_new(beta2):
    a = arguments(2, 6, 9, 3) | {"beta2": beta2}
    assert_within_bounds(call(eigenvalue_ema, a), transcription(a), 6)


def test_float64_scalars_are_not_rounded_to_float32():
    # 0.95 in float32 is off by 1e-8, which would be 1e8 times the bound.
    a = arguments(2, 6, 9, 3, state=torch.float64, statistics=torch.float64) | {"n": 2**24 + 1, "beta2": 0.95}
    assert_within_bounds(call(eigenvalue_ema, a), transcription(a), 6)


@pytest.mark.filterwarnings("ignore:divide by zero")  # NumPy's, where an infinite value is clipped
def test_clips_hold_values_at_exactly_the_ceiling():
    a = arguments(3, 40, 60, 20)
    for x, ceiling in zip(call(eigenvalue_ema, a), ("ceiling_L", "ceiling_S", "ceiling_mu"), strict=True):
        c = a[ceiling].reshape(-1, *[1] * (x.ndim - 1)).expand_as(x)
        assert (x <= c).all()
        assert 0 < (x == c).sum() < x.numel()  # the ceiling acts on some and not on others
    zero = a | {k: torch.zeros_like(a[k]) for k in STATISTICS} | {"beta2": 0.0}
    for x, ceiling in zip(call(eigenvalue_ema, zero), ("ceiling_L", "ceiling_S", "ceiling_mu"), strict=True):
        assert (x == a[ceiling].reshape(-1, *[1] * (x.ndim - 1))).all()


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # NumPy's, in lanes that are masked
def test_masked_lanes_do_not_reach_the_sum_even_without_ceilings():
    a = arguments(2, 5, 9, 4) | {"beta2": 0.0}
    a |= {k: torch.full_like(a[k], math.inf) for k in ("ceiling_L", "ceiling_S", "ceiling_mu")}
    assert_within_bounds(call(eigenvalue_ema, a), transcription(a), 5)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_dead_weight_keeps_its_values_bit_for_bit(state):
    a = arguments(4, 37, 64, 11, state=state)
    undisturbed = call(eigenvalue_ema, a)
    active = torch.tensor([True, False, True, False], device=DEVICE)
    for k in STATISTICS:
        a[k][~active] = math.nan
    a["ell"][1] = math.inf
    got = call(eigenvalue_ema, a | {"active": active})
    for x, old, new in zip(got, (a[k] for k in STATE), undisturbed, strict=True):
        assert torch.equal(x[~active], old[~active].to(x.dtype))
        assert torch.equal(x[active], new[active])
    for x, new in zip(
        call(eigenvalue_ema, arguments(4, 37, 64, 11, state=state) | {"active": None}), undisturbed, strict=True
    ):
        assert torch.equal(x, new)


def test_a_live_weight_shows_nan_statistics_and_leaves_the_others_alone():
    a = arguments(2, 5, 9, 4)
    undisturbed = call(eigenvalue_ema, a)
    a["e_res"][1, 2] = math.nan
    got = call(eigenvalue_ema, a)
    assert torch.isnan(got[0][1]).tolist() == [False, False, True, False, False]
    assert torch.isnan(got[2]).tolist() == [False, True]
    assert all(torch.equal(x[0], y[0]) for x, y in zip(got, undisturbed, strict=True))


@pytest.mark.usefixtures("poisoned_empty")
def test_strides_do_not_matter():
    a = arguments(3, 37, 64, 11)

    def strided(t):
        wide = torch.full((2 * t.shape[0], *(3 * k for k in t.shape[1:])), math.nan, device=DEVICE, dtype=t.dtype)
        view = wide[1::2, 2::3] if t.ndim == 2 else wide[1::2]
        return view.copy_(t)

    active = torch.tensor([True, False, True], device=DEVICE)
    expected = call(eigenvalue_ema, a | {"active": active})
    variants = {
        "gaps": with_tensors(a, strided) | {"active": torch.stack((active, ~active), dim=1)[:, 0]},
        "transposed": with_tensors(a, lambda t: t.T.contiguous().T if t.ndim == 2 else t) | {"active": active},
    }
    for name, b in variants.items():
        assert not b["ell"].is_contiguous()
        got = call(eigenvalue_ema, b)
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True)), name
        assert all(x.is_contiguous() for x in got)
    same = with_tensors(a, lambda t: t[:1].expand_as(t))  # row stride 0
    for x in call(eigenvalue_ema, same):
        assert torch.equal(x, x[:1].expand_as(x))


def test_offsets_beyond_32_bits():
    a = arguments(3, 5, 9, 4)
    stride = 2**30 + 8  # the third row starts at element 2^31 + 16
    base = torch.empty(2 * stride + 5, device=DEVICE, dtype=torch.float16)  # virtual memory: three pages are touched
    rows = base.as_strided((3, 5), (stride, 1)).copy_(a["inv_sqrt_lambda_L"])
    a["inv_sqrt_lambda_L"] = rows.float()
    expected = call(eigenvalue_ema, a)
    assert all(
        torch.equal(x, y) for x, y in zip(call(eigenvalue_ema, a | {"inv_sqrt_lambda_L": rows}), expected, strict=True)
    )


def test_inputs_are_not_written():
    a = arguments(3, 37, 64, 11)
    before = with_tensors(a, torch.clone)
    call(eigenvalue_ema, a)
    assert all(torch.equal(a[k], before[k]) for k in (*STATE, *STATISTICS, *PER_WEIGHT))


def test_no_weights_give_empty_results():
    got = call(eigenvalue_ema, arguments(0, 5, 9, 4))
    assert [tuple(x.shape) for x in got] == [(0, 5), (0, 4), (0,)]


@pytest.mark.parametrize("name", [*STATE, *STATISTICS, *PER_WEIGHT, "active"])
def test_a_wrong_tensor_raises_with_its_name(name):
    a = arguments(3, 37, 64, 11) | {"active": torch.ones(3, dtype=torch.bool, device=DEVICE)}
    other_dtype = torch.float32 if name == "active" else torch.int64
    wrong = {
        "shape": a[name][..., None],
        "dtype": a[name].to(other_dtype),
        "is on": a[name].to("meta"),
    }
    for what, t in wrong.items():
        with pytest.raises(ValueError, match=rf"^{name} (has )?{what}"):
            call(eigenvalue_ema, a | {name: t})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"beta2": 1.0}, r"Invalid beta2=1.0: must be in \[0, 1\)"),
        ({"beta2": math.nan}, r"Invalid beta2=nan"),
        ({"n": 11}, r"Invalid n=11: must be above r=11"),
        ({"ell": torch.ones(3, 36)}, r"ell has shape \(3, 36\); must be \(3, 37\)"),
        ({"inv_sqrt_lambda_L": torch.ones(3, 0)}, r"inv_sqrt_lambda_L has shape \(3, 0\); must be \(B, m\), m >= 1"),
        ({"inv_sqrt_lambda_S": torch.ones(3)}, r"inv_sqrt_lambda_S has shape \(3,\); must be \(B, r\), r >= 1"),
    ],
)
def test_a_value_out_of_bounds_raises_with_the_bound(change, message):
    with pytest.raises(ValueError, match=message):
        call(eigenvalue_ema, arguments(3, 37, 64, 11) | change)


def run_uninterpreted(script, cache):
    """Run ``script`` in a new Python without a GPU and without the interpreter; its output lines."""
    paths = [str(Path(prokl.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_CACHE_DIR": str(cache),
    }
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_the_interpreter_cpu_tensors_are_refused(tmp_path):
    script = """
import sys, torch, prokl
assert not any(name.startswith("prokl.kernels") for name in sys.modules)
from prokl.kernels.eigenvalue_ema import eigenvalue_ema
ones, one = torch.ones(1, 1), torch.ones(1)
per_weight = dict.fromkeys(("eps", "ceiling_L", "ceiling_S", "ceiling_mu"), one)
try:
    eigenvalue_ema(ones, ones, one, ones, ones, ones, beta2=0.9, n=2, **per_weight)
except ValueError as error:
    print(error)
"""
    (error,) = run_uninterpreted(script, tmp_path)
    assert error == "inv_sqrt_lambda_L is on cpu; must be on one of ('cuda',): use the PyTorch form elsewhere."
