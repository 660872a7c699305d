"""Bad hyper-parameters and parameters: an error that names what is wrong, and nothing has changed."""

import math
import re

import pytest
import torch

from tests.inputs import (
    BACKENDS,
    INF,
    KL,
    NAN,
    PRO,
    assert_nothing_moved,
    changed,
    everything,
    normal,
    step,
    weight,
)
from tests.problems import made

AT_LEAST_0 = (-0.1, NAN, INF, True, "0.1", None, 1j)
FRACTION = (-0.1, 1.0, 1.5, NAN, INF, True, "0.9", None)
COUNT = (0, -1, 2.5, NAN, INF, True, "3", None)
BAD_COMMON = {
    "lr": (*AT_LEAST_0, torch.tensor([0.1, 0.1]), torch.tensor(-0.1), torch.tensor(NAN)),
    "weight_decay": AT_LEAST_0,
    "momentum": FRACTION,
    "beta2": FRACTION,
    "eps": AT_LEAST_0,
    "precondition_frequency": COUNT,
    "init_eigenvalue": (0.0, -0.1, NAN, INF, True, "0.1", "rms", None),
    "state_dtype": ("float32", torch.int32, torch.complex64, 32),
    "bf16_weights": ("nearest", torch.bfloat16, True, None),
    "backend": ("triton-please", 1, True),
    "maximize": ("yes", None, NAN, 2),
    "cautious_weight_decay": ("yes", None, NAN, 2),
    "adjust_lr_fn": ("match_rms", True, 0.2),
}
BAD_PRO = {
    "rank": (*COUNT, "full"),
    "alpha_kl": (*AT_LEAST_0, "automatic"),
    "ns_steps": COUNT,
    "ns_coefficients": ((1.0, 2.0), (1.0, 2.0, NAN), (1.0, 2.0, INF), (1.0, 2.0, True), "abc", 3.0, None),
    "variant": ("muon", "Pro-KLShampoo", 1, None),
}


def cases(table, cls):
    """List (class, name, value) for every bad value of the table."""
    return [
        pytest.param(cls, name, value, id=f"{cls.__name__}-{name}-{str(value)[:16]}")
        for name, values in table.items()
        for value in values
    ]


def one_each(table, cls):
    """List (class, name, value) for one value of every parameter, in turn another place of its list."""
    return cases({name: [values[i % len(values)]] for i, (name, values) in enumerate(table.items())}, cls)


# A value is judged by the same lines wherever it comes from: every value once, every parameter wherever it is read.
EVERY_VALUE = [*cases(BAD_COMMON | BAD_PRO, PRO), *one_each(BAD_COMMON, KL)]
EVERY_NAME = [*one_each(BAD_COMMON | BAD_PRO, PRO), *one_each(BAD_COMMON, KL)]


def complaint(name, value):
    """Matches a message with the argument's literal name, then its value."""
    return rf"(?s)\b{name}\b.*{re.escape(repr(value))}"


@pytest.mark.parametrize("cls, name, value", EVERY_VALUE)
def test_bad_hyperparameter_raises_in_the_constructor_and_in_its_groups(cls, name, value):
    with pytest.raises(ValueError, match=complaint(name, value)):
        made(cls, [weight(4, 6)], **{name: value})
    with pytest.raises(ValueError, match=complaint(name, value)):
        cls([{"params": [weight(4, 6)]}, {"params": [weight(4, 6)], name: value}])


@pytest.mark.parametrize("cls, name, value", EVERY_NAME)
def test_bad_hyperparameter_in_an_added_group_leaves_the_optimizer_as_it_was(cls, name, value):
    w, late = weight(4, 6), weight(4, 6, seed=1)
    optimizer = cls([w])
    group = {"params": [late], name: value}
    with pytest.raises(ValueError, match=complaint(name, value)):
        optimizer.add_param_group(group)
    assert [g["params"] for g in optimizer.param_groups] == [[w]]
    assert group == {"params": [late], name: value}
    optimizer.add_param_group({"params": [late]})


@pytest.mark.parametrize("cls, name, value", EVERY_NAME)
def test_bad_hyperparameter_set_by_hand_raises_before_anything_moves(cls, name, value):
    weights = [weight(4, 6, seed=i) for i in range(2)]
    optimizer = cls([{"params": [w]} for w in weights])
    gradients = [normal(4, 6, seed=i) for i in range(2)]
    for _ in range(2):
        step(optimizer, weights, gradients)
    before = everything(optimizer)
    optimizer.param_groups[1][name] = value
    with pytest.raises(ValueError, match=complaint(name, value)):
        step(optimizer, weights, gradients)
    assert_nothing_moved(before, optimizer)


