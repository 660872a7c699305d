"""A divided optimizer does with unusual use what one process does; what ranks disagree on is told to all of them."""

import copy
import gc
import os
import pickle
import warnings
import weakref
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import prokl
from prokl.distributed.part_of_state import PartOfState
from prokl.distributed.team import difference
from tests.distributed.placements import (
    Run,
    assert_close,
    assert_same,
    give,
    group_each,
    message,
    placed,
    refusal,
    value,
    whole,
    written,
)
from tests.inputs import PRO

HOWS = pytest.mark.parametrize("how", ["ddp", "fsdp"])
TWO = {"a": (8, 12), "b": (8, 12)}


def freeze(run, call, gradient):
    """Freeze a weight from a step on, which keeps its last gradient, or gets a zero one or none."""
    frozen = run.weights["square"]
    frozen.requires_grad_(call < 4)
    if call < 4:
        return ()
    if gradient != "kept":
        frozen.grad = torch.zeros_like(frozen.detach()) if gradient == "zero" else None
    return ("square",)


def release(run, call):
    """Freeze a weight at first and once more later."""
    moves = call not in (0, 1, 6)
    run.weights["wide"].requires_grad_(moves)
    run.weights["wide"].grad = None
    return () if moves else ("wide",)


def add(run, call):
    """Add a weight in a group of its own."""
    if call == 3:
        other = run.weights["square"]
        late = placed(value((8, 8), 99), getattr(other, "device_mesh", None), getattr(other, "placements", None))
        run.weights["added"] = nn.Parameter(late)
        run.optimizer.add_param_group({"params": [("added", run.weights["added"])]})
    return ()


def take_state_out(run, call):
    for p in run.weights.values() if call == 3 else ():
        run.optimizer.state.pop(p)
    return ()


def take_group_out(run, call, place):
    """Take a group out for two steps, in which its weights have gradients all the same."""
    if call == 3:
        run.taken_out = run.optimizer.param_groups.pop(place)
    if call == 5:
        run.optimizer.param_groups.insert(place, run.taken_out)
    return ()


def offload(run, call):
    """Offload before every step, which leaves a rank no copy of a weight and no memory that the state had."""
    states = run.optimizer.engine.state.values()
    before = [weakref.ref(v) for state in states for v in state.values() if isinstance(v, torch.Tensor)]
    run.optimizer.offload()
    gc.collect()
    assert not any(t() is not None for t in before)
    own = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert not any(v._is_view() for v in own)
    divided = () if run.optimizer._division is None else run.optimizer._division.weights.values()
    assert not any(w.own_memory and w.stand_in.untyped_storage().nbytes() for w in divided)
    return ()


def freeze_and_offload(run, call):
    """Freeze a weight that is taller than wide, and offload before a later step."""
    late = run.weights["late"]
    late.requires_grad_(call < 8)
    if call < 8:
        return ()
    late.grad = None
    return ("late", *offload(run, call)) if call == 9 else ("late",)


def lose_state_outside(run, call):
    """Take matrices out for two steps, and the state of one of them meanwhile, of another in the end."""
    take_group_out(run, call, 0)
    for name in {4: ["square"], 5: ["wide"]}.get(call, []):
        run.optimizer.state.pop(run.weights[name])
    return ()


def change_algorithm(run, call, name):
    """Take a weight's state out, and put it into a group of the other algorithm."""
    if call == 3:
        p = run.weights[name]
        run.optimizer.state.pop(p)
        group = next(g for g in run.optimizer.param_groups if name in g["param_names"])
        at = group["param_names"].index(name)
        for key in ("params", "param_names", *(["split"] if isinstance(group.get("split"), list) else [])):
            del group[key][at]
        other = {"matrix": "adamw", "adamw": "matrix"}[group["algorithm"]]
        run.optimizer.add_param_group({"params": [(name, p)], "algorithm": other, "lr": 0.01})
    return ()


