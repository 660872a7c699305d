"""Bad settings and parameters: an error that names what is wrong and the bound, and nothing has changed."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.inputs import INF, KL, NAN, PRO, both, normal, step, weight
from tests.test_plain_memory import NOT_PLAIN
from tests.training import differences, fine_and_odd, named, refused, train, weights_of

AT_LEAST_0 = ((-0.1, NAN, INF, 10**400, True, "0.1", None, 1j), "a finite number of at least 0")
FRACTION = ((-0.1, 1.0, 1.5, NAN, INF, True, "0.9", None), r"in \[0, 1\)")
COUNT = ((0, -1, 2.5, NAN, INF, True, "3", None), "an integer of at least 1")
FLAG = (("yes", None, NAN, 2), r"one of \(True, False\)")
BETAS = ((0.9,), (0.9, 1.0), (-0.1, 0.9), (NAN, 0.9), (True, 0.9), (False, 0.9), ("0.9", 0.9), 0.9, None)
RATES = (torch.tensor([0.1, 0.1]), torch.tensor(-0.1), torch.tensor(NAN), torch.tensor([[0.1]]))
LR = ((*AT_LEAST_0[0], *RATES), "a finite number of at least 0, or a tensor with one such element, of at most one dim")
# The bad values of every setting, and the words of its bound.
BAD = {
    "lr": LR,
    "weight_decay": AT_LEAST_0,
    "momentum": FRACTION,
    "beta2": FRACTION,
    "eps": AT_LEAST_0,
    "precondition_frequency": COUNT,
    "init_eigenvalue": (
        (0.0, -0.1, NAN, INF, 3.5e38, 10**400, True, "0.1", "rms", None),
        '"auto" or a number above 0 and of at most 3.4e38, about float32',
    ),
    "clip_threshold": ((1.4, 0.5, -1, 0, INF, NAN, True, "auto"), "a finite number of at least 1.5, where 1.* or None"),
    "state_dtype": (("fp32", torch.int32, torch.complex64, 32, np.float32), "one of "),
    "bf16_weights": (("nearest", torch.bfloat16, True, None), "one of "),
    "backend": (("triton-please", 1, True), "one of "),
    "maximize": FLAG,
    "cautious_weight_decay": FLAG,
    "adjust_lr_fn": (("match_rms", True, 0.2), "one of "),
}
BAD_PRO = {
    "rank": ((*COUNT[0], "full"), '"auto" or an integer of at least 1'),
    "alpha_kl": ((*AT_LEAST_0[0], "automatic"), '"auto" or a finite number of at least 0'),
    "ns_steps": COUNT,
    "ns_coefficients": (
        ((1.0, 2.0), (1.0, 2.0, NAN), (1.0, 2.0, INF), (1.0, 2.0, True), "abc", 3.0, None, (), ((1.0, 2.0),) * 5),
        r"three finite numbers \(a, b, c\), a list of such triples with one an iteration, or 'polar-express' or",
    ),
    "variant": (("muon", "Pro-KLShampoo", 1, None), "one of "),
}
BAD_ADAMW = {"lr": LR, "betas": (BETAS, r"two numbers in \[0, 1\)"), "eps": AT_LEAST_0, "weight_decay": AT_LEAST_0}
ALGORITHM = {"algorithm": (("muon", "AdamW", None, 1), "one of ")}


def cases(cls, place, table, each=True):
    """List (class, group, setting, values, words) of every setting: all bad values, or one, in turn another."""
    for i, (name, (values, words)) in enumerate(table.items()):
        some = values if each else [values[i % len(values)]]
        yield pytest.param(cls, place, name, some, words, id=f"{cls.__name__}-{place}-{name}")


# A value is judged by the same lines in both optimizers: every one in the first, every setting in the second.
CASES = [*cases(PRO, 0, BAD | BAD_PRO), *cases(PRO, 1, BAD_ADAMW), *cases(PRO, 0, ALGORITHM)]
CASES += [*cases(KL, 0, BAD, False), *cases(KL, 1, BAD_ADAMW, False), *cases(KL, 0, ALGORITHM, False)]


def test_averages_that_bfloat16_rounds_away_are_refused():
    for cls in (PRO, KL):
        for name in ("momentum", "beta2"):
            own = {name: 0.996, "state_dtype": torch.bfloat16}
            with pytest.raises(ValueError, match=rf"{name}=0.996 with .*: must be at most 0.995.*Use .*float32"):
                cls([weight(6, 10)], **own)
            cls([weight(6, 10)], **own | {"state_dtype": torch.float32})
            cls([weight(6, 10)], **own | {name: 0.995})


def test_a_wrong_number_of_polynomials_is_refused():
    two = [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5)]
    for given, has, steps in ((two, 2, 5), ("deepseek-v4", 10, 5), (two, 2, 3)):
        with pytest.raises(ValueError, match=rf"with ns_steps={steps}: must have one .* has {has}. Set ns_steps={has}"):
            PRO(named((4, 6)), ns_coefficients=given, ns_steps=steps)


@both
def test_an_init_eigenvalue_as_large_as_float32_holds_it_steps(cls):
    optimizer = train(cls(named((4, 6)), init_eigenvalue=3.4e38), range(3))
    (p,) = weights_of(optimizer)
    assert p.isfinite().all() and (optimizer.state[p]["inv_sqrt_lambda_L"] > 0).all()


@pytest.mark.parametrize("cls, place, name, values, words", CASES)
def test_a_bad_setting_is_refused_wherever_it_comes_from(cls, place, name, values, words):
    """Try the constructor, a group of it or a new one, by hand and from a file; then all goes on as without it."""
    optimizer, twin = fine_and_odd(cls), fine_and_odd(cls)
    for value in values:
        says = rf"(?s)\b{name}={re.escape(repr(value))}.*{words}"
        bad = {"lr": 0.1, "algorithm": ("matrix", "adamw")[place], name: value}
        with pytest.raises(ValueError, match=says):
            cls([{"params": [weight(4, 6)]}, {"params": [weight(4, 6)], **bad}])
        if place == 0 and name != "algorithm":
            with pytest.raises(ValueError, match=says):
                cls([weight(4, 6)], **{name: value})
        group = {"params": [("late", weight(4, 6))], **bad}
        given = {**group}
        with refused(optimizer, says):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 2 and group == given
        good, optimizer.param_groups[place][name] = optimizer.param_groups[place][name], value
        with refused(optimizer, says):
            train(optimizer, [3])
        optimizer.param_groups[place][name] = good
        if name not in ("backend", "algorithm", "adjust_lr_fn"):  # the machine's; held elsewhere
            state = copy.deepcopy(twin.state_dict())
            state["param_groups"][place][name] = value
            with refused(optimizer, f"(?s)Group {place} of the loaded state dict: .*" + says.removeprefix("(?s)")):
                optimizer.load_state_dict(state)
    assert differences(train(optimizer, [3]), train(twin, [3])) == set()


PARAM_GROUPS_SETTINGS = {"lr": LR, "weight_decay": AT_LEAST_0, "rank": BAD_PRO["rank"]}
PARAM_GROUPS_SETTINGS |= {f"adamw_{name}": case for name, case in BAD_ADAMW.items()}


def test_param_groups_refuses_a_bad_setting():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for name, (values, words) in PARAM_GROUPS_SETTINGS.items():
        for value in values:
            if value is None and name in ("weight_decay", "rank"):
                continue  # the optimizer's
            with pytest.raises(ValueError, match=rf"(?s)Invalid {name}={re.escape(repr(value))}: must be {words}"):
                param_groups(model, **({"lr": 0.02, "adamw_lr": 1e-3} | {name: value}))


# Settings that torch.optim.AdamW refuses when it is made.
@pytest.mark.parametrize("flags", [{"foreach": True, "fused": True}, {"foreach": True, "lr": torch.tensor(0.1)}])
def test_adamw_options_that_exclude_each_other_raise_when_added(flags):
    optimizer = PRO([weight(4, 6)])
    with refused(optimizer, "foreach", (ValueError, RuntimeError)):
        optimizer.add_param_group({"params": [weight(6)], "algorithm": "adamw", "lr": 0.1, **flags})


@both
def test_adamw_group_without_its_own_lr_raises(cls):
    group, optimizer = {"params": [weight(6)], "algorithm": "adamw"}, cls([weight(4, 6)])
    with pytest.raises(ValueError, match=r"adamw.*\blr\b"):
        cls([{"params": [weight(4, 6)]}, group], lr=0.1)
    with refused(optimizer, r"adamw.*\blr\b"):
        optimizer.add_param_group(group)


UNUSABLE = {
    "scalar": (torch.zeros(()), "adamw"),
    "vector": (torch.zeros(5), "adamw"),
    "empty vector": (torch.zeros(0), "adamw|leave it out"),
    "sparse": (torch.eye(4).to_sparse(), "dense"),
    "expanded": (torch.zeros(1, 4).expand(6, 4), "contiguous"),
    "complex": (torch.zeros(4, 6, dtype=torch.complex64), "real"),
    "integer": (torch.zeros(4, 6, dtype=torch.int64), "leave it out"),
    "boolean": (torch.zeros(4, 6, dtype=torch.bool), "leave it out"),
    "8-bit float": (torch.zeros(4, 6).to(torch.float8_e4m3fn), "convert"),
    "on the meta device": (
        torch.zeros(4, 6, device="meta"),
        "on the meta device, which holds no values.*materialise the model",
    ),
    "negated in name": (torch._neg_view(torch.zeros(4, 6)), r"a negation that is still to do.*p\.resolve_neg\(\)"),
    **{
        key: (make(torch.zeros(4, 6)), f"is a tensor .*{says}.*{'adamw=' if 'stands' in says else 'contiguous'}")
        for key, (make, says) in NOT_PLAIN.items()
    },
    "1x1": (torch.zeros(1, 1), "adamw"),
    "1x1 convolution of one channel": (torch.zeros(1, 1, 1, 1), "adamw"),
    "stack of 1x1": (torch.zeros(3, 1, 1), "adamw"),
    "no rows": (torch.zeros(0, 4), "leave it out"),
    "no columns": (torch.zeros(4, 0), "leave it out"),
    "no matrices": (torch.zeros(0, 3, 4), "leave it out"),
    "empty matrices": (torch.zeros(2, 0, 4), "leave it out"),
}


def parameter(tensor):
    """A tensor as a weight; wrappers, which nn.Parameter would copy, as they are."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    if type(tensor) is not torch.Tensor:
        return tensor.requires_grad_()
    return nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())


