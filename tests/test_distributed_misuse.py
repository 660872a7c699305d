"""A divided optimizer does with unusual use what one process does; what ranks disagree on is told to all of them."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.placements import (
    assert_close,
    assert_same,
    give,
    here,
    message,
    optimizer_of,
    placed,
    train,
    value,
    weights_of,
    whole,
)
from tests.distributed.pool import pools  # noqa: F401  (a fixture)
from tests.training import differences

HOWS = pytest.mark.parametrize("how", ["ddp", "fsdp"])
TWO = {"a": (8, 12), "b": (8, 12)}


def freeze(weights, optimizer, call, gradient):
    """Freeze a weight from a step on, which keeps its last gradient, or gets a zero one or none."""
    frozen = weights["square"]
    frozen.requires_grad_(call < 4)
    if call < 4:
        return ()
    if gradient != "kept":
        frozen.grad = torch.zeros_like(frozen.detach()) if gradient == "zero" else None
    return ("square",)


def release(weights, optimizer, call):
    """Freeze a weight at first and once more later."""
    moves = call not in (0, 1, 6)
    weights["wide"].requires_grad_(moves)
    weights["wide"].grad = None
    return () if moves else ("wide",)


def add(weights, optimizer, call):
    """Add a weight in a group of its own."""
    if call == 3:
        other = weights["square"]
        late = placed(value((8, 8), 99), getattr(other, "device_mesh", None), getattr(other, "placements", None))
        weights["added"] = nn.Parameter(late)
        optimizer.add_param_group({"params": [("added", weights["added"])]})
    return ()


def take_state_out(weights, optimizer, call):
    for p in weights.values() if call == 3 else ():
        optimizer.state.pop(p)
    return ()


def take_group_out(weights, optimizer, call, place):
    """Take a group out for two steps, in which its weights have gradients all the same."""
    if call == 3:
        optimizer.taken_out = optimizer.param_groups.pop(place)
    if call == 5:
        optimizer.param_groups.insert(place, optimizer.taken_out)
    return ()


def offload(weights, optimizer, call):
    """Offload before every step, which leaves a rank no copy of a weight."""
    optimizer.offload()
    divided = () if optimizer._division is None else optimizer._division.divided()
    assert not any(w.own_memory and w.stand_in.untyped_storage().nbytes() for w in divided)
    return ()


def lose_state_outside(weights, optimizer, call):
    """Take matrices out for two steps, and the state of one of them meanwhile, of another in the end."""
    take_group_out(weights, optimizer, call, 0)
    for name in {4: ["square"], 5: ["wide"]}.get(call, []):
        optimizer.state.pop(weights[name])
    return ()


BETWEEN = {f"frozen, gradient {gradient}": partial(freeze, gradient=gradient) for gradient in ("kept", "zero", "none")}
BETWEEN |= {"released": release, "added": add, "state taken out": take_state_out, "offloaded": offload}
BETWEEN |= {f"{what} taken out": partial(take_group_out, place=i) for i, what in enumerate(("matrices", "vectors"))}
BETWEEN["matrices and state taken out"] = lose_state_outside


def trained(how, what):
    """Train, with something done before every step, which says what keeps the gradient that it has."""
    weights = weights_of(how)
    optimizer = optimizer_of(how, weights)
    for call in range(10):
        give(weights, call, but=BETWEEN[what](weights, optimizer, call))
        optimizer.step()
    return whole(weights)


@HOWS
@pytest.mark.parametrize("what", BETWEEN)
def test_what_is_done_between_steps_has_the_effect_that_it_has_in_one_process(what, how, pools):  # noqa: F811
    expected = trained("alone", what)
    for weights in pools[2].run(trained, how, what):
        assert_close(weights, expected)


def unfrozen(how):
    """Train three weights of which the largest is frozen at first; their values, its memory and who owns which."""
    weights = weights_of(how, {"large": (8, 20), "a": (8, 12), "b": (8, 12)})
    large = weights["large"]
    large.requires_grad_(False)
    optimizer, memory, owners = optimizer_of(how, weights), [], []
    for call in range(7):
        if call == 4:
            large.requires_grad_(True)
        give(weights, call, but=("large",) if call < 4 else ())
        optimizer.step()
        memory.append(len(optimizer.state.get(large, {})))
        if how != "alone":
            weight = optimizer._division.weights[large]
            if weight.stand_in is not None and weight.own_memory:
                memory[-1] += weight.stand_in.untyped_storage().nbytes()
            owners = [optimizer._division.weights[p].parts[0].owner for p in weights.values()]
    return whole(weights), memory, owners


@HOWS
def test_a_weight_that_is_unfrozen_later_trains_as_in_one_process_and_takes_no_memory_before(how, pools):  # noqa: F811
    alone, memory, _ = unfrozen("alone")
    assert memory[3] == 0 < memory[4]
    for found, memory, owners in pools[2].run(unfrozen, how):
        assert_close(found, alone)
        assert memory[3] == 0 < memory[4]
        assert set(owners[1:]) == {0, 1}  # work is even while it is frozen


def widened(how):
    """Make float32 of bfloat16 weights that have masters; they before that, after a step without a rate, and later."""
    weights = weights_of(how, TWO | {"stack": (5, 8, 12)}, dtype=torch.bfloat16)
    optimizer = optimizer_of(how, weights, bf16_weights="master")
    (group,) = optimizer.param_groups
    train(weights, optimizer, 0, 5)
    found = [whole(weights)]
    for p in weights.values():
        p.grad = None
    nn.ParameterDict(weights).float()
    for rate, call in ((0.0, 5), (group["lr"], 6)):
        group["lr"] = rate
        train(weights, optimizer, call, call + 1)
        found.append(whole(weights))
    return found, {key for own in optimizer.engine.state.values() for key in own}


@HOWS
def test_weights_with_masters_that_become_float32_go_on_from_their_own_bits_alike_on_all_ranks(how, pools):  # noqa: F811
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
    weights = weights_of(how, TWO | {"c": (8, 12)}, dtype=torch.bfloat16)
    optimizer = optimizer_of(how, weights, bf16_weights="master")
    train(weights, optimizer, 0, 3)
    saved = [optimizer.gather_state_dict()]
    if how != "alone":
        dist.broadcast_object_list(saved)
    here = {name: nn.Parameter(p.detach().to(dtype), requires_grad=name != "a") for name, p in weights.items()}
    resumed = optimizer_of(how, here, bf16_weights="master", backend=backend)
    resumed.load_state_dict(saved[0])
    give(here, 3, but=("a",))
    resumed.step()
    before = whole(here)
    here["a"].requires_grad_(True)
    train(here, resumed, 4, 6)
    return before, whole(here)


@HOWS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_run_with_masters_is_resumed_with_a_frozen_weight(backend, dtype, how, pools):  # noqa: F811
    """Whose stand-in has no memory yet, where it lies on several ranks."""
    alone = resumed_frozen("alone", dtype, backend)
    for found in pools[2].run(resumed_frozen, how, dtype, backend):
        for weights, expected in zip(found, alone, strict=True):
            for name, weight in expected.items():
                np.testing.assert_allclose(weights[name], weight, rtol=2**-8, atol=2**-8)


def gathered_after(what):
    """Return the keys that a gathered state has after something was done."""
    weights = weights_of("ddp", TWO, dtype=torch.float32)
    optimizer = optimizer_of("ddp", weights, bf16_weights="master")
    if what != "loading a fresh state":
        train(weights, optimizer, 0, 1)
    saved = optimizer.state_dict()
    if what == "a cast":
        for p in weights.values():
            p.grad = None
        nn.ParameterDict(weights).bfloat16()
        train(weights, optimizer, 1, 2)
    else:
        if what == "freezing and loading":
            weights["a"].requires_grad_(False)
            weights["a"].grad = weights["b"].grad = None
        optimizer.load_state_dict(saved)
    found = optimizer.gather_state_dict()
    return sorted((i, key) for i, own in found.get("state", {}).items() for key in own)


@pytest.mark.parametrize("what", ["loading a fresh state", "a cast", "freezing and loading"])
def test_all_ranks_have_the_same_to_gather_after(what, pools):  # noqa: F811
    first, second = pools[2].run(gathered_after, what)
    keys = {key for _, key in first}
    assert second == [] and {i for i, _ in first} == {0, 1} and {"M", "L", "U", "step"} <= keys
    assert ("master" in keys) == (what == "a cast")


def groups_of_one(weights):
    return [{"params": [entry]} for entry in weights.items()]


def split_on_one_rank():
    """Return what is told of a reading that one rank alone has; afterwards the step is done as if nothing had been."""
    weights = weights_of("fsdp", TWO)
    optimizer = optimizer_of("fsdp", groups_of_one(weights))
    group = optimizer.param_groups[0]
    group["split"] = 5 if dist.get_rank() == 1 else None
    give(weights, 0)
    told = message(optimizer.step)
    group["split"] = None
    optimizer.step()
    return told


def groups_of_one_rank_are_fewer():
    """Return what is told of a state that one rank alone loads without one of its groups."""
    weights = weights_of("ddp", TWO)
    optimizer = optimizer_of("ddp", groups_of_one(weights))
    train(weights, optimizer, 0, 1)
    found = [optimizer.gather_state_dict()]
    dist.broadcast_object_list(found, 0)
    (state,) = found
    if dist.get_rank() == 1:
        state = {**state, "param_groups": state["param_groups"][:1]}
    return message(optimizer.load_state_dict, state)


@pytest.mark.parametrize("function", [split_on_one_rank, groups_of_one_rank_are_fewer])
def test_what_one_rank_alone_cannot_take_is_told_to_the_others(function, pools):  # noqa: F811
    first, second = pools[2].run(function)
    assert second[0] == "ValueError" and "rank 1 could not: ValueError" in first[1] and second[1] in first[1]


def last_weight_differs(what):
    """Return what this rank is told when the last of many weights is another one on one rank, which deals work anew."""
    odd = dist.get_rank() == 1
    last = (8, 40) if odd and what in ("shape", "shape, without names") else (8, 12)
    weights = weights_of("ddp", {"a": (8, 12), "b": (8, 12), "c": (8, 12), "d": last})
    if odd and what == "frozen":
        weights["d"].requires_grad_(False)
    named = [("other" if odd and what == "name" and name == "d" else name, p) for name, p in weights.items()]
    given = named if what != "shape, without names" else [*weights.values()]
    optimizer = optimizer_of("ddp", [{"params": given[:2]}, {"params": given[2:]}])
    give(weights, 0, but=("d",))
    return message(optimizer.step)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", ("d (8, 12)", "d (8, 40)")),
        ("shape, without names", ("parameter 1 of group 1 (8, 12)", "(8, 40)")),
        ("name", ("d (8, 12)", "other (8, 12)")),
        ("frozen", ("d (8, 12)", "frozen")),
    ],
)
def test_the_weight_that_differs_is_named_where_owners_of_others_differ_for_it(what, said, pools):  # noqa: F811
    for kind, text in pools[2].run(last_weight_differs, what):
        assert kind == "RuntimeError" and all(word in text for word in said), text
        assert "Ranks 0 and 1" in text and "must be the same on all ranks" in text
        assert "of rank" not in text and " a (8, 12)" not in text


def changed_after_the_start(key, setting):
    """Change a setting that state depends on, on both ranks: of which one owns nothing."""
    weights = weights_of("ddp", {"a": (8, 12)})
    optimizer = optimizer_of("ddp", weights)
    train(weights, optimizer, 0, 1)
    optimizer.param_groups[0][key] = setting
    give(weights, 1)
    return message(optimizer.step)


@pytest.mark.parametrize(("key", "setting"), [("rank", 2), ("state_dtype", torch.bfloat16), ("split", 2)])
def test_a_setting_that_state_depends_on_is_refused_by_ranks_that_own_nothing_too(key, setting, pools):  # noqa: F811
    found = pools[2].run(changed_after_the_start, key, setting)
    assert all(kind == "ValueError" and key in text for kind, text in found), found
    assert len(set(found)) == 1


def with_adamw(how, kinds):
    """Return weights and an optimizer with a group of each of these kinds, in their order."""
    weights = weights_of(how, {"matrix": (8, 12), "table": (8, 4)})
    groups = {
        "matrix": {"params": [weights["matrix"]]},
        "adamw": {"params": [weights["table"]], "algorithm": "adamw", "lr": 0.01},
    }
    return weights, optimizer_of(how, [groups[kind] for kind in kinds])


def save_parts(folder, how, kinds):
    """Save the part of every rank, which that rank can load."""
    weights, optimizer = with_adamw(how, kinds)
    train(weights, optimizer, 0, 2)
    torch.save(optimizer.state_dict(), folder / str(dist.get_rank()))
    optimizer.load_state_dict(torch.load(folder / str(dist.get_rank()), weights_only=False))


def load_part(folder, how, kinds, rank=None):
    """Load a rank's part, or its own, after a step; return what was said, and whether all stayed as it was."""
    weights, optimizer = with_adamw(how, kinds)
    train(weights, optimizer, 0, 1)
    before = frozen_parts(weights, optimizer)
    part = torch.load(folder / str(dist.get_rank() if rank is None else rank), weights_only=False)
    said = message(optimizer.load_state_dict, part)
    return *said, differences([before], [frozen_parts(weights, optimizer)]) == set()


