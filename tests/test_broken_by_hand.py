"""Random mixtures of matrix and AdamW groups in which one thing is changed by hand between steps.

The next step is that of a fresh optimizer which was given the same weights, settings and state, bit for bit, or it
raises an error that names what is wrong, and weights, state and gradients are what they were. A mixture is its seed.
"""

import copy
import math
import random
import re

import pytest
import torch
from torch import Tensor

from prokl import KLShampoo, ProKLShampoo
from tests.inputs import normal, same_bits

QUICK, ALL, CHUNK = 300, 3000, 50
MATRICES = [(4, 6), (4, 6), (6, 4), (2, 4, 6), (3, 2, 2, 2), (1, 5)]
VECTORS = [(7,), (5, 4), (3, 2, 2), (1,)]
OTHER_SHAPES = {
    "shorter": lambda t: t[: t.shape[0] // 2] if t.ndim else t[None],
    "one row": lambda t: t[:1] if t.ndim else t.expand(2),
    "one more dimension": lambda t: t[None],
    "flat": lambda t: t.reshape(-1),
    "turned": lambda t: t.mT if t.ndim > 1 else t[None],
    "empty": lambda t: t.reshape(-1)[:0],
}
OTHER_KINDS = {
    **{str(dtype): lambda t, dtype=dtype: t.to(dtype) for dtype in (torch.float64, torch.float16, torch.int64)},
    "complex": lambda t: t.to(torch.complex64),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
}
OTHER_PLACES = {
    "copy": lambda t: t.clone(),
    "negated twice": lambda t: torch._neg_view(-t) if t.is_floating_point() else t.clone(),
    "strides": lambda t: t.mT.contiguous().mT if t.ndim > 1 else torch.stack([t, t], -1)[..., 0],
    "detached": lambda t: t.detach(),
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=t.is_floating_point()),
    "expanded": lambda t: t[:1].expand(t.shape) if t.ndim else t.clone(),
}
OTHER_VALUES = {"half": lambda t: t / 2 if t.is_floating_point() else t + 1, "same": lambda t: t}
NO_TENSORS = (None, 3, "M", [1.0])
CLOCKS = (-1, 0, 1, 9, -2, 2.0, True, "3", None, torch.tensor(2.0), torch.tensor(3), torch.tensor(-1.0))
SETTINGS = {
    "lr": (0.0, 0.5, -1.0, None, torch.tensor(0.25), torch.tensor(0.5, device="meta"), torch.ones(2)),
    "weight_decay": (0.0, 0.5, -1.0, "0"),
    "eps": (0.0, 1e-3, math.nan),
    "maximize": (True, None, "no"),
    "betas": ((0.5, 0.5), (0.5,), None),
    "amsgrad": (True, False, "yes"),
    "foreach": (True, False, None, 1.5),
    "fused": (True, False, "yes"),
    "capturable": (True, False),
    "momentum": (0.5, 1.0),
    "beta2": (0.5, None),
    "rank": (1, "auto", 0),
    "precondition_frequency": (1, 2, 0),
    "state_dtype": (torch.float64, torch.bfloat16, None, "float32"),
    "bf16_weights": ("plain", "master", "stochastic", "no"),
    "init_eigenvalue": (0.1, "auto", -1),
    "backend": ("reference", "torch", "gpu"),
    "clip_threshold": (None, 3.0, 1.0),
    "transposed": (True, False, "no"),
    "split": (2, None, (1, 1), 3),
    "algorithm": ("adamw", "matrix", "sgd"),
}


