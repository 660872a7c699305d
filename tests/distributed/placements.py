"""Weights placed in every way, on ranks that all are given the same whole gradients."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.inputs import KL, PRO
from tests.problems import made

MATRICES = {
    "square": (8, 8),
    "square2": (8, 8),
    "square3": (8, 8),
    "wide": (8, 20),
    "five": (5, 8),
    "row": (1, 6),
    "experts": (6, 8, 10),
    "experts2": (5, 10, 8),
    "conv": (6, 3, 2, 2),
}
VECTORS = {"table": (11, 4), "bias": (5,), "one": (1,), "scalar": (), "gains": (1, 4)}
PERIOD = 4
MIXED = {"square2": [Replicate()], "square3": None}
# How weights lie on the ranks: the dimensions of the mesh, and a weight's placement on it by its name and dimensions;
# None of a plain tensor. Plain weights are divided among all ranks, where "divided" stands beside them.
PLACED = {
    "alone": (0, lambda name, ndim: None),
    "plain": (0, lambda name, ndim: None),
    "ddp": (0, lambda name, ndim: None),
    "fsdp": (1, lambda name, ndim: [Shard(0)]),
    "columns": (1, lambda name, ndim: [Shard(1)] if ndim > 1 else [Replicate()]),
    "replicas": (1, lambda name, ndim: [Replicate()]),
    "mixed": (1, lambda name, ndim: MIXED.get(name, [Shard(0)])),
    "mixed, divided": (1, lambda name, ndim: MIXED.get(name, [Shard(0)])),
    "hsdp": (2, lambda name, ndim: [Replicate(), Shard(0)]),
    "rows and columns": (2, lambda name, ndim: [Shard(0), Shard(1)] if ndim > 1 else [Shard(0), Shard(0)]),
    "rows of rows": (2, lambda name, ndim: [Shard(0), Shard(0)]),
}
DIVIDED = ("ddp", "mixed, divided")


def mesh_of(dimensions):
    """Return a mesh of all ranks, or None of none."""
    world = dist.get_world_size() if dimensions else 0
    return init_device_mesh("cpu", {1: (world,), 2: (2, world // 2)}[dimensions]) if dimensions else None


def value(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def placed(t, mesh, placements):
    return t if placements is None else distribute_tensor(t, mesh, placements, src_data_rank=None)


def weights_of(how, shapes=MATRICES | VECTORS, dtype=torch.float64):
    """Return a weight of every shape, by its name."""
    dimensions, place = PLACED[how]
    mesh, found = mesh_of(dimensions), {}
    for i, (name, shape) in enumerate(shapes.items()):
        placements = None if shape == () else place(name, len(shape))
        found[name] = nn.Parameter(placed(value(shape, i).to(dtype), mesh, placements))
    return found


def optimizer_of(how, groups, cls=PRO, **settings):
    """Return an optimizer of groups, or of weights by their names."""
    if isinstance(groups, dict):
        vectors = [(name, p) for name, p in groups.items() if name in VECTORS]
        matrices = [(name, p) for name, p in groups.items() if name not in VECTORS]
        if cls is KL:  # whose start is determined by no gradient of fewer rows than columns
            vectors += [(name, p) for name, p in matrices if name in ("row", "conv")]
            matrices = [(name, p) for name, p in matrices if name not in ("row", "conv")]
        groups = [{"params": matrices}]
        if vectors:
            groups.append({"params": vectors, "algorithm": "adamw", "lr": 0.01, "amsgrad": True})
    if cls is PRO:
        settings["rank"] = 3
    group = dist.group.WORLD if how in DIVIDED else None
    return made(cls, groups, precondition_frequency=PERIOD, process_group=group, **settings)


def give(weights, call, but=(), bad=None, place=None):
    """Give every weight but some its gradient of a call, placed as the weight is or otherwise.

    ``bad`` says by name which element is infinite.
    """
    for i, (name, p) in enumerate(weights.items()):
        if name not in but:
            G = value(p.shape, 1000 * call + i + 1).to(p.dtype)
            if bad and name in bad:
                G[bad[name]] = torch.inf
            mesh, placements = getattr(p, "device_mesh", None), getattr(p, "placements", None)
            p.grad = placed(G, mesh, placements if place is None or mesh is None else place)


def train(weights, optimizer, first, last):
    """Do steps ``first`` to ``last``."""
    for call in range(first, last):
        give(weights, call)
        optimizer.step()


def whole(weights):
    """Return all weights, whole, in NumPy's float64; needs all ranks."""
    found = {}
    for name, p in weights.items():
        t = p.detach()
        found[name] = (t.full_tensor() if isinstance(t, DTensor) else t).double().numpy().copy()
    return found


def assert_close(found, expected):
    """Compare weights about 1 in float64: batches and sums of other orders cost about 1e-13 in twelve steps."""
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=1e-9, atol=1e-12, err_msg=name)


def message(function, *args, **kwargs):
    """Return the type and text of the error that a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""
