"""When a rank dies the others are told, nothing is left half done unseen, and the last checkpoint goes on."""

import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.checkpoints import contents, load, save
from tests.distributed.placements import Run, assert_close, everything, give, here, message, whole
from tests.distributed.pool import Ranks

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