def grow(run, call):
    """Add rows to a matrix and to a weight of AdamW's, whose state is taken out."""
    for name in ("square", "table") if call == 3 else ():
        p = run.weights[name]
        p.data = torch.cat([p.data, value((3, p.shape[1]), 7)])
        run.optimizer.state.pop(p)
    return ()


BETWEEN = {f"frozen, gradient {gradient}": partial(freeze, gradient=gradient) for gradient in ("kept", "zero", "none")}
BETWEEN |= {
    "frozen and offloaded": freeze_and_offload,
    "released": release,
    "added": add,
    "state taken out": take_state_out,
    "offloaded": offload,
}
BETWEEN |= {f"{what} taken out": partial(take_group_out, place=i) for i, what in enumerate(("matrices", "vectors"))}
BETWEEN["matrices and state taken out"] = lose_state_outside
BETWEEN |= {f"{name} to the other algorithm": partial(change_algorithm, name=name) for name in ("square", "table")}
BETWEEN["grown"] = grow


def with_something_between(how, what):
    """Train, with something done before every step, which says what keeps the gradient that it has."""
    run = Run(how)
    for call in range(10):
        run.step(call, but=BETWEEN[what](run, call))
    return whole(run.weights)


@pytest.mark.parametrize("what, how", [(what, how) for what in BETWEEN for how in ("ddp", "fsdp")][:-1])  # none grows
def test_changes_between_steps_act_as_in_one_process(what, how, pools):
    expected = with_something_between("alone", what)
    for weights in pools[2].run(with_something_between, how, what):
        assert_close(weights, expected)


def grown_with_its_state():
    run = Run("ddp", shapes=TWO).train(0, 3)
    p = run.weights["a"]
    p.data = torch.cat([p.data, value((3, 12), 7)])
    error = message(run.step, 3)
    p.data = p.data[:8].clone()
    run.step(3)
    return error


def test_a_weight_that_has_grown_is_refused_on_every_rank(pools):
    for kind, text in pools[2].run(grown_with_its_state):
        assert kind == "ValueError"
        assert text.startswith("a has {'algorithm': 'matrix', 'shape': (11, 12),") and "with {" in text
        assert "'shape': (8, 12)" in text and "set it back, or remove its state, optimizer.state.pop(p)" in text


def with_a_late_shard(how):
    """Train plain weights alone, and then beside a first one that may be sharded; the weights, and their clocks."""
    run = Run(how, shapes={"a": (8, 12), "bias": (5,)}).train(0, 3)
    late = Run(how.replace("alone", "fsdp") if dist.is_initialized() else how, shapes=TWO).weights["b"]
    run.weights["late"] = late
    run.optimizer.add_param_group({"params": [("late", late)]})
    run.train(3, 6)
    return whole(run.weights), [int(run.optimizer.state[run.weights[name]]["step"]) for name in ("a", "bias")]


def test_plain_weights_keep_their_state_beside_a_first_shard(pools):
    expected, clocks = with_a_late_shard("alone")
    assert clocks == [5, 6]
    for found, kept in pools[2].run(with_a_late_shard, "alone"):
        assert kept == clocks
        assert_close(found, expected)


def channels_last(group):
    weight = value((6, 3, 2, 2), 1).contiguous(memory_format=torch.channels_last)
    p, q = nn.Parameter(weight), nn.Parameter(value((8, 12), 2))
    own = {"params": [("p", p)], "algorithm": "adamw", "lr": 0.01, "fused": True}
    optimizer = prokl.ProKLShampoo([{"params": [("q", q)]}, own], process_group=dist.group.WORLD if group else None)
    for call in range(3):
        for t in (p, q):
            t.grad = torch.empty_like(t).copy_(value(t.shape, call))
        optimizer.step()
    return whole({"p": p, "q": q}), p.stride()


def test_fused_adamw_takes_channels_last_as_in_one_process(pools):
    expected, stride = channels_last(False)
    for found, its in pools[2].run(channels_last, True):
        assert its == stride
        assert_same(found, expected)


