"""Tasks of torch.distributed, with two processes of gloo, and of its checkpoints."""

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.tasks.guard import together
from bench.tasks.peers import Peer
from bench.tasks.problem import END, MIDDLE, Failed, Net, copies, distance, require_finite, require_same, train

RANKS = 2
PATIENCE = timedelta(seconds=30)
ROUNDING = 0.05
"""As in :mod:`bench.tasks.training`: matrices are batched with others in another process."""


def _join(store: Path, rank: int, work: Callable[[int], Any]) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", f"file://{store}", PATIENCE, RANKS, rank)
    found = work(rank)
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def ranks(work: Callable[[int], Any]) -> list[Any]:
    """Return what each of two processes returns."""
    with TemporaryDirectory() as folder:
        return together([partial(_join, Path(folder) / "store", rank, work) for rank in range(RANKS)])


def _parallel(build: Callable[[nn.Module], Any], rank: int, seed: int = 0) -> list[list[float]]:
    """Train under DDP; return the weights as numbers, which float32 survives."""
    model = Net()
    parallel = DistributedDataParallel(model)
    train(parallel, build(model), range(END), rank, seed=seed)
    require_finite(model, "afterwards")
    return [p.detach().flatten().tolist() for p in model.parameters()]


def _tensors(values: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(one) for one in values]


def ddp(peer: Peer) -> str:
    """Under DDP, with other data in each of two processes, both have the same bits at the end."""
    one, other = map(_tensors, ranks(partial(_parallel, peer.optimizer)))
    require_same(one, other, [p.flatten() for p in copies(Net().parameters())], "replicas")
    return "to the bit"


def zero(peer: Peer) -> str:
    """Divided by ZeroRedundancyOptimizer, it goes where the whole one goes in every process.

    Some draw how to round: they may differ by twice as much as they do from another seed.
    """
    given = peer.unnamed or peer.groups

    def divided(model: nn.Module) -> Any:
        return ZeroRedundancyOptimizer(given(model), peer.build)

    start = [p.flatten() for p in copies(Net().parameters())]
    one, other = map(_tensors, ranks(partial(_parallel, divided)))
    require_same(one, other, start, "replicas")
    whole, again = (_tensors(ranks(partial(_parallel, peer.optimizer, seed=seed))[0]) for seed in (0, 1))
    far, chance = distance(whole, one, start), distance(whole, again, start)
    if far > ROUNDING + 2 * chance:
        raise Failed(f"{far:.2g} of the way from the whole one")
    return "to the bit" if far == 0 else f"up to {far:.1g} of the way"


def _through_dcp(peer: Peer, late: bool, flatten: bool) -> str:
    options = states.StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = Net()
    start = copies(model.parameters())
    optimizer = peer.optimizer(model)

    def silent(t: int) -> None:
        if late:
            model.up_proj.weight.grad = None

    train(model, optimizer, range(MIDDLE), change=silent)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process alone
        mine, state = states.get_state_dict(model, optimizer, options=options)
        checkpoint.save({"model": mine, "optimizer": state}, checkpoint_id=folder)
        train(model, optimizer, range(MIDDLE, END))

        fresh = Net(seed=7)
        resumed = peer.optimizer(fresh)
        mine, state = states.get_state_dict(fresh, resumed, options=options)
        saved = {"model": mine, "optimizer": state}
        try:
            checkpoint.load(saved, checkpoint_id=folder)
        except checkpoint.api.CheckpointException as several:
            raise next(iter(several.failures.values()))[0] from None
        states.set_state_dict(
            fresh, resumed, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=options
        )
    train(fresh, resumed, range(MIDDLE, END))
    require_same(list(model.parameters()), list(fresh.parameters()), start, "resumed run")
    return "to the bit"


def dcp(peer: Peer) -> str:
    """Through torch.distributed.checkpoint training goes on to the same bits."""
    return _through_dcp(peer, late=False, flatten=False)


def late_dcp(peer: Peer) -> str:
    """The same where a weight has not had a gradient yet when it is saved."""
    return _through_dcp(peer, late=True, flatten=False)


def flattened_dcp(peer: Peer) -> str:
    """Through torch.distributed.checkpoint with flatten_optimizer_state_dict=True, likewise."""
    return _through_dcp(peer, late=False, flatten=True)
