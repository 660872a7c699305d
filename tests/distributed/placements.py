"""Weights placed in every way, on ranks that all are given the same whole gradients: what the ranks of a pool run."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import prokl
from prokl import diagnostics
from tests.distributed.traffic import Traffic
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
STEPS, PERIOD = 12, 4
PLACED = {  # of every weight on a mesh of so many dimensions; None: a plain tensor
    "rows": (1, lambda name: [Shard(0)]),
    "columns": (1, lambda name: [Shard(1)] if len((MATRICES | VECTORS)[name]) > 1 else [Replicate()]),
    "replicas": (1, lambda name: [Replicate()]),
    "plain": (1, lambda name: None),
    "mixed": (1, lambda name: {"square": [Shard(0)], "square2": [Replicate()], "square3": None}.get(name, [Shard(0)])),
    "hsdp": (2, lambda name: [Replicate(), Shard(0)]),
    "rows and columns": (
        2,
        lambda name: [Shard(0), Shard(1)] if len((MATRICES | VECTORS)[name]) > 1 else [Shard(0)] * 2,
    ),
    "rows of rows": (2, lambda name: [Shard(0), Shard(0)]),
}


def value(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def given(name, call):
    """Return a whole gradient."""
    shapes = MATRICES | VECTORS
    return value(shapes[name], 1000 * call + [*shapes].index(name) + 1)


def placed(t, mesh, placements):
    return t if placements is None else distribute_tensor(t, mesh, placements, src_data_rank=None)


def weights_of(mesh, place):
    """Return every weight, by its name."""
    found = {}
    for i, (name, shape) in enumerate((MATRICES | VECTORS).items()):
        placements = None if mesh is None or shape == () else place(name)
        found[name] = nn.Parameter(placed(value(shape, i), mesh, placements))
    return found


def optimizer_of(weights, cls, group=None, **settings):
    matrices = [(name, p) for name, p in weights.items() if name in MATRICES]
    vectors = [(name, p) for name, p in weights.items() if name in VECTORS]
    if cls is prokl.KLShampoo:  # whose start is determined by no gradient of fewer rows than columns
        vectors += [(name, p) for name, p in matrices if name in ("row", "conv")]
        matrices = [(name, p) for name, p in matrices if name not in ("row", "conv")]
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 0.01, "amsgrad": True}]
    rank = {"rank": 3} if cls is prokl.ProKLShampoo else {}
    return made(cls, groups, precondition_frequency=PERIOD, process_group=group, **rank, **settings)


def step(weights, optimizer, call, mesh=None, place=None, without=(), bad=()):
    for name, p in weights.items():
        g = given(name, call)
        if name in bad:
            g[bad[name]] = torch.inf
        placements = getattr(p, "placements", None) if place is None else place(name)
        p.grad = None if name in without else placed(g, mesh, placements) if isinstance(p, DTensor) else g
    optimizer.step()


def whole(weights):
    found = {}
    for name, p in weights.items():
        t = p.detach()
        found[name] = (t.full_tensor() if isinstance(t, DTensor) else t).double().numpy().copy()
    return found


def mesh_of(dimensions):
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world,) if dimensions == 1 else (2, world // 2))


def alone(cls, steps=STEPS, **settings):
    weights = weights_of(None, None)
    optimizer = optimizer_of(weights, cls, **settings)
    for call in range(steps):
        step(weights, optimizer, call)
    return whole(weights)


def on_ranks(cls, how, divided=False, **settings):
    """Train; return the weights, whole, and the bytes that this rank receives in the last step."""
    dimensions, place = PLACED[how]
    mesh = mesh_of(dimensions)
    weights = weights_of(mesh, place)
    optimizer = optimizer_of(weights, cls, dist.group.WORLD if divided else None, **settings)
    for call in range(STEPS - 1):
        step(weights, optimizer, call, mesh)
    with Traffic() as traffic:
        step(weights, optimizer, STEPS - 1, mesh)
    return whole(weights), traffic.received


def held(optimizer):
    """Return the elements of state that this rank has, by key; counts alone, which several ranks may have, left out."""
    found = {}
    for own in optimizer.engine.state.values():
        for key, t in own.items():
            if isinstance(t, torch.Tensor) and key.partition(".")[0] not in ("step", "skipped"):
                found[key] = found.get(key, 0) + t.numel()
    return found


def state_of_ranks(how, divided):
    """Return the elements of state that this rank has after a step, by key."""
    dimensions, place = PLACED[how]
    mesh = mesh_of(dimensions) if dist.is_initialized() else None
    weights = weights_of(mesh, place)
    optimizer = optimizer_of(weights, prokl.ProKLShampoo, dist.group.WORLD if divided else None)
    step(weights, optimizer, 0, mesh)
    return held(optimizer)


def of_gradients_placed_otherwise():
    mesh, place = mesh_of(1), PLACED["rows"][1]
    weights = weights_of(mesh, place)
    optimizer = optimizer_of(weights, prokl.ProKLShampoo)
    for call in range(STEPS):
        step(weights, optimizer, call, mesh, (lambda _: [Replicate()]) if call % 2 else place)
    return whole(weights)


def experts_at_home():
    """Return the bytes that come where each rank has whole experts, and the rows that it owns."""
    mesh = mesh_of(1)
    experts = {
        name: nn.Parameter(distribute_tensor(value(MATRICES[name], 1), mesh, [Shard(0)])) for name in ("experts",)
    }
    optimizer = prokl.ProKLShampoo(experts.items(), rank=3)
    for call in range(2):
        step(experts, optimizer, call, mesh)
    with Traffic() as traffic:
        step(experts, optimizer, 2, mesh)
    (state,) = optimizer.engine.state.values()
    return traffic.received, tuple(state["M"].shape), whole(experts)["experts"]


def frozen_and_released(how):
    """Train with a weight frozen for some steps and one that comes into the optimizer later; return the weights."""
    mesh = mesh_of(1) if how != "alone" else None
    place = PLACED["rows" if how == "fsdp" else "plain"][1]
    weights = weights_of(mesh, place)
    late = weights.pop("square3")
    optimizer = optimizer_of(weights, prokl.ProKLShampoo, dist.group.WORLD if how == "ddp" else None)
    for call in range(STEPS):
        if call == 3:
            optimizer.add_param_group({"params": [("square3", late)]})
            weights["square3"] = late
        weights["wide"].requires_grad_(call not in (0, 1, 6))
        step(weights, optimizer, call, mesh, without=() if weights["wide"].requires_grad else ("wide",))
    return whole(weights)


def not_finite(how, split):
    """Train with an infinite entry in one expert's gradient in some steps; return the weights and counts of skips."""
    mesh = mesh_of(1) if how != "alone" else None
    weights = {"experts": weights_of(mesh, PLACED["rows" if how == "fsdp" else "plain"][1])["experts"]}
    groups = [{"params": [*weights.items()], "split": split}]
    group = dist.group.WORLD if how == "ddp" else None
    optimizer = prokl.ProKLShampoo(groups, rank=3, precondition_frequency=PERIOD, process_group=group)
    for call in range(8):
        step(weights, optimizer, call, mesh, bad={"experts": (4, 0, 0)} if call in (0, 3, 5) else ())
    return whole(weights)["experts"], optimizer.skipped()


