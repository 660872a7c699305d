"""Frozen checkpoints: state dicts of a version, and what the next three steps led to there.

Run for a release before anything of it is rebuilt, with the release in a checkout of its own:

    git worktree add ../released RELEASE
    PYTHONPATH=../released python tests/freeze.py tests/data/frozen/RELEASE.pt
    git worktree remove ../released

tests/test_frozen_checkpoints.py takes every file of that folder. A file is read by ``torch.load(weights_only=True)``,
and has:

    version         prokl.__version__
    cases           by name:
        method      class of the optimizer
        settings    the constructor's, defaults explicit, but the machine's own (backend, precision, cuda_graphs)
        groups      the constructor's, with names in the place of weights
        weights     by name, at the time of the state dict
        state_dict  the optimizer's
        gradients   of the next three steps, by name, in float64; None: no gradient
        after       weights, and state of the state dict, after these steps
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import prokl

CALLS, NEXT = 7, 3
"""Steps before the state dict and after it. A weight's first one initialises its state."""
MATRICES = {"wide": (4, 7), "tall": (7, 4), "stack": (2, 3, 5), "conv": (3, 2, 1, 2), "late": (4, 4)}
READ = {"fused": {"shape": (6, 4), "split": (2, 4)}, "stored": {"shape": (5, 3), "transposed": True}}
"""Weights that are told how to read them."""
VECTORS = {"table": (2, 3), "bias": (3,)}
"""AdamW's."""
SHAPES = {**MATRICES, **{name: own["shape"] for name, own in READ.items()}, **VECTORS}
EVERY = ("pro-klshampoo", "klshampoo", "divided")
"""Cases with all of these weights."""
FEW = ("wide", "tall", "stack", "fused", "bias")
"""Weights of the other cases."""
MACHINE = ("backend", "precision", "cuda_graphs")
PRO, KL = "ProKLShampoo", "KLShampoo"
CASES = {
    "pro-klshampoo": (PRO, torch.float64, {}),
    "pro-klshampoo from 0.1": (PRO, torch.float64, {"init_eigenvalue": 0.1}),
    "smok-hop": (PRO, torch.float64, {"variant": "smok-hop", "maximize": True}),
    "subspace-only": (PRO, torch.float64, {"variant": "subspace-only", "init_eigenvalue": 0.1}),
    "complement-only": (PRO, torch.float64, {"variant": "complement-only"}),
    "klshampoo": (KL, torch.float64, {}),
    "klshampoo from 0.1": (KL, torch.float64, {"init_eigenvalue": 0.1}),
    "float32": (PRO, torch.float32, {}),
    # It refreshes in the last of the steps: no weight moves by what a refresh has made of rounded factors.
    "bfloat16 state": (PRO, torch.float32, {"state_dtype": torch.bfloat16, "precondition_frequency": 3}),
    "bfloat16 weights": (PRO, torch.bfloat16, {}),
    "bfloat16 weights, plain": (PRO, torch.bfloat16, {"bf16_weights": "plain"}),
    "bfloat16 weights, master": (PRO, torch.bfloat16, {"bf16_weights": "master"}),
    "bounded": (PRO, torch.float64, {"clip_threshold": 5.0}),
    "bounded klshampoo": (KL, torch.float64, {"clip_threshold": 5.0}),
    "AdamW's units": (PRO, torch.float64, {"adjust_lr_fn": "match_rms_adamw", "cautious_weight_decay": True}),
    "divided": (PRO, torch.float64, {"process_group": None}),  # among two ranks, see divided()
}
"""Method, dtype of the weights, and settings that are not the version's defaults. "bounded" meets other gradients."""


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(names, call, bounded=False):
    """Return the gradients of a call by name: a signal that stays and noise, with what else training meets."""
    found = {
        name: normal(*shape, seed=i) + normal(*shape, seed=100 * (call + 1) + i)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    if call < CALLS:
        found["late"] = None  # it begins in the steps that are frozen
        if call < 2:
            found["stack"][1] = 0.0
    elif call == CALLS:
        found["conv"] *= 0.0
    elif call == CALLS + 1:
        found["tall"] = found["table"] = None
    else:
        found["stack"][0, 1, 2] = torch.nan
    if bounded and call == CALLS:
        found["stack"][0] *= 1e-3
        found["stack"][1] *= 0.0
    elif bounded and call == CALLS + 1:
        found["wide"] *= 50.0
    return {name: found[name] for name in names}


def build(case, **more):
    """Return the weights of a case by name, and an optimizer of its settings and ``more``."""
    weights = {name: torch.nn.Parameter(W.clone()) for name, W in case["weights"].items()}
    groups = [{**group, "params": [(name, weights[name]) for name in group["params"]]} for group in case["groups"]]
    make, settings = getattr(prokl, case["method"]), {**case["settings"], **more}
    return weights, make(groups, **settings)


def step(weights, optimizer, given):
    for name, p in weights.items():
        p.grad = None if given[name] is None else given[name].to(p.dtype, copy=True)
    optimizer.step()


def state_dict(optimizer):
    """Return the whole state dict; where there are ranks it needs all of them, and is the first one's."""
    return optimizer.gather_state_dict() if dist.is_initialized() else optimizer.state_dict()


def contents(weights, optimizer):
    """Return what ``after`` has of a run."""
    return {"weights": {name: p.detach() for name, p in weights.items()}, "state": state_dict(optimizer).get("state")}


def begun(name):
    method, dtype, settings = CASES[name]
    settings = {"lr": 0.02 if method == PRO else 0.005, "weight_decay": 0.1, "precondition_frequency": 2, **settings}
    settings.pop("process_group", None)
    if method == PRO:  # products in bfloat16, Newton-Schulz's default, differ between machines
        settings |= {"rank": 2, "ns_dtype": torch.float64 if dtype == torch.float64 else torch.float32}
    names = [n for n in SHAPES if n in FEW or name in EVERY]
    matrices, vectors = ([n for n in names if (n in VECTORS) == kind] for kind in (False, True))
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 0.01, "weight_decay": 0.1}]
    for key, usual in (("split", None), ("transposed", False)):
        groups[0][key] = [READ.get(n, {}).get(key, usual) for n in matrices]
    weights = {n: normal(*SHAPES[n], seed=10_000 + i).to(dtype) for i, n in enumerate(names)}
    return {"method": method, "settings": settings, "groups": groups, "weights": weights}


