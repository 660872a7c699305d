"""What the ranks that are left see when one of them is killed."""

import os
import signal
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.checkpoints import contents, here, load, save
from tests.distributed.problem import Run, exact

GOOD, DIED, END = 4, 6, 10  # steps done at the last good checkpoint, when a rank dies, and at the end


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
    save(run, Path(folder) / "good", "nested")
    run.train(GOOD, DIED)
    return run


def step_without(plan, folder, rank):
    """Step when a rank has died; return weights before and after, torch's error, and what state_dict() says."""
    run = begun(plan, folder)
    before = local_weights(run)
    run.backward(DIED)
    dist.monitored_barrier()  # its last message has been answered: all have the gradients
    if dist.get_rank() == rank:
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


def save_without(plan, folder, rank):
    """Save while a rank dies; return torch's error, and whether weights and state are as they were."""
    run = begun(plan, folder)
    before, state = local_weights(run), list(run.optimizer.state_dict()["state"])
    found = contents(run, "nested")
    if dist.get_rank() == rank:
        dcp.FileSystemWriter.write_data = lambda *_: die()
    try:
        dcp.save(found, checkpoint_id=Path(folder) / "bad")
    except Exception as error:
        after = local_weights(run)
        same = all(before[name].tobytes() == after[name].tobytes() for name in before)
        return type(error).__name__, same and list(run.optimizer.state_dict()["state"]) == state
    return None, False


def restart(plan, folder):
    """Go on from the last good checkpoint; return the losses."""
    run = Run(plan)
    load(run, Path(folder) / "good", "nested")
    return run.train(GOOD, END)
