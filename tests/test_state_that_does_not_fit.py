"""What is changed by hand between steps and does not fit: the step says what and where before anything has moved."""

import copy

import pytest
import torch

from tests.inputs import KL, PRO, weight
from tests.training import differences, fine_and_odd, give, refused, train, weights_of

BOTH = [(PRO, {}), (KL, {"fused": True})]
"""With options of the AdamW group: all checks come before PyTorch chooses among its implementations."""
METHODS = {PRO: {"rank": 3}, KL: {}}


def of(i, **values):
    """A change of weight i's state: each value is a function of what is there, or None to take it away."""

    def change(optimizer, weights):
        own = optimizer.state[weights[i]]
        for key, value in values.items():
            former = own.pop(key, None)
            if value is not None:
                own[key] = value(former)

    return change


def to(**values):
    """A change of the state of "bias", or of its weight W, to other tensors' data."""

    def change(optimizer, weights):
        own = {"W": weights[2], **optimizer.state[weights[2]]}
        weights[2].grad = None
        for key, value in values.items():
            own[key].data = value(own[key].data)

    return change


def setting(i, **values):
    return lambda optimizer, weights: optimizer.param_groups[i].update(values)


def no_setting(i, key):
    return lambda optimizer, weights: optimizer.param_groups[i].pop(key)


def replaced(group, place, tensor):
    """Another weight in the place of one, as a trainer may put it there."""
    other = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
    return lambda optimizer, weights: optimizer.param_groups[group]["params"].__setitem__(place, other)


NO_VALUE = torch.tensor(0.1, device="meta")
LACKING = [(0, "eps"), (0, "momentum"), (1, "eps"), (1, "betas"), (1, "amsgrad"), (1, "fused")]
ON_META = torch.empty(4, 6, device="meta")
META = "is on the meta device, which holds no values.*materialise the model"
CHANGES = {
    # AdamW's state
    "shorter": (of(2, exp_avg=lambda t: t[:50]), r"bias has exp_avg of shape \(50,\).*\(54,\)"),
    "broadcast": (of(3, exp_avg_sq=lambda t: t[:1]), r"table has exp_avg_sq of shape \(1, 4\).*\(5, 4\)"),
    "shortened through data": (to(exp_avg=lambda t: t[:50]), r"bias has exp_avg of shape \(50,\)"),
    "shortened through data, too": (to(exp_avg_sq=lambda t: t[:50]), r"bias has exp_avg_sq of shape \(50,\)"),
    **{f"no {key}": (of(3, **{key: None}), f"table has no tensor {key}") for key in ("exp_avg", "exp_avg_sq", "step")},
    "no tensor": (of(2, exp_avg=lambda t: t.tolist()), "bias has no tensor exp_avg"),
    "amsgrad later": (setting(1, amsgrad=True), "bias has no tensor max_exp_avg_sq.*amsgrad"),
    "expanded": (of(3, exp_avg=lambda t: t[:1].expand(5, 4)), "table has exp_avg with several elements .*memory"),
    "negated": (of(3, exp_avg=lambda t: torch._neg_view(t)), "table has exp_avg with a negation that is still to do"),
    "sparse": (of(3, exp_avg=lambda t: t.to_sparse()), "table has exp_avg of layout torch.sparse_coo"),
    "of another dtype": (of(3, exp_avg_sq=lambda t: t.double()), "table .*float64 .*exp_avg_sq"),
    "without values": (of(3, exp_avg=lambda t: t.to("meta")), "table is torch.float32 on cpu.*meta"),
    "a clock of two": (of(2, step=lambda t: torch.ones(2)), r"bias has step=tensor\(\[1., 1.\]\)"),
    "a clock below 0": (of(2, step=lambda t: torch.tensor(-1.0)), "bias has step=tensor.-1"),
    "a clock of integers": (of(2, step=lambda t: t.long()), "bias has step=.*float32"),
    "a clock in bfloat16": (of(2, step=lambda t: t.bfloat16()), "bias has step=.*float32"),
    "a clock as a number": (of(2, step=lambda t: t.item()), "bias has no tensor step"),
    "a clock without a value": (of(2, step=lambda t: t.to("meta")), "bias has step=.*meta"),
    **{
        f"converted to {end}": (
            to(W=lambda t, end=end: t.to(end)),
            f"^bias is {end} on cpu and its .* still torch.float",
        )
        for end in (torch.bfloat16, torch.float64)
    },
    # Settings that do not go together, or are none.
    "foreach and a tensor lr": (setting(1, foreach=True, fused=False, lr=torch.tensor(0.1)), "Group 1.*foreach"),
    "foreach and fused": (setting(1, foreach=True, fused=True), "Group 1.*fused.*foreach"),
    "capturable": (setting(1, capturable=True), "capturable=True.*bias.*cpu"),
    "amsgrad as a word": (setting(1, amsgrad="yes"), "Invalid amsgrad='yes'"),
    "fused as a word": (setting(1, fused="yes"), "Invalid fused='yes'"),
    "maximize as nothing": (setting(1, maximize=None), "Invalid maximize=None"),
    **{f"lr without a value, {i}": (setting(i, lr=NO_VALUE), "Invalid lr=.*meta") for i in (0, 1)},
    **{f"no {key}, {i}": (no_setting(i, key), f"Group {i} has no {key}") for i, key in LACKING},
    # What is no weight and no state.
    "no state": (lambda o, w: o.state.update({w[1]: None}), "Invalid state of odd: must be a dict"),
    "a list as AdamW's": (lambda o, w: o.state.update({w[2]: [1]}), "Invalid state of bias: must be a dict"),
    "no weights": (setting(0, params=None), "Invalid params=None of group 0: must be a list of tensors"),
    "no weight": (setting(1, params=[None, None]), r"Invalid params=\[None, None\] of group 1"),
    "one name for two": (setting(0, param_names=["fine", "fine"]), "Invalid name 'fine': two weights"),
    "a matrix on meta": (replaced(0, 0, ON_META), f"^fine {META}"),
    "a weight of AdamW on meta": (replaced(1, 0, ON_META), f"^bias {META}"),
}


