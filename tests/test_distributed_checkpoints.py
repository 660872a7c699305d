"""Checkpoints of some ranks load on others, under another wrapper or alone, and training goes on as it would."""

import re

import pytest
import torch

from tests.distributed.checkpoints import DCP, read, refuse, resume, save_and_go_on
from tests.distributed.placements import SHAPES, assert_close, assert_same
from tests.inputs import KL, same_bits

ROUTES = (*DCP, "full", "gathered")
# Each way of training by each other, and every route; nested on fewer ranks is in test_distributed_failures.
LOADS = [
    ("ddp", "alone", 1, "nested"),
    ("ddp", "ddp", 4, "flattened"),
    ("ddp", "fsdp", 4, "async"),
    ("fsdp", "alone", 1, "gathered"),
    ("fsdp", "ddp", 2, "broadcast"),
    ("fsdp", "fsdp", 4, "nested"),
    ("fsdp", "fsdp", 4, "torchtitan"),
    ("fsdp", "hsdp", 4, "flattened"),
    ("alone", "fsdp", 4, "full"),
]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def on(world, pools, function, *args, **given):
    """Return what a function returns on each rank; of one rank in this process."""
    return [function(*args, **given)] if world == 1 else pools[world].run(function, *args, **given)


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """Return the folder, and every rank's outcome and state at saving, by how four ranks or one trained."""
    made = {}

    def of(how):
        if how not in made:
            folder = tmp_path_factory.mktemp(how)
            routes = tuple(route for route in ROUTES if how != "alone" or route in ("nested", "full"))
            found = on(1 if how == "alone" else 4, pools, save_and_go_on, folder, routes, how)
            made[how] = folder, [outcome for outcome, _ in found], read(found[0][1])
        return made[how]

    return of


def assert_same_state(one, other):
    assert one["state"].keys() == other["state"].keys()
    for i, own in one["state"].items():
        assert own.keys() == other["state"][i].keys()
        for key, value in own.items():
            assert same_bits(value, other["state"][i][key]), (i, key)
    assert listed(one["groups"]) == listed(other["groups"])


def listed(value):
    """The value with lists for tuples, which torch's full state dicts change into them."""
    if isinstance(value, dict):
        return {key: listed(own) for key, own in value.items()}
    return [*map(listed, value)] if isinstance(value, (list, tuple)) else value


@pytest.mark.slow
@pytest.mark.parametrize(("source", "how", "world", "route"), LOADS)
def test_a_run_goes_on_as_it_would_have(source, how, world, route, saved, pools):
    folder, expected, state = saved(source)
    found = on(world, pools, resume, folder, route, how)
    assert_same_state(state, read(found[0][1]))  # bit for bit, whatever its parts were
    for rank, (outcome, _) in enumerate(found):
        if source == how and world == 4:
            assert_same(outcome[0], expected[rank][0])
            assert outcome[1:] == expected[rank][1:]
        else:
            assert_close(outcome[0], expected[0][0])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "other", "dtype"), [("ddp", "fsdp", torch.float32), ("fsdp", "alone", torch.bfloat16)])
def test_bfloat16_states_and_masters_survive(how, other, dtype, pools, tmp_path):
    settings = {"state_dtype": torch.bfloat16} if dtype == torch.float32 else {"bf16_weights": "master"}
    before = read(pools[4].run(save_and_go_on, tmp_path, ("nested",), how, dtype=dtype, **settings)[0][1])
    key, expected = ("M_Q", torch.bfloat16) if dtype == torch.float32 else ("master", torch.float32)
    assert all(own[key].dtype == expected for own in before["state"].values() if key in own)
    assert any(key in own for own in before["state"].values())
    world = 1 if other == "alone" else 2
    after = on(world, pools, resume, tmp_path, "nested", other, dtype=dtype, **settings)[0][1]
    assert_same_state(before, read(after))


OTHER_WIDTH = {"shapes": SHAPES | {"wide": (8, 22), "bias": (6,)}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "changed", "route", "named"),
    [
        ("fsdp", {"rank": 2}, "nested", r"\[8, 3\].*\[8, 2\].*\.U"),
        ("ddp", OTHER_WIDTH, "flattened", r"\[8, 20\].*\[8, 22\].*wide\.M"),
        ("fsdp", OTHER_WIDTH, "gathered", r"bias has exp_avg of shape \(5,\); must be .* \(6,\)"),
        ("ddp", {"cls": KL}, "nested", r"Missing key.*\.R"),
    ],
    ids=["rank", "shape", "shape, gathered", "method"],
)
def test_a_misfit_is_named_on_every_rank_and_changes_nothing(how, changed, route, named, saved, pools):
    folder, _, _ = saved("ddp")
    for kind, message, differs in pools[4].run(refuse, folder, route, how, **changed):
        assert kind in ("ValueError", "CheckpointException"), message
        assert re.search(named, message, re.DOTALL), message
        assert differs == []
