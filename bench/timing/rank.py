"""What one rank of a divided optimizer measures, a process of a gloo group with one thread.

A small LLaMA gets random gradients, the same on any number of ranks, as DDP (``process_group=``) and FSDP2
(``fully_shard``) leave them; neither computes nor sends any. Of the rank: bytes of its state without the counts of
steps, which every rank has; of the divided weights that it owns, and of the memory that these take beside the model's;
the work of its matrices, by the package's counts; the time of a step, which all begin together, and the CPU's time in
it; the bytes that the optimizer sends and receives in a step.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bench import rows
from bench.models import ModelConfig, build
from bench.timing.entries import PERIOD
from bench.timing.traffic import Traffic
from prokl import ProKLShampoo, param_groups
from prokl.distributed.weights import local

LAUNCHERS = ("ddp", "fsdp2")
RANK = 32
TIMEOUT = timedelta(minutes=5)


def model_of(config: ModelConfig, launcher: str) -> nn.Module:
    """Return the model as a launcher leaves it on this rank."""
    torch.manual_seed(0)
    model = build(config)
    if launcher == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(module, mesh=mesh)
    return model


def give_gradients(model: nn.Module, step: int) -> None:
    """Put this rank's part of a step's gradients in place."""
    g = torch.Generator().manual_seed(step)
    for p in model.parameters():
        whole = torch.randn(p.shape, generator=g)
        p.grad = whole
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def clocked(model: nn.Module, step: Callable[[], object], numbers: range) -> Iterator[tuple[float, float]]:
    """Yield the milliseconds of steps, and the CPU's in them."""
    for number in numbers:
        give_gradients(model, number)
        dist.barrier()
        before = perf_counter(), process_time()
        step()
        yield 1e3 * (perf_counter() - before[0]), 1e3 * (process_time() - before[1])


def times(model: nn.Module, step: Callable[[], object], periods: int) -> Iterator[rows.Row]:
    """Yield the rows of the times; the first step makes the state, and each period ends with a refresh."""
    list(clocked(model, step, range(PERIOD + 1)))
    found = [[*clocked(model, step, range(PERIOD * i + 1, PERIOD * (i + 1) + 1))] for i in range(1, periods + 1)]
    parts = {"step": slice(None), "step without refresh": slice(PERIOD - 1), "refresh step": slice(PERIOD - 1, None)}
    for clock, name in enumerate(("", "CPU time of a ")):
        for part, which in parts.items():
            own = [statistics.mean(pair[clock] for pair in period[which]) for period in found]
            yield {"metric": name + part, "unit": "ms", "rounds": periods} | rows.quartiles(own)


def state_bytes(optimizer: ProKLShampoo, algorithm: str) -> int:
    """Return the bytes of state that this rank has of an algorithm's weights, without counts of steps."""
    weights = [p for group in optimizer.param_groups if group["algorithm"] == algorithm for p in group["params"]]
    entries = [entry for p in weights for entry in optimizer.state[p].items()]
    return sum(local(t).nbytes for key, t in entries if isinstance(t, Tensor) and key.partition(".")[0] != "step")


def rank_rows(launcher: str, config: ModelConfig, periods: int) -> Iterator[rows.Row]:
    """Yield what this rank measures; needs all of them."""
    model, (ranks, place) = model_of(config, launcher), (dist.get_world_size(), dist.get_rank())
    group = dist.group.WORLD if launcher == "ddp" else None
    optimizer = ProKLShampoo(param_groups(model, lr=0.02, adamw_lr=3e-3, rank=RANK), process_group=group)
    yield from times(model, optimizer.step, periods)
    give_gradients(model, 0)
    with Traffic(ranks, place) as traffic:
        optimizer.step()
    division = optimizer._division
    assert division is not None
    owned = [(w.stand_in.nbytes, w.own_memory) for w in division.divided() if w.stand_in is not None]
    matrix, adamw = (state_bytes(optimizer, name) for name in ("matrix", "adamw"))
    figures = {"state": matrix + adamw, "matrix state": matrix, "AdamW state": adamw}
    figures["owned weights"] = sum(size for size, _ in owned)
    figures["room for these"] = sum(size for size, apart in owned if apart)
    figures |= {"sent": traffic.sent, "received": traffic.received}
    yield {"metric": "work", "unit": "operations", "median": sum(loads[place] for loads in division.loads.values())}
    yield from ({"metric": name, "unit": "bytes", "median": figure} for name, figure in figures.items())


def run_rank(place: int, ranks: int, config: ModelConfig, periods: int, folder: str) -> None:
    """Measure as one of the ranks, a process of its own, and leave the rows in the folder."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # the machine's name need not be an address
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=place, world_size=ranks, timeout=TIMEOUT)
    head: rows.Row = {"ranks": ranks, "place": place}
    found = [{"case": name} | head | row for name in LAUNCHERS for row in rank_rows(name, config, periods)]
    Path(folder, f"{place}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