class Mixture:
    """Weights and an optimizer that has stepped some times."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.seed, self.cls = seed, rng.choice([ProKLShampoo, KLShampoo])
        dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        shapes = [rng.choice(MATRICES) for _ in range(rng.randint(1, 3))]
        shapes += [rng.choice(VECTORS) for _ in range(rng.randint(1, 2))]
        drawn = [normal(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]
        self.weights = [torch.nn.Parameter(W) for W in drawn]
        named = [(f"w{i}", p) for i, p in enumerate(self.weights)]
        vectors = [entry for entry, shape in zip(named, shapes, strict=True) if shape in VECTORS]
        flags = rng.choice([{}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
        groups = [
            {"params": named[: -len(vectors)], "bf16_weights": rng.choice(["stochastic", "master"])},
            {"params": vectors, "algorithm": "adamw", "lr": 0.1, **flags},
        ]
        rng.shuffle(groups)
        self.optimizer = self.cls(groups, precondition_frequency=2)
        for call in range(rng.randint(0, 4)):
            self.give(call)
            self.optimizer.step()

    def give(self, call):
        rng = random.Random(f"{self.seed} {call}")
        for i, p in enumerate(self.weights):
            g = normal(*p.shape, seed=1000 * call + i, dtype=p.dtype)
            p.grad = None if rng.random() < 0.15 else g

    def breaks(self):
        """Change one thing; return what it is called."""
        rng, kind = (
            self.rng,
            self.rng.choice(["tensor"] * 4 + ["data", "clock", "entry", "setting", "setting"] + ["W", "g"]),
        )
        i = rng.randrange(len(self.weights))
        p = self.weights[i]
        if p.grad is None:  # without one AdamW's state is nobody's business
            p.grad = normal(*p.shape, seed=i, dtype=p.dtype)
        own = self.optimizer.state[p]
        keys = [key for key, value in own.items() if torch.is_tensor(value) and key != "step"]
        if kind in ("tensor", "data") and keys:
            key, changes = rng.choice(keys), rng.choice([OTHER_SHAPES, OTHER_KINDS, OTHER_PLACES, OTHER_VALUES])
            what = rng.choice([*changes])
            try:
                if kind == "data":
                    other = changes[what](own[key].data)
                    own[key].data = other.clone() if "M" in own else other  # of a matrix's views the address tells
                else:
                    own[key] = changes[what](own[key])
            except RuntimeError as error:  # torch has no such tensor
                return f"nothing: {error}"
            return f"{key} of w{i}, {kind}, {what}"
        if kind == "entry" and own:
            what = rng.choice(["gone", "empty", "another's", "a key gone", "a key of a wrapper", "no tensor"])
            key = rng.choice([*own])
            if what == "gone":
                del self.optimizer.state[p]
            elif what == "empty":
                own.clear()
            elif what == "another's":
                self.optimizer.state[p] = copy.deepcopy(self.optimizer.state[rng.choice(self.weights)])
            elif what == "a key gone":
                del own[key]
            elif what == "a key of a wrapper":
                own["slow"] = p.detach().clone()
            else:
                own[key] = rng.choice(NO_TENSORS)
            return f"entry of w{i}, {key}, {what}"
        if kind == "clock" and own:
            own["step"] = rng.choice(CLOCKS)
            return f"step of w{i} is {own['step']!r}"
        if kind == "W":
            changes = rng.choice([OTHER_SHAPES, OTHER_KINDS, OTHER_PLACES])
            what = rng.choice([*changes])
            try:
                p.data = changes[what](p.data)
            except RuntimeError as error:
                return f"nothing: {error}"
            return f"w{i} itself, {what}"
        if kind == "g" and p.grad is not None:
            changes = rng.choice([OTHER_SHAPES, OTHER_KINDS, OTHER_PLACES])
            what = rng.choice([*changes])
            try:
                p.grad_dtype = None
                p.grad = changes[what](p.grad).detach()
            except RuntimeError as error:
                return f"nothing: {error}"
            return f"gradient of w{i}, {what}"
        group = rng.choice(self.optimizer.param_groups)
        key = rng.choice([*SETTINGS])
        if key in group and rng.random() < 0.1:
            del group[key]
            return f"no {key} of an {group.get('algorithm')} group"
        if key in group:
            group[key] = rng.choice(SETTINGS[key])
        return f"{key}={group.get(key)!r} of an {group.get('algorithm')} group"

    def fresh(self):
        """Return an optimizer of the same settings on copies of weights and gradients, which was given this state."""
        twins = [torch.nn.Parameter(p.detach().clone()) for p in self.weights]
        place = {p: q for p, q in zip(self.weights, twins, strict=True)}
        for p, q in zip(self.weights, twins, strict=True):
            q.grad_dtype = None
            q.grad = None if p.grad is None else p.grad.resolve_neg().clone(memory_format=torch.contiguous_format)
            q.grad = None if q.grad is None else q.grad.to(q.dtype)
        groups = []
        for group in self.optimizer.param_groups:
            own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            entries = [(name, place[p]) for name, p in zip(group["param_names"], group["params"], strict=True)]
            groups.append({"params": entries, **copy.deepcopy(own)})
        optimizer = self.cls(groups)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return optimizer, twins


def is_plain(t):
    return isinstance(t, Tensor) and t.layout == torch.strided and t.device.type != "meta"


def kept(t):
    return t.detach().clone() if is_plain(t) else t


def same(a, b):
    if not is_plain(a):
        return a is b
    return isinstance(b, Tensor) and same_bits(a.resolve_neg(), b.resolve_neg())


def held(mixture):
    """Everything of a mixture, copied."""
    found = {}
    for i, p in enumerate(mixture.weights):
        found[i, "W"], found[i, "gradient"] = kept(p), kept(p.grad)
        found |= {(i, key): kept(value) for key, value in mixture.optimizer.state.get(p, {}).items()}
    return found


def differing(before, after):
    return {key for key in before.keys() | after.keys() if not same(before.get(key), after.get(key))}


def examine(seed):
    """Return what a mixture did that it must not; None where all is well."""
    mixture = Mixture(seed)
    mixture.give(10)
    what = mixture.breaks()
    before = held(mixture)
    try:
        twin, twins = mixture.fresh()
    except Exception as error:
        twin, refused = None, error
    try:
        mixture.optimizer.step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if type(error) not in (ValueError, RuntimeError) or not re.search(
            r"\bw\d|Invalid|[Gg]roup \d|A group with", said
        ):
            return f"{what}: an error without a name: {said}"
        if moved := differing(before, held(mixture)):
            return f"{what}: {sorted(map(str, moved))} changed before {said}"
        return None
    if twin is None and "with values that are" in str(refused):  # which a step does not wait for
        return None if all(p.isfinite().all() for p in mixture.weights) else f"{what}: not finite"
    if twin is None:
        return f"{what}: a step where a fresh optimizer says {type(refused).__name__}: {refused}"
    twin.step()
    for call in (11, 12):
        for p, q in zip(mixture.weights, twins, strict=True):
            for key in mixture.optimizer.state.get(p, {}).keys() | twin.state.get(q, {}).keys():
                a, b = (torch.as_tensor(own.get(key, -7)) for own in (mixture.optimizer.state[p], twin.state[q]))
                if not same(a, b):
                    return f"{what}: {key} differs from a fresh optimizer's before call {call}"
            if not same(p, q):
                return f"{what}: a weight {tuple(p.shape)} differs from a fresh optimizer's before call {call}"
        mixture.give(call)
        for p, q in zip(mixture.weights, twins, strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        mixture.optimizer.step()
        twin.step()
    return None


def chunks(first, last):
    return [pytest.param(range(i, i + CHUNK), id=f"{i}-{i + CHUNK - 1}") for i in range(first, last, CHUNK)]


def failures(seeds):
    return [(seed, found) for seed in seeds if (found := examine(seed))]


@pytest.mark.parametrize("seeds", chunks(0, QUICK))
def test_a_step_after_a_change_is_a_fresh_optimizers_or_moves_nothing(seeds):
    assert failures(seeds) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(QUICK, ALL))
def test_a_step_after_a_change_is_a_fresh_optimizers_or_moves_nothing_in_many_more_mixtures(seeds):
    assert failures(seeds) == []
