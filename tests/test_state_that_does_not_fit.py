"""State that does not fit, set by hand or loaded, is told by name before anything has moved, and nothing has changed.

So it is with weights, groups and settings that are changed by hand between steps.
"""

import copy
import math
from contextlib import nullcontext

import pytest
import torch

from tests.inputs import KL, PRO, both, normal, step, weight
from tests.training import differences, fine_and_odd, give, refused, train, weights_of

BOTH = [(PRO, {}), (KL, {"fused": True})]
"""Classes with options of the AdamW group: all checks come before PyTorch chooses among its implementations."""
METHODS = {PRO: {"rank": 4}, KL: {}}


def entry(i, **values):
    """A change of weight i's state: each value is a function of what is there, or None to take it away."""

    def change(state, groups):
        own = state[i]
        for key, value in values.items():
            former = own.pop(key, None)
            if value is not None:
                own[key] = value(former)

    return change


def setting(i, **values):
    return lambda state, groups: groups[i].update(values)


def to(**values):
    """A change of the state of "bias", or of its weight W, to other tensors' data."""

    def change(optimizer, weights):
        own = {"W": weights[2], **optimizer.state[weights[2]]}
        weights[2].grad = None
        for key, value in values.items():
            own[key].data = value(own[key].data)

    return change


def no_setting(i, key):
    return lambda state, groups: groups[i].pop(key)


def replaced(group, place, tensor):
    """Another weight in the place of one, as a trainer may put it there."""
    other = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
    return lambda state, groups: groups[group]["params"].__setitem__(place, other)


def by_hand(change):
    """The change of an optimizer's own state and groups."""
    return lambda optimizer, weights: change([optimizer.state[p] for p in weights], optimizer.param_groups)


def assert_refused_by_hand(optimizer, change, says):
    """The step says no and moves nothing, twice."""
    weights = weights_of(optimizer)
    change(optimizer, weights)
    give(weights, 7)
    for _ in range(2):
        with refused(optimizer, f"(?s){says}", (ValueError, TypeError), weights):
            optimizer.step()


def assert_refused_in_a_file(optimizer, change, says):
    """Loading says no and changes nothing; training goes on as if it had not been tried."""
    twin, hooks = copy.deepcopy(optimizer), len(optimizer._optimizer_load_state_dict_pre_hooks)
    state = copy.deepcopy(optimizer.state_dict())
    anew = change(state["state"], state["param_groups"])
    with refused(optimizer, f"(?s){says}"):
        optimizer.load_state_dict(anew if isinstance(anew, dict) else state)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == hooks
    assert differences(train(optimizer, range(3, 6)), train(twin, range(3, 6))) == set()


# Misfits wherever they come from

CLOCKS = (True, 2.0, 2.5, math.nan, "2", None, [2], [1, 2])
EITHER = {
    "shorter": (entry(2, exp_avg=lambda t: t[:50]), r"bias has exp_avg of shape \(50,\).*\(54,\)"),
    "broadcast": (entry(3, exp_avg_sq=lambda t: t[:1]), r"table has exp_avg_sq of shape \(1, 4\).*\(5, 4\)"),
    **{f"no {key}": (entry(3, **{key: None}), f"table has no tensor {key}") for key in ("exp_avg", "exp_avg_sq")},
    "no step": (entry(3, step=None), "table has step=None; must be one float32 of at least 0"),
    "no tensor": (entry(2, exp_avg=lambda t: t.tolist()), "bias has no tensor exp_avg"),
    "amsgrad later": (setting(1, amsgrad=True), "bias has no tensor max_exp_avg_sq.*amsgrad"),
    "nothing of a step": (entry(1, step=None, M=None), "odd"),
    **{f"clock {c!r}": (entry(1, step=lambda _, c=c: c), "odd .*has step=.*an integer") for c in CLOCKS},
}