def set_back(optimizer):
    """Return a function that puts weights, state and groups back to what they are now."""
    groups = [{k: [*v] if isinstance(v, list) else v for k, v in group.items()} for group in optimizer.param_groups]
    held = {p: (p.data, {**own}) for p, own in optimizer.state.items()}
    data = {p: {k: v.data for k, v in own.items() if torch.is_tensor(v)} for p, (_, own) in held.items()}

    def back():
        for p, (W, own) in held.items():
            p.grad, p.data, optimizer.state[p] = None, W, own
            for key, values in data[p].items():
                own[key].data = values
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update(own)

    return back


def assert_refused_until_set_back(optimizer, change, says):
    """The step says no and moves nothing, twice; with all as it was it goes on as if nobody had asked."""
    twin, weights, back = copy.deepcopy(optimizer), weights_of(optimizer), set_back(optimizer)
    change(optimizer, weights)
    give(weights, 7)
    for _ in range(2):
        with refused(optimizer, f"(?s){says}", (ValueError, TypeError), weights):
            optimizer.step()
    back()
    assert differences(train(optimizer, [7]), train(twin, [7])) == set()


@pytest.mark.parametrize("cls, adamw", BOTH)
@pytest.mark.parametrize("change, says", CHANGES.values(), ids=CHANGES)
def test_what_does_not_fit_is_told_by_name_before_anything_moves(cls, adamw, change, says):
    assert_refused_until_set_back(fine_and_odd(cls, adamw=adamw, **METHODS[cls]), change, says)


NEWCOMERS = {
    "flat": (torch.zeros(54), r"has shape \(54,\).*at least 2 dimensions.*adamw.*flattened matrices .*as DeepSpeed's"),
    "complex": (torch.zeros(4, 6, dtype=torch.complex64), "is complex"),
    "sparse": (torch.zeros(4, 6).to_sparse(), "has layout"),
    "expanded": (torch.zeros(1, 6).expand(4, 6), "has .*share memory"),
}


@pytest.mark.parametrize("cls, calls", [(PRO, 0), (PRO, 3), (KL, 3)])
@pytest.mark.parametrize("tensor, says", NEWCOMERS.values(), ids=NEWCOMERS)
def test_what_a_trainer_puts_in_a_weights_place_is_checked_before_anything_moves(cls, calls, tensor, says):
    assert_refused_until_set_back(fine_and_odd(cls, calls=calls), replaced(0, 0, tensor), f"fine {says}")


ODD = {
    "fewer rows": (lambda t: t[:1] if t.ndim else t.expand(2), "of shape"),
    "one more dimension": (lambda t: t[None], "of shape"),
    "complex": (lambda t: t.to(torch.complex64), "complex64"),
    "whole or not": (lambda t: t.double() if t.dtype == torch.int64 else t.long(), "torch.(int64|float64)"),
    "sparse": (lambda t: t.to_sparse(), "layout torch.sparse_coo"),
    "without values": (lambda t: t.to("meta"), "meta"),
    "no tensor": (lambda t: t.tolist(), "no tensor"),
    "gone": (None, "no tensor"),
}
KEYS = {
    PRO: ("U", "L", "Q_L", "S", "Q_S", "inv_sqrt_lambda_L", "inv_sqrt_mu", "clipped", "skipped"),
    KL: ("R", "Q_R", "inv_sqrt_lambda_R", "lambda_0", "clipped", "skipped"),
}
# Keys are looked at in one loop: every oddity in M, a matrix, and in every other key two of them in turn.
MATRIX = [(PRO, "M", odd) for odd in ODD]
MATRIX += [(cls, key, [*ODD][(i + j) % len(ODD)]) for cls in KEYS for i, key in enumerate(KEYS[cls]) for j in (0, 4)]


