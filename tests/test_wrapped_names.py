"""What torch.compile, DDP, FSDP or activation checkpointing put into names changes neither noise nor checkpoints."""

import warnings

import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.inputs import KL, PRO, normal, weight

BF16 = torch.bfloat16
WRAPPED = ["_orig_mod.{}", "module.{}", "module._orig_mod.{}", "_fsdp_wrapped_module.{}", "0._orig_mod.weight"]
both = pytest.mark.parametrize("cls", [PRO, KL])


def trained(cls, name, steps=3, **more):
    optimizer = cls([{"params": [(name, weight(8, 12, dtype=BF16))], **more}], lr=1e-3)
    (p,) = optimizer.param_groups[0]["params"]
    for call in range(steps):
        p.grad = normal(8, 12, seed=call, dtype=BF16)
        optimizer.step()
    return p.detach()


@both
@pytest.mark.parametrize("wrapped", [*WRAPPED, "0._checkpoint_wrapped_module.weight", "0.module.weight"])
@pytest.mark.parametrize("split", [None, 2])
def test_wrappers_do_not_change_how_bfloat16_is_rounded(cls, wrapped, split):
    plain = trained(cls, "0.weight", split=split)
    assert torch.equal(trained(cls, wrapped.format("0.weight"), split=split), plain)
    assert not torch.equal(trained(cls, "1.weight", split=split), plain)  # the name itself counts


def test_a_compiled_model_ends_where_the_model_itself_does():
    ends = []
    for wrap in (lambda m: m, torch.compile, nn.DataParallel):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4)).to(BF16)
        optimizer = PRO(param_groups(wrap(model), lr=0.01, adamw_lr=1e-3))
        for call in range(4):
            for i, p in enumerate(model.parameters()):
                p.grad = normal(*p.shape, seed=10 * call + i, dtype=BF16)
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def named(*names, frozen=()):
    optimizer = PRO(
        [{"params": [(n, weight(4, 6, seed=i).requires_grad_(n not in frozen)) for i, n in enumerate(names)]}]
    )
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        p.grad = normal(4, 6, seed=i) if p.requires_grad else None
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("wrapped", WRAPPED[:4])
def test_checkpoints_go_by_names_without_wrappers(wrapped):
    there = named("up", "down")
    with pytest.raises(ValueError, match=r"weight 0 is 'up' there and '.*down' here"):
        named(*(wrapped.format(name) for name in ("down", "up"))).load_state_dict(there.state_dict())
    here = named(*(wrapped.format(name) for name in ("up", "down")))
    here.load_state_dict(there.state_dict())
    partly = named(*(wrapped.format(name) for name in ("new", "up", "down")), frozen=[wrapped.format("new")])
    partly.load_state_dict(there.state_dict())
    new, up, down = partly.param_groups[0]["params"]
    assert new not in partly.state or not partly.state[new]
    for p, q in zip((up, down), there.param_groups[0]["params"], strict=True):
        assert torch.equal(partly.state[p]["M"], there.state[q]["M"])


def test_state_goes_to_no_weight_of_another_name_without_a_word():
    there = named("a", "b", "c").state_dict()
    for names in (("b", "d", "a"), ("x", "a", "b")):
        here = named(*names)
        before = [here.state[p]["M"].clone() for p in here.param_groups[0]["params"]]
        with pytest.raises(ValueError, match="weights in another order: weight [01] is '[ab]' there and '[bx]' here"):
            here.load_state_dict(there)
        assert all(
            torch.equal(M, here.state[p]["M"]) for M, p in zip(before, here.param_groups[0]["params"], strict=True)
        )
    with pytest.warns(UserWarning, match="other names for 1 of 3 weights: weight 1 is 'b' there and 'new' here"):
        named("a", "new", "c").load_state_dict(there)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named("a", "b", "c").load_state_dict(there)


def test_a_distributed_checkpoint_of_a_compiled_model_loads_by_name():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def build():
        torch.manual_seed(0)
        model = torch.compile(nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 12), nn.Linear(12, 8)))
        groups = param_groups(model, lr=0.01, adamw_lr=1e-3)
        return model, groups

    (old, groups), (new, others) = build(), build()
    first = groups[0]
    for key in ("params", "split"):  # saved in another order
        first[key] = first[key][::-1]
    saver, loader = PRO(groups), PRO(others)
    for i, p in enumerate(old.parameters()):
        p.grad = normal(*p.shape, seed=i)
    saver.step()
    set_optimizer_state_dict(new, loader, get_optimizer_state_dict(old, saver))
    there = {n: saver.state[p] for g in saver.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
    for group in loader.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert all(torch.equal(v, loader.state[p][k]) for k, v in there[name].items() if torch.is_tensor(v)), name