@pytest.mark.parametrize("hold", [assert_refused_by_hand, assert_refused_in_a_file], ids=["by hand", "in a file"])
@pytest.mark.parametrize("cls, adamw", BOTH)
@pytest.mark.parametrize("change, says", EITHER.values(), ids=EITHER)
def test_misfit_state_is_told_by_name_from_any_source(cls, adamw, change, says, hold):
    change = by_hand(change) if hold is assert_refused_by_hand else change
    hold(fine_and_odd(cls, adamw=adamw, **METHODS[cls]), change, says)


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
    PRO: ("U", "L_Q", "Q_L", "S", "Q_S", "inv_sqrt_lambda_L", "inv_sqrt_mu", "clipped", "skipped"),
    KL: ("R_Q", "Q_R", "inv_sqrt_lambda_R", "lambda_0", "clipped", "skipped"),
}
# Keys are looked at in one loop: every oddity in M, a matrix, and in every other key two of them in turn.
MATRIX = [(PRO, "M_Q", odd) for odd in ODD]
MATRIX += [(cls, key, [*ODD][(i + j) % len(ODD)]) for cls in KEYS for i, key in enumerate(KEYS[cls]) for j in (0, 4)]


@pytest.mark.parametrize("cls, key, odd", MATRIX)
def test_misfit_matrix_state_is_told_from_any_source(cls, key, odd):
    change, says = ODD[odd]
    change, says = entry(1, **{key: change}), rf"The (loaded )?state of odd .*({key}.*{says}|{says} {key})"
    assert_refused_by_hand(fine_and_odd(cls, **METHODS[cls]), by_hand(change), says)
    assert_refused_in_a_file(fine_and_odd(cls, **METHODS[cls]), change, says)


# Changes by hand

NO_VALUE = torch.tensor(0.1, device="meta")
LACKING = [(0, "eps"), (0, "momentum"), (1, "eps"), (1, "betas"), (1, "amsgrad"), (1, "fused")]
ON_META = torch.empty(4, 6, device="meta")
META = "is on the meta device, which holds no values.*materialise the model"
BY_HAND = {
    # AdamW's state
    "expanded": (entry(3, exp_avg=lambda t: t[:1].expand(5, 4)), "table has exp_avg with several elements .*memory"),
    "negated": (
        entry(3, exp_avg=lambda t: torch._neg_view(t)),
        "table has exp_avg with a negation that is still to do",
    ),
    "sparse": (entry(3, exp_avg=lambda t: t.to_sparse()), "table has exp_avg of layout torch.sparse_coo"),
    "of another dtype": (entry(3, exp_avg_sq=lambda t: t.double()), "table has exp_avg_sq of torch.float64"),
    "without values": (entry(3, exp_avg=lambda t: t.to("meta")), "table has exp_avg of torch.float32 on meta"),
    "a clock of two": (entry(2, step=lambda t: torch.ones(2)), r"bias has step=tensor\(\[1., 1.\]\)"),
    "a clock below 0": (entry(2, step=lambda t: torch.tensor(-1.0)), "bias has step=tensor.-1"),
    "a clock of integers": (entry(2, step=lambda t: t.long()), "bias has step=.*float32"),
    "a clock in bfloat16": (entry(2, step=lambda t: t.bfloat16()), "bias has step=.*float32"),
    "a clock as a number": (entry(2, step=lambda t: t.item()), r"bias has step=\d.*must be one float32"),
    "a clock without a value": (entry(2, step=lambda t: t.to("meta")), "bias has step=.*meta"),
    "of a matrix": (
        entry(3, M_Q=lambda _: torch.zeros(5, 4), exp_avg=torch.clone),
        "table has the state of another algorithm",
    ),
    # Settings that do not go together, or are none.
    "foreach and a tensor lr": (setting(1, foreach=True, fused=False, lr=torch.tensor(0.1)), "Group 1.*foreach"),
    "foreach and fused": (setting(1, foreach=True, fused=True), "Group 1.*fused.*foreach"),
    "capturable": (setting(1, capturable=True), "capturable=True.*bias.*cpu"),
    "amsgrad as a word": (setting(1, amsgrad="yes"), "Invalid amsgrad='yes'"),
    "fused as a word": (setting(1, fused="yes"), "Invalid fused='yes'"),
    "maximize as nothing": (setting(1, maximize=None), "Invalid maximize=None"),
    **{f"lr without a value, {i}": (setting(i, lr=NO_VALUE), "Invalid lr=.*meta") for i in (0, 1)},
    **{f"no {key}, {i}": (no_setting(i, key), f"Group {i} has no {key}") for i, key in LACKING},
    "a matrix on meta": (replaced(0, 0, ON_META), f"^fine {META}"),
    "a weight of AdamW on meta": (replaced(1, 0, ON_META), f"^bias {META}"),
    "a flat weight": (
        replaced(0, 0, torch.zeros(54)),
        r"fine has shape \(54,\).*at least 2 dimensions.*adamw.*flattened matrices .*as DeepSpeed's",
    ),
    "a complex weight": (replaced(0, 0, torch.zeros(4, 6, dtype=torch.complex64)), "fine has dtype torch.complex64"),
    "a sparse weight": (replaced(0, 0, torch.zeros(4, 6).to_sparse()), "fine is a tensor of layout"),
    "an expanded weight": (replaced(0, 0, torch.zeros(1, 6).expand(4, 6)), "fine is a tensor with several elements"),
}
BY_HAND = {name: (by_hand(change), says) for name, (change, says) in BY_HAND.items()} | {
    "shortened through data": (to(exp_avg=lambda t: t[:50].clone()), r"bias has exp_avg of shape \(50,\)"),
    "shortened through data, too": (to(exp_avg_sq=lambda t: t[:50].clone()), r"bias has exp_avg_sq of shape \(50,\)"),
    "expanded through data": (to(exp_avg=lambda t: t[:1].clone().expand(54)), "bias has exp_avg with several"),
    "negated through data": (to(W=lambda t: torch._neg_view(-t)), "bias is a tensor with a negation"),
    **{
        f"converted to {end}": (
            to(W=lambda t, end=end: t.to(end)),
            f"bias has exp_avg of torch.float.* and the weight is {end}.* by optimizer.load_state_dict",
        )
        for end in (torch.bfloat16, torch.float64)
    },
}