@pytest.mark.parametrize("cls, key, odd", MATRIX)
def test_matrix_state_that_does_not_fit_is_told_before_anything_moves(cls, key, odd):
    change, says = ODD[odd]
    says = rf"The state of odd .*{key}.*{says}|{says} {key}"
    assert_refused_until_set_back(fine_and_odd(cls, **METHODS[cls]), of(1, **{key: change}), says)


@pytest.mark.parametrize(
    "odd, clock", [((6, 10), c) for c in (2.0, "2", None, -2)] + [((2, 4, 6), torch.tensor([1, 2, 3]))]
)
def test_a_clock_of_a_matrix_that_is_none_is_told_before_anything_moves(odd, clock):
    optimizer = fine_and_odd(PRO, odd, rank=3)
    assert_refused_until_set_back(optimizer, of(1, step=lambda _: clock), "The state of odd .*has step=")


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("clock", [6, torch.tensor([6, 5])], ids=["", "stack"])
def test_a_clock_that_is_set_by_hand_is_the_next_steps(cls, clock):
    """As everything in the state: the next refresh comes when it says."""
    odd = (2, 6, 10) if torch.is_tensor(clock) else (6, 10)
    optimizer, same = (fine_and_odd(cls, odd, precondition_frequency=7) for _ in range(2))
    state = same.state_dict()
    state["state"][1]["step"] = torch.as_tensor(clock)
    same.load_state_dict(state)
    own = optimizer.state[weights_of(optimizer)[1]]
    if torch.is_tensor(clock):
        own["step"].copy_(clock)  # in place, too
    else:
        own["step"] = clock
    assert differences(train(optimizer, [3]), train(same, [3])) == set()
    assert torch.equal(torch.as_tensor(own["step"]), torch.as_tensor(clock) + 1)


@pytest.mark.parametrize("adamw", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_count_of_adamws_steps_that_is_filled_in_place_is_told_before_a_matrix_moves(adamw):
    optimizer = fine_and_odd(PRO, adamw=adamw)
    steps = optimizer.state[weights_of(optimizer)[2]]["step"]
    right = float(steps)
    for count in (-3.0, float("nan"), float("inf")):
        steps.fill_(count)
        with refused(optimizer, r"AdamW state of bias has step=tensor\(.*must be one float32 of at least 0"):
            train(optimizer, [7])
    steps.fill_(right)
    train(optimizer, [7])


def test_a_fused_group_takes_state_and_gradients_that_lie_as_their_weight_does():
    """PyTorch's fused kernels go through memory: what lies otherwise they would step element by wrong element."""
    optimizer = fine_and_odd(PRO, adamw={"fused": True})
    turned = of(3, exp_avg=lambda t: t.mT.contiguous().mT)
    assert_refused_until_set_back(optimizer, turned, r"table has exp_avg of strides \(1, 5\).*fused")
    table = weights_of(optimizer)[3]
    give(weights_of(optimizer), 8)
    table.grad = table.grad.mT.contiguous().mT
    with refused(optimizer, r"table has a gradient of strides \(1, 5\).*fused"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_converted_under_adamw_goes_on_by_loading_its_own_state(dtype):
    """As the message says."""
    optimizer = fine_and_odd(PRO)
    for p in weights_of(optimizer):
        p.grad, p.data = None, p.data.to(dtype)
    with refused(optimizer, "^bias is .*by optimizer.load_state_dict"):
        train(optimizer, [3])
    optimizer.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in weights_of(optimizer)]
    train(optimizer, [3])
    assert not any(map(torch.equal, before, weights_of(optimizer)))


@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
def test_a_weight_on_the_meta_device_is_refused_when_its_group_is_added(algorithm):
    optimizer = fine_and_odd(PRO)
    with refused(optimizer, f"^late {META}"):
        optimizer.add_param_group(
            {"params": [("late", torch.nn.Parameter(ON_META))], "algorithm": algorithm, "lr": 0.1}
        )
    optimizer.add_param_group({"params": [("late", weight(4, 6))], "algorithm": algorithm, "lr": 0.1})