def without_memory():
    """Train, with an attempt in between that ends before anything has moved."""
    run = Run("ddp", shapes=TWO).train(0, 3)
    with patch.object(run.optimizer._division.engine, "decide", side_effect=MemoryError("none is left")):
        error = message(run.step, 3)
    return error, whole(run.train(3, 6).weights)


def test_a_step_that_ends_before_moving_can_be_taken_again(pools):
    expected = whole(Run(shapes=TWO).train(0, 6).weights)
    for error, found in pools[2].run(without_memory):
        assert error == ("MemoryError", "none is left")
        assert_same(found, expected)


def unfrozen(how):
    """Train three weights of which the largest is frozen at first; their values, its memory and who owns which."""
    run, memory, owners = Run(how, shapes={"large": (8, 20), **TWO}), [], []
    large = run.weights["large"]
    for call in range(7):
        large.requires_grad_(call >= 4)
        run.step(call, but=("large",) if call < 4 else ())
        memory.append(len(run.optimizer.state.get(large, {})))
        if how != "alone":
            divided = run.optimizer._division.weights
            if divided[large].stand_in is not None and divided[large].own_memory:
                memory[-1] += divided[large].stand_in.untyped_storage().nbytes()
            owners = [divided[p].parts[0].owner for p in run.weights.values()]
    return whole(run.weights), memory, owners


@HOWS
def test_a_weight_unfrozen_later_trains_as_in_one_process(how, pools):
    alone, memory, _ = unfrozen("alone")
    assert memory[3] == 0 < memory[4]
    for found, memory, owners in pools[2].run(unfrozen, how):
        assert_close(found, alone)
        assert memory[3] == 0 < memory[4]
        assert set(owners[1:]) == {0, 1}  # work is even while it is frozen


def widened(how):
    """Make float32 of bfloat16 weights that have masters; they before that, after a step without a rate, and later."""
    run = Run(how, shapes=TWO | {"stack": (5, 8, 12)}, dtype=torch.bfloat16, bf16_weights="master").train(0, 5)
    found, (group,) = [whole(run.weights)], run.optimizer.param_groups
    run.optimizer.zero_grad()
    run.net.float()
    for rate, call in ((0.0, 5), (group["lr"], 6)):
        group["lr"] = rate
        run.step(call)
        found.append(whole(run.weights))
    return found, {key for own in run.optimizer.engine.state.values() for key in own}


@HOWS
def test_weights_with_masters_become_float32_alike_on_all_ranks(how, pools):
    alone, _ = widened("alone")
    ranks = pools[2].run(widened, how)
    for (before, resting, after), kept in ranks:
        assert "master" not in kept
        assert_same(resting, before)
        assert_same(after, ranks[0][0][2])
        for name, weight in alone[2].items():  # arithmetic is in float32, of other batches
            np.testing.assert_allclose(after[name], weight, rtol=1e-5, atol=1e-5)


def resumed_frozen(how, dtype, backend):
    """Train with masters and resume with one weight frozen; all before it is released, and in the end."""
    given = {"shapes": TWO | {"c": (8, 12)}, "bf16_weights": "master"}
    run = Run(how, dtype=torch.bfloat16, **given).train(0, 3)
    saved = [run.optimizer.gather_state_dict()]
    if how != "alone":
        dist.broadcast_object_list(saved)
    resumed = Run(how, dtype=dtype, backend=backend, **given)
    for name, p in run.weights.items():
        resumed.weights[name].data.copy_(p.detach())
    frozen = resumed.weights["a"].requires_grad_(False)
    resumed.optimizer.load_state_dict(saved[0])
    resumed.step(3, but=("a",))
    before = whole(resumed.weights)
    frozen.requires_grad_(True)
    return before, whole(resumed.train(4, 6).weights)


@HOWS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_run_with_masters_is_resumed_with_a_frozen_weight(backend, dtype, how, pools):
    """Its stand-in has no memory yet, where it lies on several ranks."""
    alone = resumed_frozen("alone", dtype, backend)
    for found in pools[2].run(resumed_frozen, how, dtype, backend):
        for weights, expected in zip(found, alone, strict=True):
            for name, weight in expected.items():
                np.testing.assert_allclose(weights[name], weight, rtol=2**-8, atol=2**-8)