@pytest.mark.parametrize("cls, adamw", BOTH)
@pytest.mark.parametrize("change, says", BY_HAND.values(), ids=BY_HAND)
def test_what_does_not_fit_is_told_by_name_before_anything_moves(cls, adamw, change, says):
    assert_refused_by_hand(fine_and_odd(cls, adamw=adamw, **METHODS[cls]), change, says)


@both
@pytest.mark.parametrize("clock", [6, torch.tensor([6, 5])], ids=["", "stack"])
def test_a_clock_that_is_set_by_hand_is_the_next_steps(cls, clock):
    """The next refresh comes when the clock says."""
    odd = (2, 6, 10) if torch.is_tensor(clock) else (6, 10)
    optimizer, same = (fine_and_odd(cls, odd, precondition_frequency=7) for _ in range(2))
    state = same.state_dict()
    state["state"][1]["step"] = torch.as_tensor(clock)
    same.load_state_dict(state)
    own = optimizer.state[weights_of(optimizer)[1]]
    own["step"] = clock
    assert differences(train(optimizer, [3]), train(same, [3])) == set()
    assert torch.equal(torch.as_tensor(own["step"]), torch.as_tensor(clock) + 1)


def test_a_fused_group_takes_state_that_lies_as_its_weight():
    """PyTorch's fused kernels go through memory: what lies otherwise they would step element by wrong element."""
    turned = by_hand(entry(3, exp_avg=lambda t: t.mT.contiguous().mT))
    optimizer = fine_and_odd(PRO, adamw={"fused": True})
    assert_refused_by_hand(optimizer, turned, r"table has exp_avg of strides \(1, 5\).*fused")


@pytest.mark.parametrize("rows, fits", [(1, True), (2, False)])
def test_a_fused_group_asks_for_the_strides_of_more_than_one_row(rows, fits):
    """A single row lies as the weight's does, whatever its stride is."""
    w = torch.nn.Parameter(torch.ones(rows, 4))
    optimizer = train(PRO([{"params": [w], "algorithm": "adamw", "lr": 0.1, "fused": True}]), [0])
    before, w.grad = w.detach().clone(), torch.ones(rows, 8)[:, :4]
    with nullcontext() if fits else refused(optimizer, r"a gradient of strides \(8, 1\).*fused"):
        optimizer.step()
    assert (w != before).all() if fits else (w == before).all()


