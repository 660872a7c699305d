"""Optimizers that are trained on gradients which follow from the call, what differs between two, and refusals.

Two runs that do the same arithmetic on the same shapes are compared bit for bit.
"""

import copy
import io
import pickle
import warnings
from contextlib import contextmanager

import pytest
import torch

from tests.inputs import normal, same_bits, weight
from tests.problems import same_clocks

OTHERS = {
    "lr": 0.3,
    "weight_decay": 0.5,
    "momentum": 0.3,
    "beta2": 0.5,
    "eps": 0.5,
    "precondition_frequency": 2,
    "maximize": True,
    "alpha_kl": 0.7,
    "ns_steps": 2,
    "ns_coefficients": (2.0, -1.5, 0.5),
    "ns_dtype": torch.float64,
    "clip_threshold": 2.0,
    "cautious_weight_decay": True,
    "adjust_lr_fn": "match_rms_adamw",
    "rank": 2,
    "variant": "smok-hop",
    "state_dtype": torch.bfloat16,
    "init_eigenvalue": 0.1,
    "bf16_weights": "plain",
    "backend": "reference",
    "precision": "balanced",
    "cuda_graphs": False,
}
"""A value of every setting that is not its default."""


def named(*shapes, dtype=torch.float32, first=0):
    """Return weights of these shapes with names, ("w0", ...) and on."""
    return [(f"w{i}", weight(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes, first)]


def weights_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients(weights, call):
    drawn = [normal(*(p.shape or [1]), seed=100 * call + i, dtype=p.dtype) for i, p in enumerate(weights)]
    return [G.reshape(p.shape) for G, p in zip(drawn, weights, strict=True)]


def give(weights, call, missing=(), size=1.0):
    """Leave the gradients of a call; ``missing`` has (call, place) of weights without one."""
    for i, (p, G) in enumerate(zip(weights, gradients(weights, call), strict=True)):
        p.grad = None if (call, i) in missing else size * G


def train(optimizer, calls, weights=None, **given):
    """Step over the gradients of the calls; return the optimizer."""
    weights = weights_of(optimizer) if weights is None else weights
    for call in calls:
        give(weights, call, **given)
        optimizer.step()
    return optimizer


def is_plain(value):
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type != "meta"


def kept(value):
    """Return a copy of what has values, anything else as it is."""
    return value.detach().clone() if is_plain(value) else value


def same(a, b):
    """Return True if two values, or nests of dicts and lists, have the same bits; what has none must be the same."""
    if is_plain(a):
        return is_plain(b) and same_bits(a.resolve_neg(), b.resolve_neg())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a is b or (not isinstance(a, torch.Tensor) and type(a) is type(b) and a == b)


def contents(optimizer, weights=None):
    """Return weight and state of every weight, copied; what is no state is one thing."""
    weights = weights_of(optimizer) if weights is None else weights
    states = [(p, optimizer.state.get(p, {})) for p in weights]
    found = [{"W": p, **(own if isinstance(own, dict) else {"state": own})} for p, own in states]
    return [{key: kept(value) for key, value in own.items()} for own in found]


def differences(one, other):
    """Return (place, key) of all that differs between two optimizers, or what :func:`contents` said of them."""
    one, other = (contents(o) if isinstance(o, torch.optim.Optimizer) else o for o in (one, other))
    pairs = enumerate(zip(one, other, strict=True))
    return {(i, k) for i, (a, b) in pairs for k in a.keys() | b.keys() if not same(a.get(k), b.get(k))}


def moved(before, optimizer):
    """Return the places of the weights of which something has changed."""
    return {i for i, _ in differences(before, optimizer)}


def assert_close(one, other, start, tolerance=1e-9):
    """Compare weights by the distance moved, state by itself; in float64 unless a tolerance is given."""
    for a, b, W in zip(one, other, start, strict=True):
        assert same_clocks(a, b) and a.keys() == b.keys()
        assert (a["W"] - b["W"]).norm() <= tolerance * (a["W"] - W).norm()
        for key in a.keys() - {"W", "step", "skipped"}:
            assert (a[key] - b[key]).norm() <= tolerance * a[key].norm(), key


@contextmanager
def refused(optimizer, says, error=ValueError, weights=None):
    """Hold what is done to an error in these words that leaves weights, state and groups as they were."""
    before, groups = contents(optimizer, weights), repr(optimizer)
    with pytest.raises(error, match=says):
        yield
    assert differences(before, contents(optimizer, weights)) == set() and repr(optimizer) == groups


@contextmanager
def silent():
    """Make an error of any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def told_once(says, file, category=UserWarning):
    """Hold what is done to one warning in these words, at a line of the file."""
    with pytest.warns(category, match=says) as caught:
        yield
    assert len(caught) == 1 and caught[0].filename == file


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}


def fresh(optimizer, **changes):
    """Return a new optimizer on copies of the weights, with the other's groups but for some settings, and its state."""
    twins = {p: torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in weights_of(optimizer)}
    groups, state = [], copy.deepcopy(optimizer.state_dict())
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        own = copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "param_names")})
        params, names = [twins[p] for p in group["params"]], group.get("param_names")
        groups.append({**own, **changes, "params": list(zip(names, params, strict=True)) if names else params})
        saved.update(changes)
    made = type(optimizer)(groups)
    made.load_state_dict(state)
    return made


def reloaded(value):
    """Return a value through a file that holds nothing but tensors and Python's own types."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def fine_and_odd(cls, odd=(6, 10), calls=3, adamw=(), **settings):
    """Train two matrices, "fine" and "odd", and "bias" and "table" of AdamW; each could be the one that moves first."""
    matrices = [("fine", weight(4, 6)), ("odd", weight(*odd, seed=1))]
    vectors = [("bias", weight(54, seed=2)), ("table", weight(5, 4, seed=3))]
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 0.1, **dict(adamw)}]
    return train(cls(groups, **settings), range(calls))