def gathered_after(what):
    """Return the keys that a gathered state has after something was done."""
    run = Run("ddp", shapes=TWO, dtype=torch.float32, bf16_weights="master")
    run.weights["a"].requires_grad_(what != FIRST)
    if what != "loading a fresh state":
        run.train(0, 1)
    if what == FIRST:
        return keys_to_gather(run)
    saved = run.optimizer.state_dict()
    run.optimizer.zero_grad()
    if what == "a cast":
        run.net.bfloat16()
        run.train(1, 2)
    else:
        run.weights["a"].requires_grad_(what != "freezing and loading")
        run.optimizer.load_state_dict(saved)
    return keys_to_gather(run)


def keys_to_gather(run):
    found = run.optimizer.gather_state_dict()
    return sorted((i, key) for i, own in found.get("state", {}).items() for key in own)


def gathered_by_stages():
    """Gather on ranks of one stage of two and on others, by stages that are divided, and by one that is not."""
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = dist.get_rank() // 2
    divided = prokl.ProKLShampoo([nn.Parameter(value((8, 12), 0))], rank=2, process_group=stages[stage])
    whole_one = prokl.ProKLShampoo([nn.Parameter(value((8, 12), 0))], rank=2)
    for optimizer in (divided, whole_one):
        optimizer.param_groups[0]["params"][0].grad = value((8, 12), 1)
        optimizer.step()
    gather = divided.gather_state_dict
    told = [message(gather), message(gather, 4), message(whole_one.gather_state_dict, 4)]
    found = [gather(2 * stage + 1), whole_one.gather_state_dict(), whole_one.gather_state_dict(dist.get_rank())]
    dist.destroy_process_group(stages[stage])
    return told, [len(one.get("state", {})) for one in found]


def test_gathering_for_a_rank_that_gets_nothing_is_refused(pools):
    for rank, ((by_default, outside, undivided), found) in enumerate(pools[4].run(gathered_by_stages)):
        ranks = [0, 1] if rank < 2 else [2, 3]
        assert outside[0] == "ValueError" and f"Invalid dst=4: must be one of the ranks {ranks} " in outside[1]
        assert by_default == ((None, "") if rank < 2 else (outside[0], outside[1].replace("dst=4", "dst=0")))
        assert undivided[0] == "ValueError" and "the ranks [0, 1, 2, 3] " in undivided[1]
        assert found == [rank % 2, int(rank == 0), 1]


def gathered_across_two_meshes():
    """Gather weights of which one is divided among rows of ranks, and one among columns, for every rank."""
    mesh, weights = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column")), []
    for name in ("row", "column"):
        weights.append(nn.Parameter(placed(value((8, 12), 0), mesh[name], [Shard(0)])))
        weights[-1].grad = placed(value((8, 12), 1), mesh[name], [Shard(0)])
    optimizer = prokl.ProKLShampoo(weights, rank=2)
    optimizer.step()
    return [len(optimizer.gather_state_dict(dst).get("state", {})) for dst in range(4)]


def test_a_rank_that_shares_no_work_with_dst_helps_gathering(pools):
    """Rank 3 shares with 1 and 2, and these with rank 0."""
    found = pools[4].run(gathered_across_two_meshes)
    assert found == [[2 * (dst == rank) for dst in range(4)] for rank in range(4)]


def gathered_around(how, what):
    """Gather state before a change that the next step would follow, and after it."""
    given = {"shapes": {**TWO, "stack": (5, 8, 12)}}
    dtype = torch.bfloat16 if what == "masters are asked for" else torch.float32
    masters = {"bf16_weights": "master"} if what == "a cast to bfloat16" else {}
    run = Run(how, dtype=dtype, **masters, **given).train(0, 3)
    before = run.optimizer.gather_state_dict()
    run.optimizer.zero_grad()
    if what == "a load into float64":
        found = [before]
        dist.broadcast_object_list(found)
        run = Run(how, **given)
        run.optimizer.load_state_dict(found[0])
    elif what == "masters are asked for":
        run.optimizer.param_groups[0]["bf16_weights"] = "master"
    else:
        run.net.to(torch.float64 if what == "a cast to float64" else torch.bfloat16)
    after = run.optimizer.gather_state_dict()
    run.train(3, 4)
    return before, after


