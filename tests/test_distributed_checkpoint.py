"""torch.distributed.checkpoint's state dicts: nested and flattened, with weights that have not begun."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import prokl
from tests.inputs import KL, PRO, changed, frozen, normal, same_bits
from tests.problems import made as optimizer_of
from tests.training import fine_and_odd, weights_of
from tests.training import train as train_all

CALLS, SAVED = 8, 4


class Net(torch.nn.Module):
    """A matrix, one that starts late, a stack, a fused one, and the same for AdamW."""

    def __init__(self):
        super().__init__()
        shapes = {"matrix": (6, 9), "late": (9, 6), "stack": (3, 5, 7), "fused": (12, 5), "table": (8, 3), "bias": (4,)}
        for i, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, torch.nn.Parameter(normal(*shape, seed=i)))


def made(cls, dtype=torch.float32, order=(0, 1, 2, 3), **settings):
    net = Net().to(dtype)
    named, splits = list(net.named_parameters()), [None, None, None, (4, 8)]
    groups = [
        {"params": [named[i] for i in order], "split": [splits[i] for i in order]},
        {"params": list(net.named_parameters())[4:], "algorithm": "adamw", "lr": 0.01},
    ]
    rank = {"rank": 3} if cls is PRO else {}
    return net, optimizer_of(cls, groups, precondition_frequency=3, **rank, **settings)


def train(net, optimizer, first, last):
    for call in range(first, last):
        for i, p in enumerate(net.parameters()):
            late = (p is net.late or p is net.bias) and call < SAVED + 1
            p.grad = None if late else normal(*p.shape, seed=100 * call + i, dtype=p.dtype)
        if call < 2:
            net.stack.grad[1] = 0.0  # a matrix of the stack has still to begin
        optimizer.step()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("how", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "bf16_weights": "master"}])
@pytest.mark.parametrize("cls", [PRO, KL])
def test_a_run_continues_bit_for_bit_through_a_distributed_checkpoint(cls, how, flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    net, optimizer = made(cls, **how)
    train(net, optimizer, 0, SAVED)
    dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer, options=options)}, checkpoint_id=tmp_path)

    other, resumed = made(cls, **how)
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    found = {"optimizer": get_optimizer_state_dict(other, resumed, options=options)}
    dcp.load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, resumed, found["optimizer"], options=options)
    step = resumed.state[other.stack]["step"]
    assert same_bits(step, torch.tensor([SAVED - 1, SAVED - 3, SAVED - 1])) and step.device.type == "cpu"

    train(net, optimizer, SAVED, CALLS)
    train(other, resumed, SAVED, CALLS)
    assert all(same_bits(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_adamws_entry_of_a_weight_without_a_gradient_is_what_adamw_starts_from():
    for options in ({}, {"amsgrad": True}, {"fused": True}):
        early, late = (torch.nn.Parameter(normal(4, 3).to(torch.float64)) for _ in range(2))
        own = prokl.ProKLShampoo([{"params": [early, late], "algorithm": "adamw", "lr": 0.1, **options}])
        early.grad = torch.ones_like(early)
        own.step()
        assert own.state[late].keys() == own.state[early].keys()
        for key, value in own.state[late].items():
            assert not value.any()
            assert (value.dtype, value.shape) == (own.state[early][key].dtype, own.state[early][key].shape)
        alone = torch.optim.AdamW([copy.deepcopy(late)], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, **options)
        (twin,) = alone.param_groups[0]["params"]
        late.grad, twin.grad, early.grad = torch.ones_like(late), torch.ones_like(late), None
        own.step()
        alone.step()
        assert same_bits(late, twin)


def test_what_a_wrapper_keeps_of_an_adamw_weight_before_its_first_gradient_stays():
    optimizer = fine_and_odd(PRO, calls=0)
    bias = weights_of(optimizer)[2]
    optimizer.state[bias]["slow"] = slow = bias.detach().clone()
    train_all(optimizer, [0])
    assert optimizer.state[bias]["slow"] is slow and optimizer.state[bias]["exp_avg"].all()


def test_a_weight_that_never_gets_a_gradient_stays_as_it_is_and_out_of_every_batch():
    net, optimizer = made(PRO)
    train(net, optimizer, 0, SAVED)
    assert optimizer.state[net.late]["step"] == -1 and not optimizer.state[net.late]["M"].any()
    assert net.late not in {member.p for bucket in optimizer.engine.buckets() for member in bucket.members}
    assert same_bits(net.late, Net().late)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("split", [(4, 8), [None, (4, 8)]], ids=["of all", "of each"])
def test_the_sizes_of_a_split_survive_a_full_state_dict_which_has_lists_for_tuples(split):
    options = StateDictOptions(full_state_dict=True)

    def fused(*given):
        net = torch.nn.ParameterDict({"first": normal(12, 5), "fused": normal(12, 7)})
        optimizer = PRO([{"params": list(net.named_parameters()), "split": split}], rank=3)
        for p, g in zip(net.parameters(), given, strict=False):
            p.grad = g
        optimizer.step()
        return net, optimizer

    net, optimizer = fused(normal(12, 5, seed=1), normal(12, 7, seed=2))
    whole = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))
    other, resumed = fused()
    set_optimizer_state_dict(other, resumed, whole, options=options)
    assert resumed.param_groups[0]["split"] == split and resumed.param_groups[0]["ns_coefficients"] == (
        3.4445,
        -4.775,
        2.0315,
    )
    assert same_bits(resumed.state[other["fused"]]["M.1"], optimizer.state[net["fused"]]["M.1"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("cls", [PRO, KL])
def test_weights_in_another_order_take_their_own_state_and_readings(cls, flatten):
    """These checkpoints go by names; what a plain state dict has in another order is refused."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    net, optimizer = made(cls)
    other, resumed = made(cls, order=(3, 1, 0, 2))
    train(net, optimizer, 0, SAVED)
    train(other, resumed, 0, 2)
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    set_optimizer_state_dict(
        other, resumed, copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options)), options=options
    )
    assert resumed.param_groups[0]["param_names"] == ["fused", "late", "matrix", "stack"]
    assert resumed.param_groups[0]["split"] == [(4, 8), None, None, None]
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert not changed(frozen(optimizer, p), frozen(resumed, q))
    train(other, resumed, SAVED, CALLS)
