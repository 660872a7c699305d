"""State that does not fit its weight, by hand or from a file: an error that says what, before anything has moved."""

import copy

import pytest
import torch

from tests.inputs import KL, PRO, assert_nothing_moved, everything, normal, step, weight

METHODS = [(PRO, {"rank": 3}), (KL, {})]
FLAGS = {"": {}, "single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def trained(cls, kwargs, calls=3, adamw=(), stack=False):
    """A matrix before and an AdamW group of two weights behind it, each of which could be the one that moves first."""
    weights = [weight(8, 32), weight(*([2] * stack), 8, 32, seed=1), weight(54, seed=2), weight(5, 4, seed=3)]
    groups = [{"params": list(zip(("fine", "odd"), weights[:2], strict=True))}]
    rest = list(zip(("bias", "table"), weights[2:], strict=True))
    groups.append({"params": rest, "algorithm": "adamw", "lr": 0.1, **dict(adamw)})
    optimizer = cls(groups, **kwargs)
    for call in range(calls):
        move(optimizer, weights, call)
    return optimizer, weights


def move(optimizer, weights, call):
    step(optimizer, weights, [normal(*p.shape, seed=10 * call + i) for i, p in enumerate(weights)])


def of(i, **values):
    """A change of weight i's state: each value is a function of what is there, or None to take it away."""

    def change(optimizer, weights):
        own = optimizer.state[weights[i]]
        for key, value in values.items():
            own[key] = None if value is None else value(own.get(key))
            if value is None:
                del own[key]

    return change


def shortened(key):
    def change(optimizer, weights):
        value = optimizer.state[weights[2]][key]
        value.data = value.data[:50]

    return change


def setting(i, **values):
    return lambda optimizer, weights: optimizer.param_groups[i].update(values)


def no_setting(i, key):
    return lambda optimizer, weights: optimizer.param_groups[i].pop(key)


OF_ADAMW = {
    "shorter": (of(2, exp_avg=lambda t: t[:50]), r"bias has exp_avg of shape \(50,\).*\(54,\)"),
    "broadcast": (of(3, exp_avg_sq=lambda t: t[:1]), r"table has exp_avg_sq of shape \(1, 4\).*\(5, 4\)"),
    "shortened through data": (shortened("exp_avg"), r"bias has exp_avg of shape \(50,\)"),
    "second moment shortened through data": (shortened("exp_avg_sq"), r"bias has exp_avg_sq of shape \(50,\)"),
    "no second moment": (of(3, exp_avg_sq=None), "table has no tensor exp_avg_sq"),
    "no first moment": (of(3, exp_avg=None), "table has no tensor exp_avg"),
    "no clock": (of(3, step=None), "table has no tensor step"),
    "no tensor": (of(2, exp_avg=lambda t: t.tolist()), "bias has no tensor exp_avg"),
    "amsgrad later": (setting(1, amsgrad=True), "bias has no tensor max_exp_avg_sq.*amsgrad"),
    "expanded": (of(3, exp_avg=lambda t: t[:1].expand(5, 4)), "table has exp_avg with several elements .*memory"),
    "negated": (of(3, exp_avg=lambda t: torch._neg_view(t)), "table has exp_avg with a negation that is still to do"),
    "sparse": (of(3, exp_avg=lambda t: t.to_sparse()), "table has exp_avg of layout torch.sparse_coo"),
    "second moment of another dtype": (of(3, exp_avg_sq=lambda t: t.double()), "table .*float64 .*exp_avg_sq"),
    "without values": (of(3, exp_avg=lambda t: t.to("meta")), "table is torch.float32 on cpu.*meta"),
    "a clock of two": (of(2, step=lambda t: torch.ones(2)), r"bias has step=tensor\(\[1., 1.\]\)"),
    "a clock below 0": (of(2, step=lambda t: torch.tensor(-1.0)), "bias has step=tensor.-1"),
    "a clock of integers": (of(2, step=lambda t: t.long()), "bias has step=.*float32"),
    "a clock in bfloat16": (of(2, step=lambda t: t.bfloat16()), "bias has step=.*float32"),
    "a clock as a number": (of(2, step=lambda t: t.item()), "bias has no tensor step"),
    "a clock without a value": (of(2, step=lambda t: t.to("meta")), "bias has step=.*meta"),
}
SETTINGS = {
    "foreach and a tensor lr": (setting(1, foreach=True, lr=torch.tensor(0.1)), "Group 1.*lr as a Tensor.*foreach"),
    "foreach and fused": (setting(1, foreach=True, fused=True), "Group 1.*fused.*foreach"),
    "capturable": (setting(1, capturable=True), "capturable=True.*bias.*cpu"),
    "amsgrad as a word": (setting(1, amsgrad="yes"), "Invalid amsgrad='yes'"),
    "fused as a word": (setting(1, fused="yes"), "Invalid fused='yes'"),
    "maximize as nothing": (setting(1, maximize=None), "Invalid maximize=None"),
    "lr without a value": (setting(1, lr=torch.tensor(0.1, device="meta")), "Invalid lr=.*meta"),
    "a matrix lr without a value": (setting(0, lr=torch.tensor(0.1, device="meta")), "Invalid lr=.*meta"),
    **{f"no {key}": (no_setting(1, key), f"Group 1 has no {key}") for key in ("eps", "betas", "amsgrad", "fused")},
    **{f"no {key} of a matrix": (no_setting(0, key), f"Group 0 has no {key}") for key in ("eps", "momentum", "rank")},
}


def assert_refused_until_set_back(optimizer, weights, change, says):
    """The step says no and moves nothing, twice; with all as it was it goes on as if nobody had asked."""
    twin, twins = copy.deepcopy((optimizer, weights))
    held = {p: dict(optimizer.state[p]) for p in weights}
    data = {p: {k: v.data for k, v in own.items() if torch.is_tensor(v)} for p, own in held.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    change(optimizer, weights)
    seen = [{k: v for k, v in optimizer.state[p].items() if torch.is_tensor(v) and plain(v)} for p in weights]
    before = [
        ({k: v.clone() for k, v in own.items()}, p.detach().clone()) for own, p in zip(seen, weights, strict=True)
    ]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"(?s){says}"):
            move(optimizer, weights, 7)
        for own, (values, W), p in zip(seen, before, weights, strict=True):
            assert torch.equal(p, W)
            assert all(torch.equal(own[k], v) for k, v in values.items())
    for p, own in held.items():
        optimizer.state[p] = own
        for key, there in data[p].items():
            own[key].data = there
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group.update(own)
    move(optimizer, weights, 7)
    move(twin, twins, 7)
    assert all(map(torch.equal, weights, twins))


def plain(t):
    return t.layout == torch.strided and t.device.type == "cpu"


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("change, says", OF_ADAMW.values(), ids=OF_ADAMW)
def test_adamw_state_that_does_not_fit_is_told_before_a_matrix_moves(cls, kwargs, flags, change, says):
    optimizer, weights = trained(cls, kwargs, adamw=flags)
    assert_refused_until_set_back(optimizer, weights, change, says)


@pytest.mark.parametrize("cls, kwargs", [METHODS[0]])
@pytest.mark.parametrize("change, says", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_do_not_go_together_are_told_before_a_matrix_moves(cls, kwargs, change, says):
    optimizer, weights = trained(cls, kwargs)
    assert_refused_until_set_back(optimizer, weights, change, says)


def test_a_fused_group_takes_state_and_gradients_that_lie_as_their_weight_does():
    """PyTorch's fused kernels go through memory: what lies otherwise they would step element by wrong element."""
    optimizer, weights = trained(PRO, {}, adamw={"fused": True})
    turned = of(3, exp_avg=lambda t: t.mT.contiguous().mT)
    assert_refused_until_set_back(optimizer, weights, turned, r"table has exp_avg of strides \(1, 5\).*fused")
    for i, p in enumerate(weights):
        p.grad = normal(*p.shape, seed=i)
    weights[3].grad = weights[3].grad.mT.contiguous().mT
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"table has a gradient of strides \(1, 5\).*fused"):
        optimizer.step()
    assert_nothing_moved(before, optimizer)


MATRIX_KEYS = {
    PRO: ("M", "U", "L", "Q_L", "S", "Q_S", "inv_sqrt_lambda_L", "inv_sqrt_mu", "clipped", "skipped"),
    KL: (),
}
MATRIX_KEYS[KL] = ("M", "L", "Q_L", "R", "Q_R", "inv_sqrt_lambda_R", "lambda_0", "clipped", "skipped")
ODD = {
    "fewer rows": (lambda t: t[:1] if t.ndim else t.expand(2), "of shape"),
    "one more dimension": (lambda t: t[None], "of shape"),
    "complex": (lambda t: t.to(torch.complex64), "complex64"),
    "whole numbers for fractions": (
        lambda t: t.double() if t.dtype == torch.int64 else t.long(),
        "torch.(int64|float64)",
    ),
    "sparse": (lambda t: t.to_sparse(), "layout torch.sparse_coo"),
    "without values": (lambda t: t.to("meta"), "meta"),
    "no tensor": (lambda t: t.tolist(), "no tensor"),
    "gone": (None, "no tensor"),
}


@pytest.mark.parametrize("odd, says", ODD.values(), ids=ODD)
@pytest.mark.parametrize(
    "cls, kwargs, key", [(cls, kwargs, key) for cls, kwargs in METHODS for key in MATRIX_KEYS[cls]]
)
def test_matrix_state_that_does_not_fit_is_told_before_anything_moves(cls, kwargs, key, odd, says):
    optimizer, weights = trained(cls, kwargs)
    assert_refused_until_set_back(
        optimizer, weights, of(1, **{key: odd}), rf"The state of odd .*{key}.*{says}|{says} {key}"
    )


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("stack, clock", [(False, c) for c in (2.0, "2", None, -2)] + [(True, torch.tensor([1, 2, 3]))])
def test_a_clock_of_a_matrix_that_is_none_is_told_before_anything_moves(cls, kwargs, stack, clock):
    optimizer, weights = trained(cls, kwargs, stack=stack)
    assert_refused_until_set_back(optimizer, weights, of(1, step=lambda _: clock), "The state of odd .*has step=")


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("stack", [False, True])
def test_a_clock_that_is_set_by_hand_is_the_next_steps(cls, kwargs, stack):
    """As everything in the state: the next refresh comes when it says."""
    optimizer, weights = trained(cls, {**kwargs, "precondition_frequency": 7}, stack=stack)
    same, others = trained(cls, {**kwargs, "precondition_frequency": 7}, stack=stack)
    clock = torch.tensor([6, 5]) if stack else 6
    state = same.state_dict()
    state["state"][1]["step"] = torch.as_tensor(clock)
    same.load_state_dict(state)
    if stack:
        optimizer.state[weights[1]]["step"].copy_(clock)  # in place, too
    else:
        optimizer.state[weights[1]]["step"] = clock
    move(optimizer, weights, 3)
    move(same, others, 3)
    assert torch.equal(torch.as_tensor(optimizer.state[weights[1]]["step"]), torch.as_tensor(clock) + 1)
    for p, q in zip(weights, others, strict=True):
        assert torch.equal(p, q)
        for key, value in same.state[q].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[p][key])), key