@HOWS
@pytest.mark.parametrize(
    "what", ["a cast to float64", "a cast to bfloat16", "a load into float64", "masters are asked for"]
)
def test_state_is_gathered_right_between_a_change_and_a_step(what, how, pools):
    before, after = (found["state"] for found in pools[2].run(gathered_around, how, what)[0])
    for i, own in before.items():
        assert {*after[i]} - {*own} == ({"master"} if "64" not in what else set())
        assert not after[i].pop("master", torch.zeros(1)).any()  # a master of zeros begins as its weight
        dtypes = {after[i][key].dtype for key in ("M_Q", "L_Q", "inv_sqrt_mu")}
        assert dtypes == {torch.float64 if "64" in what else torch.float32}
        assert all(torch.equal(after[i][key].double(), value.double()) for key, value in own.items())


FIRST = "a first step of a frozen weight with a gradient"


@pytest.mark.parametrize("what", ["loading a fresh state", "a cast", "freezing and loading", FIRST])
def test_all_ranks_have_the_same_to_gather_after(what, pools):
    first, second = pools[2].run(gathered_after, what)
    keys = {key for _, key in first}
    assert second == [] and {i for i, _ in first} == {0, 1} and {"M_Q", "L_Q", "U", "step"} <= keys
    assert ("master" in keys) == (what == "a cast")


def with_one_rank_in_the_end(how):
    """Train two groups with two ranks, and with one rank after their state has been taken out; weights and waves."""

    def groups(weights):
        named = [*weights.items()]
        return [{"params": named[:3], "rank": 3}, {"params": named[3:], "rank": 2}]

    run = Run(how, shapes={name: (8, 12) for name in "abcdef"}, groups=groups).train(0, 3)
    for p in run.weights.values():
        run.optimizer.state.pop(p)
    run.optimizer.param_groups[0]["rank"] = 2
    return whole(run.train(3, 7).weights), len(run.optimizer._division.waves) if run.optimizer._division else 1


@HOWS
def test_groups_that_get_a_common_rank_are_one_wave(how, pools):
    expected, _ = with_one_rank_in_the_end("alone")
    for found, waves in pools[2].run(with_one_rank_in_the_end, how):
        assert_close(found, expected)
        assert waves == 1


def read_as_the_file_says(how, key, settings):
    """Load a gathered state made with another setting; the weights that go on, with it or without, and what is told."""
    saved_with, here = settings

    def groups(weights, setting=saved_with):
        return [{"params": [*weights.items()], key: setting}]

    shapes = {"a": (6, 6), "b": (12, 6), "experts": (4, 6, 6)}
    run = Run(how, shapes=shapes, groups=groups).train(0, 4)
    found = [run.optimizer.gather_state_dict()]
    if how != "alone":
        dist.broadcast_object_list(found, 0)
    other = Run(how, shapes=shapes, groups=partial(groups, setting=here))
    for name, p in run.weights.items():
        other.weights[name].data.copy_(p.detach())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.optimizer.load_state_dict(found[0])
    for one in (run, other):
        for call in range(4, 7):
            give(one.weights, call)
            if call == 5:  # in the last piece of the last expert, which skips it
                p, bad = one.weights["experts"], value((4, 6, 6), 0).fill_(1)
                bad[-1, -1, -1] = torch.inf
                p.grad *= placed(bad, getattr(p, "device_mesh", None), getattr(p, "placements", None))
            one.optimizer.step()
    return whole(run.weights), whole(other.weights), [str(warning.message) for warning in caught]


