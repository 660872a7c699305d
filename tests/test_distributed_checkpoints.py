"""Checkpoints of some ranks load on others, under another wrapper or alone, and after a rank has died."""

import os
import re
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tests.distributed.checkpoints import DCP, contents, gathered, load, read, refuse, resume, save, save_and_go_on
from tests.distributed.placements import (
    SHAPES,
    Run,
    assert_close,
    assert_same,
    everything,
    give,
    here,
    message,
    whole,
    written,
)
from tests.distributed.pool import Ranks
from tests.inputs import KL, same_bits

ROUTES = (*DCP, "full", "gathered")
# Each way of training by each other, and every route; nested on fewer ranks is below, after a death.
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
    for kind, text, differs in pools[4].run(refuse, folder, route, how, **changed):
        assert kind in ("ValueError", "CheckpointException"), text
        assert re.search(named, text, re.DOTALL), text
        assert differs == []


def consolidate():
    """Ask for state as Lightning does; return whether it is whole, at once, a second time and after a step."""
    run = Run("ddp").train(0, 4)
    optimizer = run.optimizer
    whole = optimizer.gather_state_dict()
    optimizer.consolidate_state_dict()
    optimizer.param_groups[0]["lr"] = 0.5  # which it follows
    packed = optimizer.state_dict() if dist.get_rank() == 0 else {}
    assert not packed or packed["param_groups"][0].pop("lr") == 0.5
    for each in (whole, packed) if packed else ():
        each["param_groups"][0].pop("lr", None)
    state, found = (
        written({"state": each["state"], "groups": each["param_groups"]}) if each else b"" for each in (whole, packed)
    )
    later = []
    for t in (4, 4, 5):
        optimizer.consolidate_state_dict(to=1)
        run.train(4, t)
        later.append(not any(isinstance(v, DTensor) for v in tree_leaves(optimizer.state_dict())))
    gathered(run)  # waits for nobody who does not come
    return state, found, later


def test_a_consolidated_state_is_whole_until_the_next_step(pools):
    (state, found, first), (_, _, second) = pools[2].run(consolidate)
    assert_same_state(read(state), read(found))
    assert (first, second) == ([False] * 3, [True, True, False])


def step_while_it_is_written(folder):
    """Save by a writer that begins three steps later; return the state at saving, and what another run loads."""
    run, stepped = Run("ddp").train(0, 4), threading.Event()
    state = gathered(run)

    class Writer(dcp.FileSystemWriter):
        def write_data(self, *given):
            stepped.wait()
            return super().write_data(*given)

    of_its_own = dist.new_group()  # messages of the save do not meet those of the steps
    saving = dcp.async_save(contents(run, "nested"), storage_writer=Writer(folder), process_group=of_its_own)
    run.train(4, 7)
    stepped.set()
    saving.result()
    dist.destroy_process_group(of_its_own)
    other = Run("ddp")
    load(other, folder, "nested")
    return state, gathered(other)


def test_steps_while_a_checkpoint_is_written_are_not_in_it(pools, tmp_path):
    state, found = pools[2].run(step_while_it_is_written, tmp_path)[0]
    assert_same_state(read(state), read(found))


# When a rank dies the others are told, and nothing is left half done unseen


GOOD, DIED, END = 4, 6, 9  # steps done at the last good checkpoint, when a rank dies, and at the end
DEAD = 2


@pytest.fixture
def ranks():
    """Four processes of this test's own, which wait five seconds for each other."""
    own = Ranks(4, timeout=5)
    yield own
    own.kill()


@pytest.fixture(scope="module")
def alone():
    """Weights of a run that nothing interrupts, before and after the step in which a rank dies, and at the end."""
    run = Run()
    return [whole(run.train(first, last).weights) for first, last in ((0, DIED), (DIED, DIED + 1), (DIED + 1, END))]


def die():
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def local_weights(run):
    """Return what of every weight is on this rank."""
    return {name: here(p).numpy().copy() for name, p in run.weights.items()}


def begun(how, folder):
    """Train to where a rank will die, with a checkpoint on the way."""
    run = Run(how).train(0, GOOD)
    save(run, folder / "good", "nested")
    return run.train(GOOD, DIED)


def step_without(how, folder):
    """Step when a rank has died; return weights before and after, torch's error, and what state_dict() says."""
    run = begun(how, folder)
    before = local_weights(run)
    give(run.weights, DIED)
    dist.monitored_barrier()  # its last message has been answered
    if dist.get_rank() == DEAD:
        die()
    errors = [message(call) for call in (run.optimizer.step, run.optimizer.state_dict, run.optimizer.step)]
    return before, local_weights(run), errors


def restart(how, folder):
    """Go on from the last good checkpoint; return the weights at the end."""
    run = Run(how)
    load(run, folder / "good", "nested")
    return whole(run.train(GOOD, END).weights)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_death_before_a_step_leaves_a_usable_checkpoint(how, ranks, pools, alone, tmp_path):
    old, new, end = alone
    values, errors = ranks.attempt(step_without, how, tmp_path, grace=30)
    assert errors.keys() == {DEAD}  # the others came back, within torch's own timeout
    for rank, (before, after, (stepping, saving, again)) in values.items():
        assert stepping[0] in ("RuntimeError", "DistBackendError") and "broke off" not in stepping[1], stepping
        for kind, text in (saving, again):
            assert kind == "RuntimeError" and "broke off" in text and "Load the last checkpoint" in text, text
        moved = []
        for name, value in after.items():
            if value.size == 0:
                continue
            was, wanted = (w[name] if how == "ddp" or value.ndim == 0 else rows(w[name], rank) for w in (old, new))
            is_new = np.allclose(value, wanted, rtol=1e-9, atol=1e-12)
            assert is_new or value.tobytes() == before[name].tobytes(), f"{name} is half old and half new"
            moved.append(is_new and not np.allclose(was, wanted, rtol=1e-9, atol=1e-12))
        assert not all(moved)  # something of the dead rank's did not come
    for weights in pools[2].run(restart, how, tmp_path):
        assert_close(weights, end)


def rows(value, rank):
    """The rows of a weight that FSDP2 gives a rank of four."""
    parts = torch.from_numpy(value).chunk(4)
    return parts[rank].numpy() if rank < len(parts) else value[:0]


def save_without(how, folder):
    """Save while a rank dies; return torch's error, and whether weights and state are as they were."""
    run = begun(how, folder)
    before = everything(run)
    found = contents(run, "nested")
    if dist.get_rank() == DEAD:
        dcp.FileSystemWriter.write_data = lambda *_: die()
    kind, _ = message(dcp.save, found, checkpoint_id=folder / "bad")
    return kind, everything(run) == before


@pytest.mark.slow
def test_a_death_during_a_save_leaves_no_false_checkpoint(ranks, tmp_path):
    values, errors = ranks.attempt(save_without, "fsdp", tmp_path, grace=30)
    assert errors.keys() == {DEAD}
    for kind, same in values.values():
        assert kind is not None and same  # an error, and an optimizer that could go on
    with pytest.raises(Exception, match="metadata"):
        dcp.FileSystemReader(tmp_path / "bad").read_metadata()
    dcp.FileSystemReader(tmp_path / "good").read_metadata()  # from which a run goes on, as above