LOADED = {
    "shorter": (2, "exp_avg", lambda t: t[:50], r"bias has exp_avg of shape \(50,\).*\(54,\)"),
    "broadcast": (3, "exp_avg_sq", lambda t: t[:1], r"table has exp_avg_sq of shape \(1, 4\)"),
    "no second moment": (3, "exp_avg_sq", None, "table has no tensor exp_avg_sq"),
    "no first moment": (3, "exp_avg", None, "table has no tensor exp_avg"),
    "no clock": (3, "step", None, "table has no tensor step"),
    "no tensor": (3, "exp_avg", lambda t: t.tolist(), "table has no tensor exp_avg"),
    "not finite": (3, "exp_avg", lambda t: t.clone().fill_(float("nan")), "table has exp_avg between nan and nan"),
    "negative second moment": (2, "exp_avg_sq", lambda t: -1 - t, "bias has exp_avg_sq between .* at least 0"),
    "complex M": (1, "M", lambda t: t.to(torch.complex64), "odd .*M .*complex64"),
    "whole M": (1, "M", lambda t: t.long(), "odd .*M .*int64"),
    "sparse M": (1, "M", lambda t: t.to_sparse(), "odd .*M .*sparse"),
    "M without values": (1, "M", lambda t: t.to("meta"), "odd .*M .*meta"),
}


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("i, key, change, says", LOADED.values(), ids=LOADED)
def test_a_file_whose_state_does_not_fit_is_refused_by_name_and_changes_nothing(cls, kwargs, i, key, change, says):
    state = copy.deepcopy(trained(cls, kwargs)[0].state_dict())
    own = state["state"][i]
    if change is None:
        del own[key]
    else:
        own[key] = change(own[key])
    optimizer, _ = trained(cls, kwargs, calls=2)
    before, groups = everything(optimizer), repr(optimizer)
    with pytest.raises(ValueError, match=f"(?s)loaded.*{says}"):
        optimizer.load_state_dict(state)
    assert_nothing_moved(before, optimizer)
    assert repr(optimizer) == groups


