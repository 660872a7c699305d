"""The start of a weight's state: the same under any order of summation, whatever the first gradient leaves open."""

import pytest
import torch

from prokl.algorithm.initial import initialise, initialise_kl
from tests.inputs import METHODS, PRO, both, normal
from tests.peak import Peak
from tests.problems import relative, state_tensors

MORE = 5
"""Steps after the start, of gradients of full rank: else a refresh takes L's null space from rounding."""
TOKENS = 40
CASES = {  # name: shape, tokens of the first gradient, part of it that is not zero
    "few tokens": ((12, 20), 5, ...),
    "one token": ((12, 20), 1, ...),
    "few tokens, tall": ((20, 12), 5, ...),
    "few tokens, square": ((14, 14), 4, ...),
    "idle rows": ((12, 20), TOKENS, (..., slice(3, 9), slice(None))),
    "idle columns": ((12, 20), TOKENS, (..., slice(None), slice(0, 7))),
    "one row": ((12, 20), TOKENS, (..., slice(5, 6), slice(None))),
    "padded experts": ((3, 12, 20), TOKENS, (..., slice(0, 7), slice(0, 11))),
    "experts of few tokens": ((3, 12, 20), 3, ...),
    "two classes": ((2, 20), TOKENS, ...),
}


def tokens(case, count, dtype, seed):
    """Gradients (count, *shape) of single tokens of the case."""
    shape, _, part = CASES[case]
    left, right = (normal(count, *shape[:-2], k, seed=2 * seed + i, dtype=dtype) for i, k in enumerate(shape[-2:]))
    if case == "two classes":  # of a softmax: one is the other's negative
        left[..., 1] = -left[..., 0]
    each = left.unsqueeze(-1) * right.unsqueeze(-2)
    kept = torch.zeros_like(each)
    kept[part] = each[part]
    return kept


def summed(each, order):
    total = torch.zeros_like(each[0])
    for i in order:
        total += each[i]
    return total


def gradients(case, dtype, which):
    """The first gradient, of the case's tokens in three parts, and those after it, summed in one of two orders."""
    few = tokens(case, CASES[case][1], dtype, seed=0)
    first = torch.cat([few * share for share in (0.3, 0.2, 0.5)])
    later = [torch.randn(TOKENS, *few.shape[1:], generator=torch.Generator().manual_seed(t), dtype=torch.float64)
             for t in range(1, MORE + 1)]  # fmt: skip
    return [summed(each, range(len(each))[:: 1 - 2 * which]) for each in (first, *(e.to(dtype) for e in later))]


def run(method, case, dtype, which):
    """The state after the start, and the distance moved after some more steps."""
    cls, kwargs = method
    kwargs = kwargs | ({"rank": 6, "ns_dtype": dtype} if cls is PRO else {})  # whatever this CPU's default is
    p = torch.nn.Parameter(normal(*CASES[case][0], seed=99, dtype=dtype))
    optimizer, before = cls([p], **kwargs), p.detach().clone()
    for t, G in enumerate(gradients(case, dtype, which)):
        p.grad = G.clone()
        optimizer.step()
        if t == 0:
            start = {key: value.clone() for key, value in state_tensors(optimizer.state[p]).items()}
    return start, p.detach() - before


# A sum's rounding, some eps, over the smallest determined singular value, a tenth of the largest, and again so much for
# a chosen column: 1e-13 in float64. Measured there: 5e-15 in the state, 4e-14 in the weights; in float32 2e-6 and 6e-4,
# where Newton-Schulz multiplies the rounding of small singular values. Directions that rounding chose gave 0.04 to 1.3
# in the state and 9e-4 to 0.7 in the weights.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_rank_deficient_start_is_free_of_summation_order(method, case, dtype):
    a, b = (gradients(case, dtype, which)[0] for which in (0, 1))
    assert 0 < (a - b).abs().max() < 1e-5 * a.abs().max()  # the same gradient, but for rounding
    (start, moved), (other, there) = (run(method, case, dtype, which) for which in (0, 1))
    for key, value in start.items():
        assert relative(other[key], value) <= TOLERANCES[dtype], key
    assert relative(there, moved) <= TOLERANCES[dtype]