def asked_of_one_rank():
    """Ask the first rank alone, while the others wait for nothing; return what it said."""
    weights = weights_of(mesh_of(1), PLACED["mixed"][1])
    optimizer = optimizer_of(weights, prokl.ProKLShampoo, dist.group.WORLD)
    for call in range(3):
        step(weights, optimizer, call, weights["square"].device_mesh)
    if dist.get_rank():
        return None
    found = [optimizer.state_dict(), optimizer.skipped(), optimizer.clipped(), diagnostics.scalars(optimizer)]
    return [len(found[0]["state"]), *found[1:]]


def message(function, *args, **kwargs):
    """Return the type and text of the error that a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def refusals():
    """Return what is said of everything that is refused."""
    mesh, world, found = mesh_of(1), dist.group.WORLD, {}
    partial = nn.Parameter(DTensor.from_local(value((4, 4), 1), mesh, [Partial()], run_check=False))
    found["partial"] = message(prokl.ProKLShampoo, [partial])
    plain = nn.Parameter(value((4, 6), 1))
    found["group"] = message(prokl.ProKLShampoo, [plain], process_group=4)
    divided = prokl.ProKLShampoo([plain], rank=2, process_group=world)
    found["copy"] = message(copy.deepcopy, divided)
    found["pickle"] = message(pickle.dumps, divided)
    other = nn.Parameter(value((4, 6 + dist.get_rank()), 1))
    unlike = prokl.ProKLShampoo([other], rank=2, process_group=world)
    other.grad = torch.ones_like(other)
    found["weights"] = message(unlike.step)
    net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)).double()
    zero = ZeroRedundancyOptimizer(net.parameters(), prokl.ProKLShampoo, lr=0.02, rank=2)
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        for p in net.parameters():
            p.grad = value(p.shape, p.numel())
        zero.step()
    found["moved by ZeRO"] = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]

    class Divided(prokl.ProKLShampoo):
        def __init__(self, params, **settings):
            super().__init__(params, process_group=world, **settings)

    zero = ZeroRedundancyOptimizer(net.parameters(), Divided, lr=0.02, rank=2)
    found["ZeRO"] = message(zero.step)
    flat = FullyShardedDataParallel(copy.deepcopy(net), use_orig_params=True, device_id=torch.device("cpu"))
    found["FSDP1"] = message(prokl.ProKLShampoo, flat.parameters())
    return found


def sharded_model_with_ignored():
    """Train an FSDP2 model of which one weight is ignored, so plain; return whether ranks agree, and the bytes sent."""
    found = []
    for divided in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).double()
        fully_shard(net, ignored_params={net[1].weight})
        group = dist.group.WORLD if divided else None
        optimizer = prokl.ProKLShampoo(net.named_parameters(), rank=3, process_group=group)
        for call in range(4):
            for p in net.parameters():
                own = (p.device_mesh, p.placements) if isinstance(p, DTensor) else (None, None)
                p.grad = placed(value((8, 8), call + 10), *own)
            optimizer.step()
        found.append([w.tolist() for w in whole(dict(net.named_parameters())).values()])
    return found
