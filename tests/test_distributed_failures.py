"""When a rank dies the others are told, nothing is left half done unseen, and the last checkpoint goes on."""

import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.checkpoints import contents, here, load, save
from tests.distributed.pool import (
    Ranks,
    pools,  # noqa: F401  (a fixture)
)
from tests.distributed.problem import Plan, Run, exact

EXACT = 1e-9  # as in test_distributed_equal
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
    """Losses of a run that nothing interrupts, and its weights before and after the step in which a rank dies."""
    run = Run(Plan())
    losses, weights = [], []
    for call in range(END):
        losses += run.train(call, call + 1)
        if call + 1 in (DIED, DIED + 1):
            weights.append({name: value.copy() for name, value in run.weights().items()})
    return losses, *weights


def die():
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def local_weights(run):
    """Return what of every weight is on this rank."""
    return {name: exact(here(p)).copy() for name, p in run.model.named_parameters()}


def begun(plan, folder):
    """Train to where a rank will die, with a checkpoint on the way."""
    run = Run(plan)
    run.train(0, GOOD)
    save(run, folder / "good", "nested")
    run.train(GOOD, DIED)
    return run


def step_without(plan, folder):
    """Step when a rank has died; return weights before and after, torch's error, and what state_dict() says."""
    run = begun(plan, folder)
    before = local_weights(run)
    run.backward(DIED)
    dist.monitored_barrier()  # its last message has been answered: all have the gradients
    if dist.get_rank() == DEAD:
        die()
    errors = []
    for call in (run.optimizer.step, run.optimizer.state_dict, run.optimizer.step):
        try:
            call()
        except Exception as error:
            errors.append((isinstance(error, RuntimeError), str(error)))
        else:
            errors.append(None)
    return before, local_weights(run), errors


def restart(plan, folder):
    """Go on from the last good checkpoint; return the losses."""
    run = Run(plan)
    load(run, folder / "good", "nested")
    return run.train(GOOD, END)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_rank_dies_before_a_step_which_ends_with_an_error_and_the_checkpoint_goes_on(
    how,
    ranks,
    pools,  # noqa: F811
    alone,
    tmp_path,
):
    losses, old, new = alone
    values, errors = ranks.attempt(step_without, Plan(how), tmp_path, grace=30)
    assert errors.keys() == {DEAD}  # the others came back, within torch's own timeout
    for rank, (before, after, (stepping, saving, again)) in values.items():
        assert stepping is not None and stepping[0] and "broke off" not in stepping[1], stepping
        for refused in (saving, again):
            assert refused is not None and refused[0] and "broke off" in refused[1], refused
            assert "Load the last checkpoint" in refused[1]
        moved = []
        for name, value in after.items():
            if value.size == 0:
                continue
            whole = new[name] if how == "ddp" else rows(new[name], rank)
            scale = np.abs(new[name]).max()
            is_new = np.abs(value - whole).max() < EXACT * scale
            assert is_new or value.tobytes() == before[name].tobytes(), f"{name} is half old and half new"
            moved.append(is_new and not np.abs(old[name] - new[name]).max() < EXACT * scale)
        assert not all(moved)  # something of the dead rank's did not come
    two = pools[2].run(restart, Plan(how), tmp_path)
    assert two[0] == two[1]
    np.testing.assert_allclose(two[0], losses[GOOD:], rtol=EXACT)


def rows(value, rank):
    """The rows of a weight that FSDP2 gives a rank of four."""
    parts = torch.from_numpy(value).chunk(4)
    return parts[rank].numpy() if rank < len(parts) else value[:0]


def save_without(plan, folder):
    """Save while a rank dies; return torch's error, and whether weights and state are as they were."""
    run = begun(plan, folder)
    before, state = local_weights(run), list(run.optimizer.state_dict()["state"])
    found = contents(run, "nested")
    if dist.get_rank() == DEAD:
        dcp.FileSystemWriter.write_data = lambda *_: die()
    try:
        dcp.save(found, checkpoint_id=folder / "bad")
    except Exception as error:
        after = local_weights(run)
        same = all(before[name].tobytes() == after[name].tobytes() for name in before)
        return type(error).__name__, same and list(run.optimizer.state_dict()["state"]) == state
    return None, False


@pytest.mark.slow
def test_a_rank_dies_during_a_checkpoint_which_cannot_be_mistaken_for_a_good_one(ranks, tmp_path):
    values, errors = ranks.attempt(save_without, Plan("fsdp"), tmp_path, grace=30)
    assert errors.keys() == {DEAD}
    for kind, same in values.values():
        assert kind is not None and same  # an error, and an optimizer that could go on
    with pytest.raises(Exception, match="metadata"):
        dcp.FileSystemReader(tmp_path / "bad").read_metadata()
    dcp.FileSystemReader(tmp_path / "good").read_metadata()  # from which a run goes on, as above