@pytest.mark.parametrize("case", ["few tokens", "idle rows", "two classes"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 3.0, 1e30])
def test_bases_ignore_the_gradients_scale_and_auto_follows_it(case, scale):
    G = gradients(case, torch.float32, 0)[0][None]
    for start in (initialise, initialise_kl):
        plain, scaled = (start(own, 2, {"beta2": 0.95, "init_eigenvalue": "auto"}) for own in (G, scale * G))
        for key, value in plain.items():
            power = 1.0 if key in ("lambda_0", "L_Q", "S", "R_Q") else -0.5 if key.startswith("inv_sqrt") else 0.0
            expected = value.double() * scale**power
            # Scaling rounds G by eps, the smallest determined singular value a tenth of the largest; measured: 7e-7.
            assert relative(scaled[key], expected) <= 1e-4, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_svd_of_a_gradient_below_float64(method, dtype, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a GPU does SVDs one by one")

    monkeypatch.setattr(torch.linalg, "svd", refuse)
    cls, kwargs = method
    p = torch.nn.Parameter(normal(6, 10, dtype=dtype))
    optimizer = cls([p], **kwargs)
    p.grad = normal(6, 10, seed=1, dtype=dtype)
    optimizer.step()
    assert optimizer.state[p]["Q_L"].any()


@pytest.mark.parametrize("init_eigenvalue", ["auto", 0.1])
def test_the_starts_factors_are_float64_products_rounded(init_eigenvalue):
    """torch's TF32 switches leave them alone therefore; products in float32 are off by some 1e-6."""
    G = normal(24, 3000)
    found = [start(G, 8, {"beta2": 0.95, "init_eigenvalue": init_eigenvalue}) for start in (initialise, initialise_kl)]
    unit = found[0]["lambda_0"].double() if init_eigenvalue == "auto" else 1.0
    turned = [state["Q_L"].double().mT @ G.double() for state in found]
    Gt, A = turned[0] @ found[0]["U"].double(), turned[1] @ found[1]["Q_R"].double()
    wanted = [Gt @ Gt.mT / 8, Gt.mT @ Gt / 24, A @ A.mT / 3000, A.mT @ A / 24]
    for x, exact in zip((found[0]["L_Q"], found[0]["S"], found[1]["L_Q"], found[1]["R_Q"]), wanted, strict=True):
        exact = 0.05 * exact / unit
        assert x.dtype == torch.float32
        # A rounding, of the root of lambda_0 one more, twice; and those of float64's sums of up to 3,000 terms.
        sums = 3000 * torch.finfo(torch.float64).eps * exact.abs().max()
        assert ((x.double() - exact).abs() <= 4 * torch.finfo(torch.float32).eps * exact.abs() + sums).all()


@pytest.mark.parametrize("cls, kwargs", METHODS.values(), ids=METHODS)
def test_a_start_fits_the_stated_workspace_in_float64(cls, kwargs):
    group = cls([torch.nn.Parameter(torch.zeros(2, 2))], **kwargs).param_groups[0]
    shape, rank = (32, 128), 16 if cls is PRO else 0
    G = normal(3, *shape)
    with Peak() as peak:
        state = cls.method.initialise(G, rank, group)
    own = sum(value.nbytes for value in state.values())
    assert peak.extra - own <= 3 * cls.method.workspace(*shape, rank) * 8  # measured: 0.18 to 0.36 of it


@both
def test_a_start_beyond_the_budget_is_made_in_parts(cls, monkeypatch):
    def state_of():
        p = torch.nn.Parameter(torch.zeros(5, 6, 10))
        optimizer = cls([p])
        p.grad = normal(5, 6, 10)
        optimizer.step()
        return state_tensors(optimizer.state[p])

    whole, sizes, initialise = state_of(), [], cls.method.initialise

    def counted(G, *args):
        sizes.append(len(G))
        return initialise(G, *args)

    monkeypatch.setattr(cls.method, "initialise", counted)
    rank = 6 if cls is PRO else 0
    monkeypatch.setattr("prokl.backends.device.WORKSPACE", 2 * cls.method.workspace(6, 10, rank) * 8)
    parts = state_of()
    assert sizes == [2, 2, 1]
    for key, value in whole.items():
        assert torch.equal(parts[key], value), key
