"""State that was zeroed or pruned in place between steps, as ReLoRA resets it, trains on.

A usual step is what the same run makes without it.
"""

import warnings

import pytest
import torch

from tests.inputs import KL, METHODS, PRO, both, same_bits, step, weight
from tests.problems import state_tensors
from tests.training import contents, fresh, give, named, silent, told_once, train, weights_of

CALLS, TAU, SHAPES = 12, 4, ((6, 10), (10, 6))
BASES = ("U", "Q_L", "Q_R")


def share(left, seed=0):
    """Zero all but a share of the entries, at random."""

    def change(t):
        drawn = torch.rand(t.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        t.mul_((drawn < left).to(t.dtype))

    return change


def one(t):
    t.view(-1)[:1].zero_()


RESETS = {"all": share(0.0), "half": share(0.5), "99 in 100": share(0.01), "one": one}


def changed(optimizer, reset, keys=None):
    """Apply a reset to these keys of all state, or to all."""
    found = [(key, value) for entry in optimizer.state.values() for key, value in state_tensors(entry).items()]
    chosen = [value for key, value in found if keys is None or key in keys]
    assert chosen, f"no state has any of {keys}"
    for value in chosen:
        reset(value)


def lengths(optimizer, calls):
    """Return how far each weight goes in each of these calls."""
    found = []
    for call in calls:
        before = [p.detach().clone() for p in weights_of(optimizer)]
        train(optimizer, [call])
        found.append([float((p.detach() - old).norm()) for p, old in zip(weights_of(optimizer), before, strict=True)])
    return torch.tensor(found)


def assert_recovers(method, backend, reset, keys=None, shapes=SHAPES, **own):
    cls, kwargs = method
    own = {"lr": 0.1, "precondition_frequency": TAU, "backend": backend, **kwargs, **own}
    plain, optimizer = (train(cls(named(*shapes), **own), range(CALLS)) for _ in range(2))
    usual = lengths(plain, range(CALLS, CALLS + 2 * TAU)).mean(dim=0)
    changed(optimizer, reset, keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = lengths(optimizer, range(CALLS, CALLS + 2 * TAU))
    assert (found <= 3 * usual).all(), found / usual
    assert (found[2:] >= usual / 10).all(), found / usual
    for entry in optimizer.state.values():
        for key, value in state_tensors(entry).items():
            assert value.isfinite().all(), key
            assert not key.startswith(("inv_sqrt", "lambda_0")) or (value > 0).all(), key
            if key in BASES:
                off = value.float().mT @ value.float() - torch.eye(value.shape[-1])
                assert off.norm() < (1e-4 if value.dtype == torch.float32 else 0.01), key  # bfloat16 leaves 0.004
    assert set(optimizer.skipped().values()) == {0}


@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
def test_a_zeroed_or_pruned_state_trains_on(method, path, reset):
    assert_recovers(method, path, reset)


BOTH = ("M_Q", "L_Q", "Q_L", "lambda_0", "inv_sqrt_lambda_L")
KEYS = {
    "pro-klshampoo": (*BOTH, "S", "U", "Q_S", "inv_sqrt_mu", "inv_sqrt_lambda_S"),
    "klshampoo": (*BOTH, "R_Q", "Q_R", "inv_sqrt_lambda_R"),
}


@pytest.mark.parametrize("name, key", [(name, key) for name, keys in KEYS.items() for key in keys])
@pytest.mark.parametrize("reset", [RESETS["all"], RESETS["half"]], ids=["all", "half"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_each_tensor_of_a_state_may_be_zeroed_by_itself(name, backend, reset, key):
    assert_recovers(METHODS[name], backend, reset, {key})


KEPT = [{"init_eigenvalue": 0.1}, {"state_dtype": torch.bfloat16}, {"clip_threshold": None}]
KINDS = [((cls, {}), None, "all", SHAPES, own) for cls in (PRO, KL) for own in KEPT]
KINDS += [
    (METHODS["pro-klshampoo"], "triton", reset, SHAPES[:1], {"ns_dtype": torch.float32}) for reset in ("all", "half")
]


@pytest.mark.parametrize("method, backend, reset, shapes, own", KINDS)
def test_a_zeroed_state_trains_on_whatever_it_is_kept_as(method, backend, reset, shapes, own):
    """And in kernels."""
    if backend:
        pytest.importorskip(backend)
    assert_recovers(method, backend, RESETS[reset], shapes=shapes, **own)


@both
def test_a_zeroed_state_begins_anew_as_a_new_optimizer_does(cls):
    """Without a warning, and of a stack matrix by matrix; one zeroed in part says so."""
    optimizer = train(cls(named((3, 6, 10))), range(5))
    (p,) = weights_of(optimizer)
    untouched = contents(optimizer)[0]
    for value in state_tensors(optimizer.state[p]).values():
        value[1].zero_()
    with silent():
        train(optimizer, [5])
    assert optimizer.state[p]["step"].tolist() == [5, 0, 5]
    new = cls([weight(6, 10)])
    step(new, weights_of(new), [p.grad[1]])
    for key, value in state_tensors(new.state[weights_of(new)[0]]).items():
        assert torch.allclose(optimizer.state[p][key][1], value, atol=1e-6), key
    assert not same_bits(untouched["W"][0], p[0]) and same_bits(untouched["W"][1], p[1])
    optimizer.state[p]["inv_sqrt_lambda_L"][2].zero_()
    with pytest.warns(UserWarning, match=r"state of w0 .*in 1 of 3 matrices.*begin anew"):
        train(optimizer, [6])
    assert optimizer.state[p]["step"].tolist() == [6, 1, 0]


def test_the_pieces_of_a_split_weight_that_begin_anew_are_told():
    weights = {"params": named((24, 10), (24, 10)), "split": [(6, 6, 12), None]}
    optimizer = train(PRO([weights]), range(5))
    fused, whole = weights_of(optimizer)
    for key in ("Q_L.0", "Q_L.1"):
        optimizer.state[fused][key].zero_()
    with told_once(r"^The state of w0.0, w0.1 has zero inverse roots, .* in 2 of \d matrices, .*begin anew", __file__):
        give(weights_of(optimizer), 5)
        optimizer.step()
    assert [optimizer.state[fused][f"step.{i}"] for i in range(3)] == [0, 0, 5] and optimizer.state[whole]["step"] == 5


@both
def test_a_checkpoint_of_a_zeroed_state_loads_and_begins_anew(cls):
    optimizer = train(cls(named(SHAPES[0])), range(5))
    changed(optimizer, RESETS["all"])
    twin = fresh(optimizer)
    before = contents(twin)[0]["W"]
    train(twin, [5])
    assert twin.state[weights_of(twin)[0]]["step"] == 0 and same_bits(before, contents(twin)[0]["W"])
    train(twin, [6])
    assert not same_bits(before, contents(twin)[0]["W"])


@both
@pytest.mark.parametrize("change", [lambda t: t.mul_(0.5), lambda t: t.add_(0.0)], ids=["halved", "touched"])
def test_a_state_that_was_changed_and_can_go_on_goes_on_as_it_is(cls, change):
    one, other = (train(cls(named(SHAPES[0])), range(5)) for _ in range(2))
    changed(one, change, {"M_Q"})
    state = other.state[weights_of(other)[0]]
    state["M_Q"] = change(state["M_Q"].clone())
    train(one, range(5, 9))
    train(other, range(5, 9))
    for a, b in zip(contents(one), contents(other), strict=True):
        assert all(same_bits(a[key], b[key]) for key in a if torch.is_tensor(a[key]))


def test_masters_that_were_zeroed_start_as_their_weights():
    p = weight(6, 10, dtype=torch.bfloat16)
    optimizer = train(PRO([p], bf16_weights="master"), range(5))
    before = p.detach().clone()
    for value in state_tensors(optimizer.state[p]).values():
        value.zero_()
    train(optimizer, [5])
    assert same_bits(before, p)
    train(optimizer, [6])
    assert (p - before).norm() < before.norm() / 10 and not same_bits(before, p)


@pytest.mark.parametrize("left", [None, float("nan")], ids=["momentum", "NaN"])
@both
def test_what_is_left_of_a_momentum_is_no_gradient_to_begin_with(cls, left):
    """Where no gradient comes until long after the reset."""
    optimizer = train(cls(named((6, 10))), range(CALLS))
    (p,) = weights_of(optimizer)
    changed(optimizer, share(0.0), ("inv_sqrt_lambda_L",))
    for call in range(25):
        if call == 15 and left is not None:  # written by hand
            optimizer.state[p]["M_Q"].fill_(left)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(optimizer, [p], [torch.zeros(6, 10)])
    assert optimizer.state[p]["step"] == -26
    assert p.isfinite().all()
