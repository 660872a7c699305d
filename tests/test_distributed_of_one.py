"""torch.distributed.checkpoint without ranks and in a group of one: bit for bit one process, and so is what is saved.

On a GPU with NCCL, and on the CPU with gloo, so that all of it is known to run before a GPU is at hand.
"""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import prokl
from tests.inputs import KL, PRO, changed, frozen, normal, same_bits
from tests.problems import made as optimizer_of
from tests.training import fine_and_odd, weights_of
from tests.training import train as train_all

CALLS, SAVED = 8, 4
ROUTES = {
    "nested": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request, tmp_path):
    """A device whose group has one rank."""
    backend = {"cuda": "nccl", "cpu": "gloo"}[request.param]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield torch.device(request.param)
    dist.destroy_process_group()


class Net(torch.nn.Module):
    """A matrix, one that starts late, a stack, a fused one, and the same for AdamW."""

    def __init__(self):
        super().__init__()
        shapes = {"matrix": (6, 9), "late": (9, 6), "stack": (3, 5, 7), "fused": (12, 5), "table": (8, 3), "bias": (4,)}
        for i, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, torch.nn.Parameter(normal(*shape, seed=i)))


def made(cls=PRO, how="alone", device="cpu", dtype=torch.float32, order=(0, 1, 2, 3), **settings):
    """Return a net and its optimizer: alone, with a group, or sharded by FSDP2."""
    net = Net().to(device, dtype)
    if how == "fsdp2":
        fully_shard(net)
    named, splits = list(net.named_parameters()), [None, None, None, (4, 8)]
    groups = [
        {"params": [named[i] for i in order], "split": [splits[i] for i in order]},
        {"params": named[4:], "algorithm": "adamw", "lr": 0.01},
    ]
    if cls is PRO:
        settings["rank"] = 3
    group = dist.group.WORLD if how == "group" else None
    return net, optimizer_of(cls, groups, precondition_frequency=3, process_group=group, **settings)


def train(net, optimizer, first, last, between=lambda: None):
    for call in range(first, last):
        for i, (name, p) in enumerate(net.named_parameters()):
            G = normal(*p.shape, seed=100 * call + i, dtype=p.dtype).to(p.device)
            if name == "stack" and call < 2:
                G[1] = 0.0  # a matrix of the stack has still to begin
            if hasattr(p, "placements"):
                G = dist.tensor.distribute_tensor(G, p.device_mesh, p.placements)
            p.grad = None if name in ("late", "bias") and call < SAVED + 1 else G
        optimizer.step()
        between()
    return net


def assert_same(one, other):
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert same_bits(*(t.full_tensor() if hasattr(t, "full_tensor") else t for t in (p, q)))


def assert_resumes(make, route, folder):
    """Train, save and resume by a route; the run and its resumption end where one process does."""
    alone = train(*make("alone"), 0, CALLS)
    net, optimizer = make("as it is")
    train(net, optimizer, 0, SAVED)
    options, weights = ROUTES[route], copy.deepcopy(net.state_dict())
    saved = get_optimizer_state_dict(net, optimizer, options=options)
    other, resumed = make("as it is")
    other.load_state_dict(weights)
    if route == "full":
        assert all(type(v) is torch.Tensor for own in saved["state"].values() for v in own.values())
        found = copy.deepcopy(saved)  # of one rank it is the live state
    else:
        dcp.save({"optimizer": saved}, checkpoint_id=folder)
        found = {"optimizer": get_optimizer_state_dict(other, resumed, options=options)}
        dcp.load(found, checkpoint_id=folder)
        found = found["optimizer"]
    set_optimizer_state_dict(other, resumed, found, options=options)
    step = resumed.state[other.stack]["step"]
    assert same_bits(step, torch.tensor([SAVED - 1, SAVED - 3, SAVED - 1])) and step.device.type == "cpu"
    assert_same(train(net, optimizer, SAVED, CALLS), alone)
    assert_same(train(other, resumed, SAVED, CALLS), alone)


@pytest.mark.parametrize("route", ["nested", "flattened"])
@pytest.mark.parametrize("how", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "bf16_weights": "master"}])
@pytest.mark.parametrize("cls", [PRO, KL])
def test_a_run_continues_bit_for_bit_through_a_distributed_checkpoint(cls, how, route, tmp_path):
    assert_resumes(lambda _: made(cls, **how), route, tmp_path)