def test_a_refused_group_has_no_effect_on_later_steps():
    runs = []
    for refused in (False, True):
        weights = [weight(4, 6, seed=i) for i in range(2)]
        optimizer = PRO([weights[0]])
        for t in range(6):
            if t == 2 and refused:
                with pytest.raises(ValueError, match="beta2"):
                    optimizer.add_param_group({"params": [weights[1]], "beta2": 2.0})
            if t == 3:
                optimizer.add_param_group({"params": [weights[1]], "beta2": 0.9})
            step(optimizer, weights, [normal(4, 6, seed=10 * t + i) for i in range(2)])
        runs.append(everything(optimizer))
    assert [changed(a, b) for a, b in zip(*runs, strict=True)] == [set(), set()]


BAD_ADAMW = {
    "lr": AT_LEAST_0,
    "betas": ((0.9,), (0.9, 1.0), (-0.1, 0.9), (NAN, 0.9), (True, 0.9), (False, 0.9), ("0.9", 0.9), 0.9, None),
    "eps": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
}


@pytest.mark.parametrize("cls, name, value", [*cases(BAD_ADAMW, PRO), *one_each(BAD_ADAMW, KL)])
def test_bad_adamw_hyperparameter_raises_everywhere(cls, name, value):
    w, bias = weight(4, 6), weight(6)
    good = {"params": [bias], "algorithm": "adamw", "lr": 1e-3}
    with pytest.raises(ValueError, match=complaint(name, value)):
        cls([{"params": [w]}, {**good, name: value}])
    optimizer = cls([w])
    with pytest.raises(ValueError, match=complaint(name, value)):
        optimizer.add_param_group({**good, name: value})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group(good)
    step(optimizer, [w, bias], [normal(4, 6), normal(6)])
    before = everything(optimizer)
    optimizer.param_groups[1][name] = value
    with pytest.raises(ValueError, match=complaint(name, value)):
        step(optimizer, [w, bias], [normal(4, 6), normal(6)])
    assert_nothing_moved(before, optimizer)


# What torch.optim.AdamW refuses when it is made.
@pytest.mark.parametrize("flags", [{"foreach": True, "fused": True}, {"foreach": True, "lr": torch.tensor(0.1)}])
def test_adamw_options_that_exclude_each_other_raise_when_the_group_is_added(flags):
    optimizer = PRO([weight(4, 6)])
    with pytest.raises((ValueError, RuntimeError), match="foreach"):
        optimizer.add_param_group({"params": [weight(6)], "algorithm": "adamw", "lr": 0.1, **flags})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", [PRO, KL])