def test_a_file_that_switches_amsgrad_on_without_its_state_is_refused():
    state = copy.deepcopy(trained(PRO, {})[0].state_dict())
    state["param_groups"][1]["amsgrad"] = True
    optimizer, _ = trained(PRO, {}, calls=2)
    before = everything(optimizer)
    with pytest.raises(ValueError, match="loaded.*bias has no tensor max_exp_avg_sq.*amsgrad"):
        optimizer.load_state_dict(state)
    assert_nothing_moved(before, optimizer)
    assert optimizer.param_groups[1]["amsgrad"] is False


OTHER_FORMS = {
    "no state": (lambda o, w: o.state.update({w[1]: None}), TypeError, "Invalid state of odd: must be a dict"),
    "a list as AdamW's": (lambda o, w: o.state.update({w[2]: [1]}), TypeError, "Invalid state of bias: must be a dict"),
    "no weights": (setting(0, params=None), TypeError, r"Invalid params=None of group 0: must be a list of tensors"),
    "no weight": (setting(1, params=[None, None]), TypeError, r"Invalid params=\[None, None\] of group 1"),
    "one name for two": (setting(0, param_names=["fine", "fine"]), ValueError, "Invalid name 'fine': two weights"),
}


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("change, error, says", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_what_is_no_weight_and_no_state_is_told_by_name(cls, kwargs, change, error, says):
    optimizer, weights = trained(cls, kwargs)
    change(optimizer, weights)
    before = [p.detach().clone() for p in weights]
    with pytest.raises(error, match=says):
        move(optimizer, weights, 5)
    assert all(torch.equal(p, old) for p, old in zip(weights, before, strict=True))


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("key", ["exp_avg", "momentum_buffer"])
def test_a_file_of_another_optimizer_does_not_begin_anew_unsaid(cls, kwargs, key):
    optimizer, weights = trained(cls, kwargs)
    before = everything(optimizer)
    loaded = optimizer.state_dict()
    for i, p in enumerate(weights[:2]):
        loaded["state"][i] = {"step": torch.tensor(3.0), key: torch.zeros_like(p)} if i else {key: torch.zeros_like(p)}
    with pytest.raises(ValueError, match=f"fine has {key}, another optimizer's.*Load a state dict of the same"):
        optimizer.load_state_dict(loaded)
    assert_nothing_moved(before, optimizer)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("count", [-3.0, float("nan"), float("inf")])
def test_a_count_of_adamws_steps_that_is_filled_in_place_is_told_before_a_matrix_moves(flags, count):
    optimizer, weights = trained(PRO, {"rank": 3}, adamw=flags)
    steps = optimizer.state[weights[2]]["step"]
    right = float(steps)
    steps.fill_(count)
    before = [p.detach().clone() for p in weights]
    with pytest.raises(ValueError, match=r"AdamW state of bias has step=tensor\(.*must be one float32 of at least 0"):
        move(optimizer, weights, 7)
    assert all(torch.equal(p, old) for p, old in zip(weights, before, strict=True))
    steps.fill_(right)
    move(optimizer, weights, 7)
