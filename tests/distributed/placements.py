"""Weights of every kind, placed in every way, on ranks that all are given the same whole gradients.

Some weights come late, are missing in some steps or get gradients that are not finite, by the step.
"""

import io

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.inputs import KL, PRO

MATRICES = {
    "square": (8, 8),
    "square2": (8, 8),
    "square3": (8, 8),
    "wide": (8, 20),
    "five": (5, 8),
    "row": (1, 6),
    "qkv": (24, 8),
    "experts": (6, 8, 10),
    "experts2": (5, 10, 8),
    "conv": (6, 3, 2, 2),
    "late": (20, 8),
    "sometimes": (8, 8),
}
SPLIT = {"qkv": 3, "experts2": 2}
VECTORS = {"table": (11, 4), "bias": (5,), "one": (1,), "scalar": (), "gains": (1, 4)}
SHAPES = MATRICES | VECTORS
LATE = 7  # the first call that gives `late` and `gains` a gradient
ABSENT = (4, 5, 8)  # calls that give `sometimes` none
BAD = (3, 9)  # calls in which gradients are infinite: one as a whole, of another weight one entry in one expert
POISONED = {"square3": ..., "experts2": (4, 0, 0)}
BEGINS = 2  # the first call that gives the second of `experts` a gradient that is not zero
PERIOD = 4
STEPS = 12  # beyond the last of these, and two refreshes
MIXED = {"square2": [Replicate()], "square3": None}
# How weights lie on the ranks: the dimensions of the mesh, and a weight's placement on it by its name and dimensions;
# None of a plain tensor. Plain weights are divided among all ranks, where "divided" stands beside them.
PLACED = {
    "alone": (0, lambda name, ndim: None),
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


def mesh_of(dimensions, device="cpu"):
    """Return a mesh of all ranks, or None of none."""
    if not dimensions:
        return None
    world, names = dist.get_world_size(), ("replicate", "shard")[-dimensions:]
    shape = {1: (world,), 2: (2, world // 2)}[dimensions]
    return init_device_mesh(torch.device(device).type, shape, mesh_dim_names=names)


def value(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def placed(t, mesh, placements):
    return t if placements is None else distribute_tensor(t, mesh, placements, src_data_rank=None)


def matrices_and_vectors(weights, cls=PRO):
    """Return a group of the matrices and one of AdamW's of the others, where there are any."""
    to_adamw = {*VECTORS, *(("row", "conv") if cls is KL else ())}  # no start of KL's follows from fewer rows
    vectors = [(name, p) for name, p in weights.items() if name in to_adamw]
    matrices = [(name, p) for name, p in weights.items() if name not in to_adamw]
    groups = [{"params": matrices, "split": [SPLIT.get(name) for name, _ in matrices]}] if matrices else []
    return groups + ([{"params": vectors, "algorithm": "adamw", "lr": 0.01, "amsgrad": True}] if vectors else [])


def group_each(weights):
    """Return a group of every weight."""
    return [{"params": [entry]} for entry in weights.items()]


def give(weights, call, but=(), place=None):
    """Give every weight but some its gradient of a call, or none, placed as the weight is or otherwise."""
    for i, (name, p) in enumerate(weights.items()):
        if name in but:
            continue
        G = value(p.shape, 1000 * call + i + 1).to(p.device, p.dtype)
        if call in BAD and name in POISONED:
            G[POISONED[name]] = torch.inf
        if call < BEGINS and name == "experts":
            G[1] = 0.0
        absent = (name in ("late", "gains") and call < LATE) or (name == "sometimes" and call in ABSENT)
        mesh, placements = getattr(p, "device_mesh", None), getattr(p, "placements", None)
        p.grad = None if absent else placed(G, mesh, placements if place is None or mesh is None else place)


class Run:
    """Weights and their optimizer, in the middle of training.

    Args:
        how: the weights are placed. cls: of the optimizer. shapes, dtype, device: of the weights.
        groups: makes groups of them; None makes two, of the matrices and the others.
        settings: of the optimizer.
    """

    def __init__(self, how="alone", cls=PRO, shapes=SHAPES, dtype=torch.float64, device="cpu", groups=None, **settings):
        dimensions, place = PLACED[how]
        mesh = mesh_of(dimensions, device)
        self.weights = {}
        for i, (name, shape) in enumerate(shapes.items()):
            placements = None if shape == () else place(name, len(shape))
            self.weights[name] = nn.Parameter(placed(value(shape, i).to(device, dtype), mesh, placements))
        self.net = nn.ParameterDict(self.weights)
        made_groups = groups(self.weights) if groups else matrices_and_vectors(self.weights, cls)
        settings = {"rank": 3, **settings} if cls is PRO else settings
        group = dist.group.WORLD if how in DIVIDED else None
        self.optimizer = cls(made_groups, precondition_frequency=PERIOD, process_group=group, **settings)

    def step(self, call, **given):
        """Do one step; what is given is for :func:`give`."""
        give(self.weights, call, **given)
        self.optimizer.step()

    def train(self, first, last):
        """Do steps ``first`` to ``last``; return the run."""
        for call in range(first, last):
            self.step(call)
        return self


def here(t):
    """Return what of a tensor is on this rank."""
    return getattr(t.detach(), "_local_tensor", t.detach())


def whole(weights):
    """Return all weights, whole, in NumPy's float64, which holds each of our dtypes exactly; needs all ranks."""
    found = {}
    for name, p in weights.items():
        t = p.detach()
        found[name] = (t.full_tensor() if isinstance(t, DTensor) else t).double().cpu().numpy().copy()
    return found


def trained(how, steps=STEPS, **given):
    """Train; return all weights, whole."""
    return whole(Run(how, **given).train(0, steps).weights)


def written(value):
    """Return what torch.save writes, as bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def everything(run):
    """Return the bits of all that this rank has of weights and state."""
    found = {f"weight {name}": here(p) for name, p in run.weights.items()}
    for i, own in run.optimizer.state_dict()["state"].items():
        found |= {f"state {i} {key}": here(value) if torch.is_tensor(value) else value for key, value in own.items()}
    return {k: written(v.clone().contiguous()) if torch.is_tensor(v) else v for k, v in found.items()}


def assert_same(found, expected):
    """Compare weights bit for bit."""
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert weight.tobytes() == found[name].tobytes(), name


def assert_close(found, expected):
    """Compare weights about 1 in float64: batches and sums of other orders cost about 1e-13 in twelve steps."""
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=1e-9, atol=1e-12, err_msg=name)


def message(function, *args, **kwargs):
    """Return the type and text of the error that a call raises."""
    try:
        function(*args, **kwargs)
    except BaseException as error:  # torch's CheckpointException is no Exception
        return type(error).__name__, str(error)
    return None, ""


def refusal(run, function, *args, **kwargs):
    """Return the type and text of the error that a call raises, and what of a run's weights and state it changes."""
    before = everything(run)
    error, after = message(function, *args, **kwargs), everything(run)
    return *error, [key for key in before if before[key] != after.get(key)]
