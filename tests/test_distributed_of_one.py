"""An optimizer in a group of one, and without ranks, is one process's, bit for bit, and so is what it saves.

Tests run on a GPU with NCCL, and on the CPU with gloo, so that all of it is known to run before a GPU is at hand.
"""

import copy
import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from prokl.algorithm.polynomials import MUON
from tests.distributed import checkpoints
from tests.distributed.checkpoints import END, SAVED, load, save
from tests.distributed.placements import BEGINS, LATE, SHAPES, Run, assert_same, matrices_and_vectors, whole
from tests.inputs import KL, PRO, forbid_host_reads, normal, same_bits
from tests.training import contents, differences

SOME = {name: SHAPES[name] for name in ("square", "wide", "qkv", "experts", "late", "table", "gains")}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request, tmp_path):
    """A device whose group has one rank."""
    backend = {"cuda": "nccl", "cpu": "gloo"}[request.param]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield torch.device(request.param)
    dist.destroy_process_group()


@pytest.mark.parametrize("route", ["nested", "full"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_group_of_one_is_one_process_bit_for_bit(how, route, device, tmp_path):
    """The run and its resumption end where one process does."""
    given = {"shapes": SOME, "dtype": torch.float32, "device": device}
    alone = whole(Run(**given).train(0, END).weights)
    run, resumed = (Run(how, **given) for _ in range(2))
    save(run.train(0, SAVED), tmp_path / route, route)
    load(resumed, tmp_path / route, route)
    step = resumed.optimizer.state[resumed.weights["experts"]]["step"]
    assert same_bits(step, torch.tensor([SAVED - 1, SAVED - 1 - BEGINS, *[SAVED - 1] * 4])) and step.is_cpu
    for each in (run, resumed):
        assert_same(whole(each.train(SAVED, END).weights), alone)


def test_ranks_skip_each_weight_of_fused_adamw_alone(device, monkeypatch):
    """Copies of a weight on several ranks part where one of them skips it for a gradient that the others lack."""
    forbid_host_reads(monkeypatch)
    bad, good = (torch.nn.Parameter(normal(5).to(device)) for _ in range(2))
    matrix = torch.nn.Parameter(normal(4, 6).to(device))
    own = {"params": [bad, good], "algorithm": "adamw", "lr": 0.1, "fused": True}
    optimizer = PRO([{"params": [matrix]}, own], rank=2, process_group=dist.group.WORLD)
    for p in (bad, good):
        p.grad = torch.ones_like(p)
    bad.grad[0] = torch.nan
    optimizer.step()
    assert same_bits(bad.cpu(), normal(5)) and (good.cpu() < normal(5)).all()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_groups_are_checked_only_where_something_has_changed(how, device):
    run = Run(how, shapes=SOME, device=device).train(0, LATE + 2)
    outer, own = run.optimizer._outer, run.optimizer.engine
    with patch.object(outer, "check_group") as checked, patch.object(own, "build") as built:
        run.step(LATE + 2)
        assert not checked.called and not built.called
    run.optimizer.param_groups[0]["momentum"] = 1.5
    with pytest.raises(ValueError, match=r"Invalid momentum=1\.5"):
        run.step(LATE + 3)


def test_an_empty_state_dict_is_loaded_and_training_begins(device):
    """Accelerate does so."""
    run = Run("ddp", device=device)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert_same(whole(run.train(0, 3).weights), whole(Run(device=device).train(0, 3).weights))


def test_what_hooks_keep_beside_the_weights_goes_along(device):
    run = Run("ddp", device=device).train(0, 3)
    optimizer = run.optimizer
    optimizer.state["mark"] = 1
    assert optimizer.gather_state_dict()["state"]["mark"] == 1
    saved = optimizer.state_dict()
    assert saved["state"]["mark"] == 1
    del optimizer.state["mark"]
    optimizer.load_state_dict(saved)
    assert optimizer.state["mark"] == 1 and optimizer.state[run.weights["square"]].keys() == saved["state"][0].keys()


@pytest.mark.parametrize("how", ["alone", "ddp", "fsdp"])
def test_a_weight_that_leaves_takes_its_state_with_it(how, device):
    run = Run(how, device=device).train(0, 2)
    run.weights["gains"].grad = torch.full_like(run.weights["gains"], torch.nan)  # which is counted
    run.optimizer.step()
    optimizer, weights = run.optimizer, [*run.weights.values()]
    stand_ins = [] if how == "alone" else [w.stand_in for w in optimizer._division.weights.values()]
    left = [weakref.ref(t) for t in (*weights, *stand_ins)]
    for group in optimizer.param_groups:
        for key, values in group.items():
            group[key] = values[:0] if isinstance(values, list) else values
    for p in weights:
        optimizer.state.pop(p)
    optimizer.step()
    del run, weights, stand_ins, p, group, values
    gc.collect()
    assert [t() for t in left] == [None] * len(left)


@pytest.mark.parametrize(
    "split, polynomials",
    [((4, 8), MUON), ([None, (4, 8)], (MUON,) * 5), ([None, (4, 8)], "polar-express")],
    ids=["of all", "of each", "named"],
)
def test_tuples_survive_a_full_state_dict_with_lists(split, polynomials, tmp_path):
    """Sizes of a split, and polynomials of Newton-Schulz."""
    given = {"shapes": {"first": (12, 5), "fused": (12, 7)}}
    own = {"split": split, "ns_coefficients": polynomials}
    given["groups"] = lambda weights: [{"params": [*weights.items()], **own}]
    run, resumed = Run(**given).train(0, 1), Run(**given)
    save(run, tmp_path / "full", "full")
    load(resumed, tmp_path / "full", "full")
    group = resumed.optimizer.param_groups[0]
    assert group["split"] == split and group["ns_coefficients"] == polynomials
    (one, other) = (each.optimizer.state[each.weights["fused"]]["M_Q.1"] for each in (run, resumed))
    assert same_bits(one, other)


@pytest.mark.parametrize("route", ["nested", "flattened"])
@pytest.mark.parametrize("cls", [PRO, KL])
def test_reordered_weights_take_their_own_state(cls, route, tmp_path):
    """These checkpoints go by names; what a plain state dict has in another order is refused."""
    run, other = Run(cls=cls), Run(cls=cls, shapes=dict(reversed(SHAPES.items())))
    groups = copy.deepcopy([(group["param_names"], group.get("split")) for group in other.optimizer.param_groups])
    save(run.train(0, SAVED), tmp_path / route, route)
    load(other.train(0, 2), tmp_path / route, route)
    assert [(group["param_names"], group.get("split")) for group in other.optimizer.param_groups] == groups
    assert groups[0] != (run.optimizer.param_groups[0]["param_names"], run.optimizer.param_groups[0]["split"])
    for name, p in run.weights.items():
        found = contents(run.optimizer, [p]), contents(other.optimizer, [other.weights[name]])
        assert differences(*found) == set()
    other.train(SAVED, END)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("component", ["layer", "module", "base_layer"])
@pytest.mark.parametrize("wrapper", ["", "module."], ids=["", "DDP"])
def test_weights_of_other_stages_keep_components_that_wrappers_share(wrapper, component, flat):
    """Torch names such weights whole, and takes no wrapper of its own out of them."""

    def build(*numbers):
        layers = {f"stage{i}": torch.nn.ModuleDict({component: torch.nn.Linear(6, 4, bias=False)}) for i in numbers}
        model = torch.nn.ModuleDict(layers)
        params = [(wrapper + name, p) for name, p in model.named_parameters()]
        optimizer = PRO([{"params": params, "split": [2 * (i % 2) or None for i in numbers]}])
        for step in range(3):
            for name, p in params:
                p.grad = normal(4, 6, seed=step + 10 * int(name.removeprefix(wrapper)[5]))
            optimizer.step()
        return model, optimizer, dict(params)

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer, weights = build(0, 1, 2, 3)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    for numbers in ((2, 3), (3, 2, 1, 0)):
        other, to, its = build(*numbers)
        expected = [to.param_groups[0][key] for key in ("param_names", "split")]
        set_optimizer_state_dict(other, to, copy.deepcopy(saved), options=options)
        assert [to.param_groups[0][key] for key in ("param_names", "split")] == expected
        for name, p in its.items():
            own, there = to.state[p], optimizer.state[weights[name]]
            assert own.keys() == there.keys()
            assert all(same_bits(torch.as_tensor(v), torch.as_tensor(there[key])) for key, v in own.items())


def one_matrix_each(weights):
    *matrices, vectors = matrices_and_vectors(weights)
    return [{"params": [p], "split": [split]} for p, split in zip(*matrices[0].values(), strict=True)] + [vectors]


@pytest.mark.parametrize("groups", [None, one_matrix_each])
def test_weights_of_other_stages_and_groups_take_their_own_state(groups, tmp_path):
    """PyTorch gives a group the names and lists of the one that its first weight was saved in."""
    saved, stages = {}, [("square", "qkv", "table"), ("wide", "experts2", "gains")]
    runs = [Run(shapes={name: SHAPES[name] for name in stage}).train(0, SAVED) for stage in stages]
    for run in runs:
        saved |= checkpoints.contents(run, "flattened")["optimizer"]
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    for names in (sum(stages, ()), ("square", "qkv", "wide", "gains"), ("wide", "qkv", "table"), ("qkv", "gains")):
        other = Run(shapes={name: SHAPES[name] for name in names}, groups=groups)
        expected = copy.deepcopy([(group["param_names"], group.get("split")) for group in other.optimizer.param_groups])
        load(other, tmp_path, "flattened", model=False)
        assert [(group["param_names"], group.get("split")) for group in other.optimizer.param_groups] == expected
        for name, p in other.weights.items():
            source = next(run for run in runs if name in run.weights)
            own = other.optimizer.state[p], source.optimizer.state[source.weights[name]]
            assert own[0].keys() == own[1].keys()
            assert all(same_bits(torch.as_tensor(v), torch.as_tensor(own[1][key])) for key, v in own[0].items())
        other.train(SAVED, END)


def one_of_three(decayed):
    """Return what makes a group of the matrices, one of ``decayed`` vectors, and one of the others."""

    def groups(weights):
        matrices, vectors = matrices_and_vectors(weights)
        parts = [[pair for pair in vectors["params"] if (pair[0] in decayed) is own] for own in (True, False)]
        vectors |= {"betas": (0.8, 0.95)}
        return [matrices, vectors | {"params": parts[0], "weight_decay": 0.2}, vectors | {"params": parts[1]}]

    return groups


def test_a_group_that_a_file_has_no_settings_for_keeps_its_own(tmp_path):
    """PyTorch gives what a saved group had to the last group here that has a weight of it, and the others nothing."""
    run, other = Run(groups=one_of_three(("table", "one"))), Run(groups=one_of_three(("table",)))
    own = {key: value for key, value in other.optimizer.param_groups[1].items() if key != "params"}
    save(run.train(0, SAVED), tmp_path / "nested", "nested")
    with pytest.warns(UserWarning, match=r"has no settings for groups \[1\].*those here stay"):
        load(other, tmp_path / "nested", "nested")
    assert {key: other.optimizer.param_groups[1][key] for key in own} == own
    run.train(SAVED, END), other.train(SAVED, END)
    assert_same(*({k: v for k, v in whole(each.weights).items() if k != "one"} for each in (run, other)))