def test_adamw_group_without_its_own_lr_raises(cls):
    group = {"params": [weight(6)], "algorithm": "adamw"}
    with pytest.raises(ValueError, match=r"adamw.*\blr\b"):
        cls([{"params": [weight(4, 6)]}, group], lr=0.1)
    optimizer = cls([weight(4, 6)])
    with pytest.raises(ValueError, match=r"adamw.*\blr\b"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("algorithm", ["muon", "AdamW", None, 1])
def test_unknown_algorithm_raises_everywhere(cls, algorithm):
    with pytest.raises(ValueError, match=complaint("algorithm", algorithm)):
        cls([{"params": [weight(4, 6)], "algorithm": algorithm, "lr": 0.1}])
    weights = [weight(4, 6, seed=i) for i in range(2)]
    optimizer = cls([{"params": [w]} for w in weights])
    with pytest.raises(ValueError, match=complaint("algorithm", algorithm)):
        optimizer.add_param_group({"params": [weight(4, 6)], "algorithm": algorithm, "lr": 0.1})
    assert len(optimizer.param_groups) == 2
    gradients = [normal(4, 6, seed=i) for i in range(2)]
    for _ in range(2):
        step(optimizer, weights, gradients)
    before = everything(optimizer)
    optimizer.param_groups[1]["algorithm"] = algorithm
    with pytest.raises(ValueError, match=complaint("algorithm", algorithm)):
        step(optimizer, weights, gradients)
    assert_nothing_moved(before, optimizer)


@pytest.mark.parametrize("start, end", [("matrix", "adamw"), ("adamw", "matrix")])
def test_changing_the_algorithm_of_a_group_that_has_state_raises(start, end):
    weights = [weight(4, 6, seed=i) for i in range(2)]
    optimizer = PRO([{"params": [weights[0]]}, {"params": [weights[1]], "algorithm": start, "lr": 0.01}])
    gradients = [normal(4, 6, seed=i) for i in range(2)]
    for _ in range(2):
        step(optimizer, weights, gradients)
    before = everything(optimizer)
    optimizer.param_groups[1]["algorithm"] = end
    with pytest.raises(ValueError, match="algorithm"):
        step(optimizer, weights, gradients)
    assert_nothing_moved(before, optimizer)


UNUSABLE = {
    "scalar": (torch.zeros(()), "adamw"),
    "vector": (torch.zeros(5), "adamw"),
    "empty vector": (torch.zeros(0), "adamw|leave it out"),
    "sparse": (torch.eye(4).to_sparse(), "dense"),
    "complex": (torch.zeros(4, 6, dtype=torch.complex64), "real"),
    "integer": (torch.zeros(4, 6, dtype=torch.int64), "leave it out"),
    "boolean": (torch.zeros(4, 6, dtype=torch.bool), "leave it out"),
    "8-bit float": (torch.zeros(4, 6).to(torch.float8_e4m3fn), "convert"),
    "on the meta device": (torch.zeros(4, 6, device="meta"), "materialise"),
    "1x1": (torch.zeros(1, 1), "adamw"),
    "1x1 convolution of one channel": (torch.zeros(1, 1, 1, 1), "adamw"),
    "stack of 1x1": (torch.zeros(3, 1, 1), "adamw"),
    "no rows": (torch.zeros(0, 4), "leave it out"),
    "no columns": (torch.zeros(4, 0), "leave it out"),
    "no matrices": (torch.zeros(0, 3, 4), "leave it out"),
    "empty matrices": (torch.zeros(2, 0, 4), "leave it out"),
}


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_parameter_the_matrix_method_cannot_take_is_named_with_the_remedy(cls, kind):
    tensor, remedy = UNUSABLE[kind]
    odd = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
    with pytest.raises(ValueError, match=rf"(?s)block\.odd\b.*(?i:{remedy})"):
        cls([("fine", weight(4, 6)), ("block.odd", odd)])
    with pytest.raises(ValueError, match=rf"(?s)parameter 1 of group 0\b.*(?i:{remedy})"):
        cls([weight(4, 6), odd])
    optimizer = cls([("fine", weight(4, 6))])
    with pytest.raises(ValueError, match=rf"(?s)block\.odd\b.*(?i:{remedy})"):
        optimizer.add_param_group({"params": [("block.odd", odd)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
def test_a_sparse_gradient_raises_before_anything_moves(method, algorithm):
    cls, kwargs = method
    w, table = weight(4, 6), weight(5, 4, seed=1)
    group = {"params": [("table", table)], "algorithm": algorithm, "lr": 0.01}
    optimizer = cls([{"params": [("w", w)]}, group], **kwargs)
    for t in range(2):
        step(optimizer, [w, table], [normal(4, 6, seed=t), normal(5, 4, seed=t)])
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="(?i)sparse"):
        step(optimizer, [w, table], [normal(4, 6, seed=9), normal(5, 4, seed=9).to_sparse()])
    assert_nothing_moved(before, optimizer)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape, r",
    [
        ((6, 4), 4), ((4, 6), 4), ((5, 5), 4), ((1, 7), 1), ((7, 1), 1), ((2, 2), 1),
        ((3, 8, 5), 5), ((6, 2, 3, 3), 6), ((2, 1, 1, 1), 1),
    ],
)  # fmt: skip
def test_a_rank_larger_than_the_weight_allows_is_clamped(shape, r, backend):
    w = weight(*shape)
    optimizer = PRO([w], rank=128, backend=backend)
    for t in range(3):
        step(optimizer, [w], [normal(*shape, seed=t)])
    state, stack = optimizer.state[w], shape[:1] if len(shape) == 3 else ()
    rows, cols = (shape[1], shape[2]) if stack else (shape[0], math.prod(shape[1:]))
    m, n = sorted((rows, cols))
    expected = {
        "M": (m, n), "U": (n, r), "L": (m, m), "S": (r, r), "Q_L": (m, m), "Q_S": (r, r),
        "inv_sqrt_lambda_L": (m,), "inv_sqrt_lambda_S": (r,), "inv_sqrt_mu": (), "lambda_0": (),
        "clipped": (),
    }  # fmt: skip
    assert {k: tuple(v.shape) for k, v in state.items() if k not in ("step", "skipped")} == {
        k: stack + tail for k, tail in expected.items()
    }
    assert all(v.isfinite().all() for k, v in state.items() if k != "step")
    assert w.isfinite().all()


def test_a_state_without_room_names_its_weight_before_anything_moves():
    fine, huge = weight(4, 6), torch.nn.Parameter(torch.zeros(2, 3_000_000))  # R has 9e12 elements
    optimizer = KL([("fine", fine)])
    step(optimizer, [fine], [normal(4, 6)])
    optimizer.add_param_group({"params": [("token_table", huge)]})
    before = fine.detach().clone()
    fine.grad, huge.grad = normal(4, 6, seed=1), torch.ones_like(huge)
    with pytest.raises(RuntimeError, match=r"No state for token_table of shape \(2, 3000000\).*adamw"):
        optimizer.step()
    assert torch.equal(fine, before)


def test_an_expanded_weight_is_refused_before_anything_moves():
    shared = torch.nn.Parameter(torch.zeros(1, 4).expand(6, 4))
    with pytest.raises(ValueError, match="table.*contiguous"):
        PRO([("table", shared)])