@HOWS
@pytest.mark.parametrize(
    ("key", "settings"), [("split", (3, None)), ("split", (None, 2)), ("transposed", (True, False))]
)
def test_ranks_go_on_with_the_split_of_a_loaded_state(key, settings, how, pools):
    expected, same, _ = read_as_the_file_says("alone", key, settings)
    assert_same(same, expected)
    for going_on, found, told in pools[2].run(read_as_the_file_says, how, key, settings):
        assert_close(going_on, expected)
        assert_close(found, expected)
        assert len(told) == 1 and f"has {key}={settings[0]!r}" in told[0], told


def split_on_one_rank():
    """Return what is told of a reading that one rank alone has; afterwards the step is done as if nothing had been."""
    run = Run("fsdp", shapes=TWO, groups=group_each)
    group = run.optimizer.param_groups[0]
    group["split"] = 5 if dist.get_rank() == 1 else None
    told = message(run.step, 0)
    group["split"] = None
    run.step(0)
    return told


def groups_of_one_rank_are_fewer():
    """Return what is told of a state that one rank alone loads without one of its groups."""
    run = Run("ddp", shapes=TWO, groups=group_each).train(0, 1)
    found = [run.optimizer.gather_state_dict()]
    dist.broadcast_object_list(found, 0)
    (state,) = found
    if dist.get_rank() == 1:
        state = {**state, "param_groups": state["param_groups"][:1]}
    return message(run.optimizer.load_state_dict, state)


@pytest.mark.parametrize("function", [split_on_one_rank, groups_of_one_rank_are_fewer])
def test_what_one_rank_alone_cannot_take_is_told_to_the_others(function, pools):
    first, second = pools[2].run(function)
    assert second[0] == "ValueError" and "rank 1 could not: ValueError" in first[1] and second[1] in first[1]


def on_the_mesh_of_rank_0():
    """Return what this rank is told of a weight that lies on rank 0 alone."""
    lies = placed(value((8, 12), 0), DeviceMesh("cpu", [0]), [Shard(0)])
    return message(PRO, [{"params": [("its", torch.nn.Parameter(lies))]}])


def test_a_weight_on_a_mesh_without_this_rank_is_refused_there(pools):
    there, elsewhere = pools[2].run(on_the_mesh_of_rank_0)
    assert there == (None, "")
    assert elsewhere[0] == "ValueError" and "its is a DTensor on the mesh of ranks [0]" in elsewhere[1]


def last_weight_differs(what):
    """Return what this rank is told when the last of many weights is another one on one rank, which deals work anew."""
    odd = dist.get_rank() == 1
    last = (8, 40) if odd and what in ("shape", "shape, without names") else (8, 12)

    def two_groups(weights):
        named = [("other" if odd and what == "name" and name == "d" else name, p) for name, p in weights.items()]
        given = named if what != "shape, without names" else [*weights.values()]
        return [{"params": given[:2]}, {"params": given[2:]}]

    run = Run("ddp", shapes={**TWO, "c": (8, 12), "d": last}, groups=two_groups)
    run.weights["d"].requires_grad_(not odd or what != "frozen")
    return message(run.step, 0, but=("d",))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ("d (8, 12)", "d (8, 40)")),
        ("shape, without names", ("parameter 1 of group 1 (8, 12)", "(8, 40)")),
        ("name", ("d (8, 12)", "other (8, 12)")),
        ("frozen", ("d (8, 12)", "frozen")),
    ],
)
def test_the_weight_that_differs_is_named_on_every_rank(what, words, pools):
    for kind, text in pools[2].run(last_weight_differs, what):
        assert kind == "RuntimeError" and all(word in text for word in words), text
        assert "Ranks 0 and 1" in text and "must be the same on all ranks" in text
        assert "owned" not in text and " a (8, 12)" not in text


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ((["a", "b"], ["a of 0", "b of 0"]), "b of 1; b of 0"),
        ((["a", "c"], ["a of 1", "c of 0"]), "b; c"),
        ((["a"], ["a of 0"]), "b; nothing"),
    ],
    ids=["owner", "weight", "number"],
)
def test_the_first_difference_is_told_and_owners_last(theirs, words):
    """The first ranks that differ decide; here the last of three."""
    ours = ["a", "b"], ["a of 0", "b of 1"]
    error = difference(SimpleNamespace(ranks=(4, 5, 7)), [ours, ours, theirs])
    assert f"Ranks 4 and 7 gave this optimizer other weights: {words}. Names" in str(error)


