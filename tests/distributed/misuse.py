"""What users do between steps of a divided optimizer, and what ranks do that are not alike."""

import io

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard

from tests.distributed.placements import mesh_of, message, placed, whole
from tests.inputs import PRO, normal
from tests.problems import made

SHAPES = [(8, 12), (8, 12)]


def weights_of(how, shapes=SHAPES, dtype=torch.float64):
    """Make weights for "alone", "ddp" or "fsdp"."""
    mesh, placements = (mesh_of(1), [Shard(0)]) if how == "fsdp" else (None, None)
    drawn = [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    return [torch.nn.Parameter(placed(W, mesh, placements)) for W in drawn]


def optimizer_of(how, groups, **settings):
    group = dist.group.WORLD if how == "ddp" else None
    return made(PRO, groups, lr=0.01, rank=2, process_group=group, **settings)


def give(weights, call, but=()):
    """Give every weight its gradient of a call, but for some."""
    for i, p in enumerate(weights):
        if i not in but:
            G = normal(*p.shape, seed=1000 * call + i).to(p.dtype)
            p.grad = placed(G, getattr(p, "device_mesh", None), getattr(p, "placements", None))


def values(weights):
    return [*whole(dict(enumerate(weights))).values()]


def raised(function, *args):
    """Return the class's name and the text of what a call raises, or None."""
    kind, text = message(function, *args)
    return (kind, text) if kind else None


def steps(how, weights, count, before=lambda call: (), **settings):
    """Step so often; ``before`` says which weights keep what gradient they have."""
    optimizer = optimizer_of(how, weights, **settings)
    for call in range(count):
        give(weights, call, but=before(call) or ())
        optimizer.step()
    return optimizer


def frozen(how, gradient):
    """Freeze a weight that keeps its last gradient, gets a zero one, or none."""
    weights = weights_of(how)

    def freeze(call):
        weights[0].requires_grad_(call < 4)
        if call >= 4 and gradient != "kept":
            weights[0].grad = torch.zeros_like(weights[0].detach()) if gradient == "zero" else None
        return (0,) if call >= 4 else ()

    steps(how, weights, 7, freeze)
    return values(weights)


def unfrozen(how):
    """Train four weights of which the two large ones are frozen at first; their values, memory and who owns which."""
    weights = weights_of(how, [(8, 20), (8, 20), (8, 12), (8, 12)])
    for p in weights[:2]:
        p.requires_grad_(False)
    optimizer, memory = optimizer_of(how, weights), []
    for call in range(7):
        if call == 4:
            for p in weights[:2]:
                p.requires_grad_(True)
        give(weights, call, but=(0, 1) if call < 4 else ())
        optimizer.step()
        stand_ins = [getattr(optimizer._division, "weights", {p: None for p in weights})[p] for p in weights[:2]]
        own = [w.stand_in for w in stand_ins if w is not None and w.stand_in is not None and w.own_memory]
        memory.append(
            sum(t.untyped_storage().nbytes() for t in own) + sum(len(optimizer.state[p]) for p in weights[:2])
        )
    division = optimizer._division
    owners = [division.weights[p].parts[0].owner for p in weights] if division is not None else []
    return values(weights), memory, owners


def widened(how):
    """Make float32 of bfloat16 weights that have masters."""
    weights = weights_of(how, dtype=torch.bfloat16)

    def widen(call):
        for p in weights if call == 5 else ():
            p.grad, p.data = None, p.data.float()

    optimizer = steps(how, weights, 6, widen, bf16_weights="master")
    kept = {key for own in optimizer.engine.state.values() for key in own}
    return values(weights), "master" in kept


def state_taken_out(how):
    weights = weights_of(how)
    optimizer = optimizer_of(how, weights)
    for call in range(5):
        if call == 3:
            for p in weights:
                optimizer.state.pop(p)
        give(weights, call)
        optimizer.step()
    return values(weights)


def gathered_after(what):
    """Return the keys that a gathered state has after something was done."""
    weights = weights_of("ddp", dtype=torch.float32)
    optimizer = optimizer_of("ddp", weights, bf16_weights="master")
    if what == "loading a fresh state":
        optimizer.load_state_dict(optimizer.state_dict())
    elif what == "a cast":
        give(weights, 0)
        optimizer.step()
        for p in weights:
            p.grad, p.data = None, p.data.bfloat16()
        give(weights, 1)
        optimizer.step()
    elif what == "freezing and loading":
        give(weights, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        weights[0].requires_grad_(False)
        weights[0].grad = weights[1].grad = None
        optimizer.load_state_dict(saved)
    found = optimizer.gather_state_dict()
    return sorted((i, key) for i, own in found.get("state", {}).items() for key in own)


def ranks_that_differ(what):
    """Return what this rank is told when one of them has, or loads, something else."""
    odd = dist.get_rank() == 1
    weights = weights_of("fsdp" if what == "split" else "ddp", [(8, 12), (8, 13 if odd and what == "shape" else 12)])
    groups = [{"params": weights[:1]}, {"params": weights[1:]}]
    optimizer = optimizer_of("fsdp" if what == "split" else "ddp", groups)
    if what == "split":
        if odd:
            optimizer.param_groups[0]["split"] = 5
    if what in ("split", "shape"):
        give(weights, 0)
        told = raised(optimizer.step)
        if what == "split":
            optimizer.param_groups[0]["split"] = None
            optimizer.step()  # what failed has left no trace
        return told
    give(weights, 0)
    optimizer.step()
    found = [optimizer.gather_state_dict()]
    dist.broadcast_object_list(found, 0)
    (state,) = found
    if odd:
        state = {**state, "param_groups": state["param_groups"][:1]}
    return raised(optimizer.load_state_dict, state)


def last_weight_differs(what):
    """Return what this rank is told when the last of many weights is another one on one rank, which deals work anew."""
    odd = dist.get_rank() == 1
    weights = weights_of("ddp", [(8, 12), (8, 12), (8, 12), (8, 40 if odd and what == "shape" else 12)])
    if odd and what == "frozen":
        weights[3].requires_grad_(False)
    names = ["a", "b", "c", "other" if odd and what == "name" else "d"]
    optimizer = optimizer_of("ddp", list(zip(names, weights, strict=True)))
    give(weights, 0, but=(3,))
    return raised(optimizer.step)


def changed_after_the_start(key, value):
    """Change a setting that state depends on, on all ranks: of which some own nothing."""
    weights = weights_of("ddp")
    optimizer = optimizer_of("ddp", weights)
    give(weights, 0)
    optimizer.step()
    optimizer.param_groups[0][key] = value
    give(weights, 1)
    return raised(optimizer.step)


def with_adamw(how, first=False, alone=False):
    weights = weights_of(how, [(8, 12), (8, 4)])
    groups = [{"params": weights[:1]}, {"params": weights[1:], "algorithm": "adamw", "lr": 0.01}]
    return weights, optimizer_of(how, groups[1:] if alone else groups[::-1] if first else groups)


def file_of_the_first_rank(how, alone):
    """Let every rank load the first one's part, of AdamW's weights alone or not."""
    weights, optimizer = with_adamw(how, alone=alone)
    for call in range(2):
        give(weights, call)
        optimizer.step()
    own = io.BytesIO()
    torch.save(optimizer.state_dict(), own)
    sent = [own.getvalue()]
    dist.broadcast_object_list(sent, 0)
    _, other = with_adamw(how, alone=alone)
    return raised(other.load_state_dict, torch.load(io.BytesIO(sent[0]), weights_only=False))


def save_part(folder):
    weights, optimizer = with_adamw("ddp", first=True)
    for call in range(2):
        give(weights, call)
        optimizer.step()
    torch.save(optimizer.state_dict(), folder / str(dist.get_rank()))


def load_part(folder):
    _, optimizer = with_adamw("ddp", first=True)
    return raised(optimizer.load_state_dict, torch.load(folder / str(dist.get_rank()), weights_only=False))


def a_sum_for_adamw():
    mesh = mesh_of(1)
    p = torch.nn.Parameter(DTensor.from_local(normal(4, 4), mesh, [Partial()], run_check=False))
    groups = [{"params": weights_of("alone")}, {"params": [p], "algorithm": "adamw", "lr": 0.1}]
    return raised(optimizer_of, "fsdp", groups)


def gradients_stay(how):
    """Return True if an infinite gradient of an expert changes nobody's gradients."""
    p = torch.nn.Parameter(normal(4, 8, 10))
    optimizer = optimizer_of("ddp", [p])
    for call in range(2):
        p.grad = normal(*p.shape, seed=call)
        if call == 1:
            p.grad[1, 2, 3] = float("inf")
        before = p.grad.clone()
        optimizer.step()
    return torch.equal(p.grad, before)