def frozen(name, **more):
    """Train a case and return it as a file has it."""
    case = begun(name)
    names = case["weights"].keys()
    weights, optimizer = build(case, **more)
    for call in range(CALLS):
        step(weights, optimizer, gradients(names, call))
    given = optimizer.defaults.keys() - {"algorithm", "split", "transposed"}
    case |= {
        "settings": {key: optimizer.defaults[key] for key in sorted(given - {*MACHINE})},
        "weights": {n: p.detach().clone() for n, p in weights.items()},
        "state_dict": mapped(state_dict(optimizer), torch.clone),
        "gradients": [gradients(names, call, "bounded" in name) for call in range(CALLS, CALLS + NEXT)],
    }
    for own in case["gradients"]:
        step(weights, optimizer, own)
    return {**case, "after": contents(weights, optimizer)}


def mapped(value, change):
    """Return nested containers with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(own, change) for key, own in value.items()}
    return type(value)(mapped(own, change) for own in value) if isinstance(value, (list, tuple)) else value


def packed(value):
    """Return nested containers with equal tensors as one, and those of a dtype as views of one storage.

    In a file every storage takes hundreds of bytes beside its contents, more than most of these tensors have.
    """
    found = {}

    def contents_of(t):
        return t.dtype, t.shape, t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    mapped(value, lambda t: found.setdefault(contents_of(t), t.detach()))
    for dtype in dict.fromkeys(dtype for dtype, *_ in found):
        own = {key: t for key, t in found.items() if key[0] == dtype}
        parts = torch.cat([t.reshape(-1) for t in own.values()]).split([t.numel() for t in own.values()])
        found |= {key: part.view(key[1]) for key, part in zip(own, parts, strict=True)}
    return mapped(value, lambda t: found[contents_of(t)])


def divided(rank, folder):
    """Freeze the divided case on one of two ranks."""
    if sys.platform == "linux":  # the machine's name need not be an address
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    case = frozen("divided", process_group=dist.group.WORLD)
    if rank == 0:
        torch.save(case, f"{folder}/case.pt")
    dist.destroy_process_group()


def main(out):
    torch.set_num_threads(1)
    cases = {name: frozen(name) for name in CASES if name != "divided"}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(divided, (folder,), nprocs=2)
        cases["divided"] = torch.load(f"{folder}/case.pt", weights_only=True)
    torch.save(packed({"version": prokl.__version__, "cases": cases}), out)
    print(f"{out}: {Path(out).stat().st_size} bytes of {prokl.__file__}, {len(cases)} cases: {', '.join(cases)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