def changed_after_the_start(key, setting):
    """Change or take out a setting on both ranks, of which one owns nothing."""
    run = Run("ddp", shapes={"a": (8, 12)}).train(0, 1)
    run.optimizer.param_groups[0][key] = setting
    if setting == "gone":
        del run.optimizer.param_groups[0][key]
    with patch.dict("os.environ"):
        os.environ.pop("TRITON_INTERPRET", None)  # with which a CPU runs the kernels
        return message(run.step, 1)


@pytest.mark.parametrize(
    "key, setting, says",
    [
        ("rank", 2, "rank"),
        ("state_dtype", torch.bfloat16, "state_dtype"),
        ("split", 2, "split"),
        ("backend", "triton", "Invalid backend='triton'"),
        ("rank", "gone", "Group 0 has no rank, which algorithm='matrix' needs, by default 3: set it back. If the alg"),
        ("algorithm", "gone", "Invalid algorithm=None: must be one of ('matrix', 'adamw')."),
    ],
)
def test_ranks_that_own_nothing_refuse_a_changed_setting_too(key, setting, says, pools):
    found = pools[2].run(changed_after_the_start, key, setting)
    assert all(kind == "ValueError" and says in text for kind, text in found), found
    assert len(set(found)) == 1


def save_parts(folder, how, shapes):
    """Save the part of every rank, which that rank can load."""
    run, file = Run(how, shapes=shapes).train(0, 2), folder / str(dist.get_rank())
    torch.save(run.optimizer.state_dict(), file)
    run.optimizer.load_state_dict(torch.load(file, weights_only=False))


def load_part(folder, how, shapes, rank=None):
    """Load a rank's part, or its own, after a step; return what was said, and what has changed by it."""
    run = Run(how, shapes=shapes).train(0, 1)
    part = torch.load(folder / str(dist.get_rank() if rank is None else rank), weights_only=False)
    return refusal(run, run.optimizer.load_state_dict, part)


def told_by_copies():
    """Return what is told where a state dict is copied and sent, and where torch.save writes it, twice."""
    PartOfState.told, told = False, []
    run = Run("ddp", shapes=TWO).train(0, 1)
    for copied in (copy.deepcopy, pickle.dumps, ForkingPickler.dumps, written, written):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            copied(run.optimizer.state_dict())
        told.append([str(warning.message) for warning in caught])
    return told


def test_a_file_of_one_part_is_told_of_once_and_copies_are_not(pools):
    for rank, told in enumerate(pools[2].run(told_by_copies)):
        *copies, (first,), again = told
        assert copies == [[], [], []] and again == []
        assert first.startswith(f"torch.save writes rank {rank}'s part of") and "gather_state_dict()" in first


TABLE = {"table": (8, 4)}


@HOWS
@pytest.mark.parametrize("shapes", [{"matrix": (8, 12), **TABLE}, TABLE], ids=" and ".join)
def test_anothers_part_is_refused_by_ranks_and_by_one_process(how, shapes, pools, tmp_path):
    """Also by ranks that own no matrix: what one cannot load, none does."""
    pools[2].run(save_parts, tmp_path, how, shapes)
    found = [*pools[2].run(load_part, tmp_path, how, shapes, 0), load_part(tmp_path, "alone", shapes, 0)]
    assert all(kind == "ValueError" and "gather_state_dict()" in text and not new for kind, text, new in found), found


@pytest.mark.slow
def test_a_part_of_another_number_of_ranks_is_refused(pools, tmp_path):
    pools[4].run(save_parts, tmp_path, "ddp", TABLE)
    found = pools[2].run(load_part, tmp_path, "ddp", TABLE)
    assert all(kind == "ValueError" and "another number of ranks" in text for kind, text, _ in found), found