@pytest.mark.parametrize("route", ["nested", "full"])
@pytest.mark.parametrize("how", ["group", "fsdp2"])
def test_a_group_of_one_is_one_process_bit_for_bit_and_so_is_what_it_saves(how, route, device, tmp_path):
    def make(which):
        return made(how="alone" if which == "alone" else how, device=device)

    assert_resumes(make, route, tmp_path / "checkpoint")


def test_an_empty_state_dict_is_loaded_and_training_begins(device):
    """As Accelerate does."""
    net, optimizer = made(how="group", device=device)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(train(net, optimizer, 0, 3), train(*made(device=device), 0, 3))


def test_what_hooks_keep_beside_the_weights_goes_along(device):
    net, optimizer = made(how="group", device=device)
    train(net, optimizer, 0, 3)
    optimizer.state["mark"] = 1
    assert optimizer.gather_state_dict()["state"]["mark"] == 1
    saved = optimizer.state_dict()
    assert saved["state"]["mark"] == 1
    del optimizer.state["mark"]
    optimizer.load_state_dict(saved)
    assert optimizer.state["mark"] == 1 and optimizer.state[net.matrix].keys() == saved["state"][0].keys()


def test_an_offload_between_steps_leaves_the_bits_and_frees_what_the_rank_has(device):
    net, optimizer = made(how="group", device=device)

    def offload():
        optimizer.offload()
        own = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        assert own and not any(v._is_view() for v in own)

    assert_same(train(net, optimizer, 0, 3, offload), train(*made(how="group", device=device), 0, 3))


@pytest.mark.parametrize("how", ["alone", "group", "fsdp2"])
def test_a_weight_that_leaves_with_its_state_leaves_nothing_behind(how, device):
    net, optimizer = made(how=how, device=device)
    train(net, optimizer, 0, 2)
    stand_ins = [] if how == "alone" else [w.stand_in for w in optimizer._division.weights.values()]
    left = [weakref.ref(t) for t in (*net.parameters(), *stand_ins)]
    del stand_ins
    for group in optimizer.param_groups:
        for key, values in group.items():
            group[key] = values[:0] if isinstance(values, list) else values
    for p in net.parameters():
        optimizer.state.pop(p)
    optimizer.step()
    del net, p, group, values
    gc.collect()
    assert [t() for t in left] == [None] * len(left)


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


@pytest.mark.parametrize("split", [(4, 8), [None, (4, 8)]], ids=["of all", "of each"])
def test_the_sizes_of_a_split_survive_a_full_state_dict_which_has_lists_for_tuples(split):
    def fused(*given):
        net = torch.nn.ParameterDict({"first": normal(12, 5), "fused": normal(12, 7)})
        optimizer = PRO([{"params": list(net.named_parameters()), "split": split}], rank=3)
        for p, g in zip(net.parameters(), given, strict=False):
            p.grad = g
        optimizer.step()
        return net, optimizer

    net, optimizer = fused(normal(12, 5, seed=1), normal(12, 7, seed=2))
    whole = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=ROUTES["full"]))
    other, resumed = fused()
    set_optimizer_state_dict(other, resumed, whole, options=ROUTES["full"])
    group = resumed.param_groups[0]
    assert group["split"] == split and group["ns_coefficients"] == (3.4445, -4.775, 2.0315)
    assert same_bits(resumed.state[other["fused"]]["M.1"], optimizer.state[net["fused"]]["M.1"])


@pytest.mark.parametrize("route", ["nested", "flattened"])
@pytest.mark.parametrize("cls", [PRO, KL])
def test_weights_in_another_order_take_their_own_state_and_readings(cls, route):
    """These checkpoints go by names; what a plain state dict has in another order is refused."""
    net, optimizer = made(cls)
    other, resumed = made(cls, order=(3, 1, 0, 2))
    train(net, optimizer, 0, SAVED)
    train(other, resumed, 0, 2)
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    found = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=ROUTES[route]))
    set_optimizer_state_dict(other, resumed, found, options=ROUTES[route])
    assert resumed.param_groups[0]["param_names"] == ["fused", "late", "matrix", "stack"]
    assert resumed.param_groups[0]["split"] == [(4, 8), None, None, None]
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert not changed(frozen(optimizer, p), frozen(resumed, q))
    train(other, resumed, SAVED, CALLS)