def test_adamws_state_stays_while_its_weight_is_on_meta():
    """The step is refused; the weight may come back."""
    optimizer = fine_and_odd(PRO)
    bias = weights_of(optimizer)[2]
    former, bias.grad = bias.data, None
    torch.utils.swap_tensors(bias, torch.nn.Parameter(bias.detach().to("meta")))
    with refused(optimizer, "^bias is on the meta device", weights=[]):
        optimizer.step()
    assert optimizer.state[bias]["exp_avg"].device == former.device


# Faults in a file


def of_another_optimizer(key):
    def change(state, groups):
        for i in range(2):
            M = state[i]["M_Q"]
            state[i] = {"step": torch.tensor(3.0), key: torch.zeros_like(M)} if i else {key: M}

    return change


def made_anew(cls=PRO, odd=(6, 10)):
    return lambda state, groups: fine_and_odd(cls, odd, **METHODS[cls]).state_dict()


BAD_CLOCKS = (True, -1, 2.5, math.nan, math.inf, "2", None, *map(torch.tensor, (True, -1.0, 2.5, math.nan, math.inf)))
# The class that loads, the change, and the error; "fine" where the first weight is wrong already.
WRONG = {
    **{
        f"another width, {cls.__name__}": (
            cls,
            made_anew(cls, odd=(6, 12)),
            r"odd \(weight \(6, 10\)\) has M_Q of shape \(6, 12\) where "
            rf"{cls.__name__} needs \(6, 10\)\. Load a state dict of the same optimizer, model, rank, .* and split\.$",
        )
        for cls in (PRO, KL)
    },
    "more dimensions": (PRO, made_anew(odd=(1, 6, 10)), "odd"),
    "another algorithm": (PRO, setting(0, algorithm="adamw"), "algorithm='adamw' of loaded group 0: it is 'matrix'"),
    "another rank": (PRO, setting(0, rank=5), "odd|fine"),
    "other units": (PRO, setting(0, init_eigenvalue=1.0), "fine .*has lambda_0, in whose units init_eigenvalue='auto'"),
    "of KLShampoo": (PRO, made_anew(KL), "Group 0 .* is KLShampoo's"),
    "of ProKLShampoo": (KL, made_anew(PRO), "Group 0 .* is ProKLShampoo's"),
    "options of AdamW that exclude each other": (PRO, setting(1, foreach=True, fused=True), "Group 1, of AdamW: "),
    "options of a GPU": (PRO, setting(1, capturable=True), "Invalid capturable=True"),
    "no group": (PRO, lambda state, groups: groups.__setitem__(1, {"lr": 0.1}), "Group 1 .* has no 'params'"),
    "of Adam": (PRO, of_another_optimizer("exp_avg"), r"fine has the state of another algorithm"),
    "of Muon": (PRO, of_another_optimizer("momentum_buffer"), "fine has the state of another algorithm"),
    "not finite": (PRO, entry(3, exp_avg=lambda t: t * math.nan), "table has exp_avg between nan and nan"),
    "negative": (PRO, entry(2, exp_avg_sq=lambda t: -1 - t), "bias has exp_avg_sq between .* at least 0"),
    **{
        f"AdamW's clock {clock!r}": (
            PRO,
            entry(2, step=lambda _, c=clock: c),
            "bias has step=.*; must be one float32 of at least 0",
        )
        for clock in BAD_CLOCKS
    },
}


@pytest.mark.parametrize("cls, change, says", WRONG.values(), ids=WRONG)
def test_a_wrong_checkpoint_is_refused_and_changes_nothing(cls, change, says):
    assert_refused_in_a_file(fine_and_odd(cls, **METHODS[cls]), change, rf"\b({says})")


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon, torch.optim.RMSprop])
def test_settings_of_another_optimizer_are_refused_without_its_state(other, cls):
    p = weight(4, 6)
    optimizer = cls([{"params": [p]}])
    theirs = other([p], lr=0.5).state_dict()
    with refused(optimizer, r"Group 0 .* is another optimizer's: it has neither algorithm nor beta2"):
        optimizer.load_state_dict(theirs)
    assert optimizer.param_groups[0]["lr"] != 0.5