def frozen_parts(weights, optimizer):
    """What is on this rank of weights and state, copied."""
    found = {name: here(p).clone() for name, p in weights.items()}
    for i, own in optimizer.state_dict()["state"].items():
        found |= {(i, key): here(value).clone() for key, value in own.items()}
    return found


@HOWS
@pytest.mark.parametrize("kinds", [("matrix", "adamw"), ("adamw",)], ids=" and ".join)
def test_anothers_part_is_refused_by_every_rank_and_by_one_process(how, kinds, pools, tmp_path):  # noqa: F811
    """Also by ranks that own no matrix: what one cannot load, none does."""
    pools[2].run(save_parts, tmp_path, how, kinds)
    found = [*pools[2].run(load_part, tmp_path, how, kinds, 0), load_part(tmp_path, "alone", kinds, 0)]
    assert all(kind == "ValueError" and "gather_state_dict()" in text and stay for kind, text, stay in found), found


@pytest.mark.slow
def test_a_part_of_another_number_of_ranks_is_refused_in_a_sentence(pools, tmp_path):  # noqa: F811
    kinds = ("adamw", "matrix")
    pools[4].run(save_parts, tmp_path, "ddp", kinds)
    found = pools[2].run(load_part, tmp_path, "ddp", kinds)
    assert all(kind == "ValueError" and "another number of ranks" in text for kind, text, _ in found), found