@both
@pytest.mark.parametrize("tensor, remedy", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unfit_parameter_is_named_with_the_remedy(cls, tensor, remedy):
    odd = parameter(tensor)
    with pytest.raises(ValueError, match=rf"(?s)block\.odd\b.*(?i:{remedy})"):
        cls([("fine", weight(4, 6)), ("block.odd", odd)])
    with pytest.raises(ValueError, match=rf"(?s)parameter 1 of group 0\b.*(?i:{remedy})"):
        cls([weight(4, 6), odd], backend="reference")
    optimizer = cls([("fine", weight(4, 6))])
    with refused(optimizer, rf"(?s)block\.odd\b.*(?i:{remedy})"):
        optimizer.add_param_group({"params": [("block.odd", odd)]})


@pytest.mark.parametrize("place", [1, 3], ids=["matrix", "adamw"])
@both
def test_a_sparse_gradient_raises_before_anything_moves(cls, place):
    optimizer = fine_and_odd(cls)
    given = [normal(*p.shape) for p in weights_of(optimizer)]
    given[place] = given[place].to_sparse()
    with refused(optimizer, "(?i)sparse", RuntimeError):
        step(optimizer, weights_of(optimizer), given)


def test_a_state_without_room_is_told_before_anything_moves():
    optimizer = train(KL([("fine", weight(4, 6))]), [0])
    huge = torch.nn.Parameter(torch.zeros(2, 3_000_000))  # R has 9e12 elements
    optimizer.add_param_group({"params": [("token_table", huge)]})
    (fine, _), huge.grad = weights_of(optimizer), torch.ones_like(huge)
    before, fine.grad = fine.detach().clone(), normal(4, 6)
    with pytest.raises(RuntimeError, match=r"No state for token_table of shape \(2, 3000000\).*adamw"):
        optimizer.step()
    assert torch.equal(fine, before)


class Own(nn.Parameter):
    pass


@pytest.mark.parametrize(
    "odd, says",
    [
        (parameter(UNUSABLE["on the meta device"][0]), UNUSABLE["on the meta device"][1]),
        (Own(torch.ones(1).expand(5)), "several elements in one place of memory"),
    ],
)
def test_adamw_takes_no_weight_without_values_or_place_either(odd, says):
    optimizer = PRO([("fine", weight(4, 6))])
    with refused(optimizer, rf"^block\.odd .*{says}"):
        optimizer.add_param_group({"params": [("block.odd", odd)], "algorithm": "adamw", "lr": 0.1})


@pytest.mark.parametrize(
    ("dtype", "fused", "says"),
    [
        (torch.complex64, True, r"Invalid fused=True: odd is torch.complex64.*without fused"),
        (torch.float8_e4m3fn, False, r"odd has dtype torch.float8_e4m3fn.*convert it"),
    ],
)
def test_adamw_refuses_a_weight_that_torch_fails_at_in_the_midst_of_a_step(dtype, fused, says):
    odd = torch.nn.Parameter(torch.zeros(3, 4).to(dtype))
    groups = [{"params": named((4, 6))}, {"params": [("odd", odd)], "algorithm": "adamw", "lr": 0.01}]
    with pytest.raises(ValueError, match=says):
        PRO([groups[0], groups[1] | {"fused": fused}])
    frozen = torch.nn.Parameter(odd.detach(), requires_grad=False)
    PRO([groups[0], groups[1] | {"params": [("odd", frozen)], "fused": fused}])
    if fused:  # as the recipe sets it, once the groups are made
        optimizer = train(PRO(groups), [0])
        optimizer.param_groups[1]["fused"] = True
        with refused(optimizer, says):
            train(optimizer, [1])