@pytest.mark.parametrize("cls, other", [(PRO, KL), (KL, PRO)])
def test_settings_of_the_other_method_are_refused_without_its_state(cls, other):
    optimizer = cls([weight(4, 6)], lr=0.25)
    before = copy.deepcopy(optimizer.param_groups[0])
    with refused(optimizer, f"Group 0 .* is {other.__name__}'s"):
        optimizer.load_state_dict(other([weight(4, 6)]).state_dict())
    assert before.keys() == optimizer.param_groups[0].keys() and optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.AdamW])
def test_adamws_groups_alone_take_settings_of_adamw_and_of_no_sgd(other):
    p = weight(4)
    optimizer = PRO([{"params": [p], "algorithm": "adamw", "lr": 0.1}])
    theirs = other([p], lr=0.5).state_dict()
    if other is torch.optim.AdamW:
        optimizer.load_state_dict(theirs)
        assert optimizer.param_groups[0]["lr"] == 0.5
        return
    with refused(optimizer, "Group 0 .* is another optimizer's: it has neither algorithm nor betas"):
        optimizer.load_state_dict(theirs)


POSITIVE = ("lambda_0", "inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_lambda_R", "inv_sqrt_mu")
COUNTS = {"step", "skipped", "clipped"}
VALUES = [(cls, key) for cls in KEYS for key in sorted(fine_and_odd(cls).state_dict()["state"][1].keys() - COUNTS)]


@pytest.mark.parametrize("cls, key", [*dict.fromkeys(VALUES)])
def test_one_bad_element_of_the_state_is_refused_by_key(cls, key):
    for odd in ((4, 6), (2, 4, 6)):
        optimizer = fine_and_odd(cls, odd)
        for value in (math.nan, math.inf, *((-1.0,) if key in POSITIVE else ())):  # 0 begins anew
            state = copy.deepcopy(optimizer.state_dict())
            state["state"][1][key].view(-1)[-1] = value
            with refused(optimizer, rf"The loaded state of odd has {key} with values that are .*not finite"):
                optimizer.load_state_dict(state)


def test_a_split_of_another_model_is_told_as_the_files():
    rows = ((30, 10), (20, 10))
    wide, narrow = (PRO([{"params": [("qkv", weight(*shape))], "split": (10, shape[0] - 10)}]) for shape in rows)
    step(wide, wide.param_groups[0]["params"], [normal(30, 10)])
    with refused(narrow, r"(?s)^Group 0 of the loaded state dict: Invalid split=\(10, 20\) of qkv.* one of this model"):
        narrow.load_state_dict(wide.state_dict())


CLOCKS_OF_A_STACK = [3, True, (2, True), (2, 2.5), (2, 2, 2), ("2", "2"), None]
CLOCKS_OF_A_STACK += [torch.tensor(steps) for steps in ([2.0, 2.0], [True, True], [2, 2, 2], [[2], [2]], 2)]


def test_a_clock_of_a_stack_that_is_none_is_refused():
    optimizer = fine_and_odd(KL, (2, 4, 6))
    for clock in CLOCKS_OF_A_STACK:
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][1]["step"] = clock
        with refused(optimizer, r"(?s)^The loaded state of odd .*has step=.*; must be 2 integers"):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3)], ids=repr)
def test_a_loaded_count_of_adamws_steps_may_be_any_number(count):
    optimizer = fine_and_odd(PRO)
    state, twin = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer)
    for entry in state["state"].values():
        if "exp_avg" in entry:
            assert entry["step"] == 3
            entry["step"] = count
    optimizer.load_state_dict(state)
    assert differences(train(optimizer, range(3, 6)), train(twin, range(3, 6))) == set()


def test_what_is_no_list_of_parameters_or_no_state_is_refused_by_name():
    optimizer = fine_and_odd(PRO)
    vectors = optimizer.param_groups[1]["params"]
    optimizer.param_groups[1]["params"] = vectors[0]
    with pytest.raises(ValueError, match="Invalid params of group 1, a Parameter: must be a list of tensors"):
        optimizer.step()
    optimizer.param_groups[1]["params"] = vectors
    optimizer.state[optimizer.param_groups[0]["params"][0]] = None
    with pytest.raises(ValueError, match="Invalid state of fine: must be a dict"):
        optimizer.step()
