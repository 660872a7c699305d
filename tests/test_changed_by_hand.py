"""Groups, weights and state edited between steps: the optimizer goes on from what they are now, or says no.

First what is known, then random mixtures of matrix and AdamW groups in which one thing is changed: the next step is
that of a fresh optimizer which was given the same weights, settings and state, bit for bit, or it raises an error that
names what is wrong, and weights, state and gradients are what they were. A mixture is its seed.
"""

import copy
import math
import random
import re

import pytest
import torch

from prokl.engine.bucket import KEPT
from prokl.engine.engine import Engine
from tests.fuzz import chunks, failures
from tests.inputs import KL, PRO, both, normal
from tests.training import (
    OTHERS,
    contents,
    differences,
    fine_and_odd,
    fresh,
    give,
    kept,
    named,
    refused,
    silent,
    told_once,
    train,
    weights_of,
)

SHAPE = (6, 9)


def stepped(cls, calls, **settings):
    return train(cls(named(SHAPE, SHAPE), **settings), range(calls))


@both
def test_weights_of_a_new_dtype_step_from_the_same_state(cls):
    """State stays float32 beside bfloat16 weights: it is what it would have been beside the weights as they were."""
    optimizer = stepped(cls, 3)
    for p in weights_of(optimizer):
        p.grad, p.data = None, p.data.double()
    train(optimizer, range(3, 6))
    p = weights_of(optimizer)[0]
    assert optimizer.state[p]["M_Q"].dtype == torch.float64 and not torch.equal(p, p.float().double())
    exact, converted = stepped(cls, 3), stepped(cls, 3)
    for p in weights_of(converted):
        p.grad, p.data = None, p.data.bfloat16()
    for call in range(3, 14):
        give(weights_of(converted), call)
        for p, q in zip(weights_of(exact), weights_of(converted), strict=True):
            p.grad = q.grad.float()
        exact.step()
        converted.step()
    assert {key for _, key in differences(exact, converted)} == {"W"}


@both
@pytest.mark.parametrize("only", [None, "M_Q", "skipped"])
@pytest.mark.parametrize("through_data", [False, True])
def test_a_step_uses_state_that_was_replaced_or_moved(cls, only, through_data):
    """Trainers move state off a device, and back, while something else needs its memory."""
    plain, moved = stepped(cls, 6), stepped(cls, 6)
    for state in moved.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and only in (None, key):
                former = value.detach()
                if through_data:
                    value.data = value.data.clone()
                    former.mul_(3).add_(1)  # somebody else's by now
                else:
                    state[key] = value.clone()
    assert differences(train(plain, range(6, 12)), train(moved, range(6, 12))) == set()


@both
def test_what_a_wrapper_keeps_beside_the_state_is_kept_and_saved(cls):
    """Lookahead and averaging wrappers put tensors of their own into ``optimizer.state[p]``, whether it has begun."""
    groups = [{"params": named(SHAPE, SHAPE)}, {"params": named((9,), first=2), "algorithm": "adamw", "lr": 0.1}]
    optimizer = cls(groups)
    for p in weights_of(optimizer):  # before there is state
        optimizer.state[p]["momentum_buffer"] = 7
    train(optimizer, [0], missing={(0, 0), (0, 2)})
    for p in weights_of(optimizer):  # some still wait for a gradient
        optimizer.state[p]["slow"] = kept(p)
    slow = [optimizer.state[p]["slow"] for p in weights_of(optimizer)]
    train(optimizer, range(1, 3))
    twin = fresh(optimizer)
    for p, q, own in zip(weights_of(optimizer), weights_of(twin), slow, strict=True):
        assert optimizer.state[p]["slow"] is own and optimizer.state[p]["momentum_buffer"] == 7
        assert torch.equal(twin.state[q]["slow"], own)
    assert differences(train(optimizer, range(3, 6)), train(twin, range(3, 6))) == set()


def test_a_warning_made_an_error_comes_after_a_whole_step():
    optimizer = PRO(named(SHAPE, SHAPE))
    dead, alive = weights_of(optimizer)
    with silent():
        for call in range(100):
            dead.grad, alive.grad, before = torch.zeros(SHAPE), normal(*SHAPE, seed=call), kept(alive)
            if call < 99:
                optimizer.step()
        with pytest.raises(UserWarning, match="has not moved in 100 steps"):
            optimizer.step()
    assert not torch.equal(alive, before) and optimizer.state[alive]["step"] == 99


@pytest.mark.slow
def test_clocks_that_drift_apart_keep_bounded_device_memory():
    """Every set of refreshing or of moving matrices has an index and a mask of its own there."""
    optimizer = PRO(named(*[(3, 4)] * 12), rank=2, precondition_frequency=2)
    rng = random.Random(0)
    train(optimizer, range(200), missing={(call, i) for call in range(200) for i in range(12) if rng.random() < 0.5})
    (bucket,) = optimizer.engine.buckets
    assert len(bucket._kept_rows) == KEPT


def mixed():
    """An optimizer of begun, waiting and AdamW weights that has stepped until it has nothing more to make."""
    a, b, waiting, bias = named(SHAPE, SHAPE, SHAPE, (9,))
    groups = [
        {"params": [a, b], "transposed": [False, True], "split": [None, 3], "ns_coefficients": [3.4, -4.7, 2.0]},
        {"params": [waiting]},
        {"params": [bias], "algorithm": "adamw", "lr": 0.1, "betas": [0.9, 0.95]},
    ]
    return train(PRO([{**group, "own_key": 0} for group in groups], rank=3), range(3), missing=ABSENT)


ABSENT = {(call, 2) for call in range(9)}


@both
@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("index, other, was", [(0, "adamw", "matrix"), (1, "matrix", "adamw")])
def test_another_algorithm_of_a_group_is_refused(cls, calls, index, other, was):
    optimizer = fine_and_odd(cls, calls=calls)
    optimizer.param_groups[index]["algorithm"] = other
    with refused(optimizer, rf"^Group {index} has no \w+, which algorithm='{other}' needs, .*: set it back. If"):
        train(optimizer, [calls])
    optimizer.param_groups[index]["algorithm"] = was
    train(optimizer, [calls])


@both
def test_a_setting_that_cannot_be_compared_is_named(cls):
    optimizer = stepped(cls, 3)
    optimizer.param_groups[0]["momentum"] = torch.tensor([0.9, 0.8])  # equal to nothing: torch raises
    with refused(optimizer, r"^Invalid momentum=tensor\(\[0.9000, 0.8000\]\): must be in \[0, 1\)"):
        train(optimizer, [3])
    optimizer.param_groups[0]["momentum"] = 0.9
    train(optimizer, [3])


@both
@pytest.mark.parametrize("calls", [0, 3])
def test_a_model_that_is_made_float16_is_told_before_it_becomes_nan(cls, calls):
    optimizer = fine_and_odd(cls, calls=calls)
    for p in weights_of(optimizer):
        p.grad, p.data = None, p.data.half()
    if calls:
        with refused(optimizer, "bias has exp_avg of torch.float32 .* the weight is torch.float16"):
            train(optimizer, [calls])
        optimizer.load_state_dict(optimizer.state_dict())
    with silent():
        give(weights_of(optimizer), calls)
        with told_once(r"^4 of 4 weights that train are float16, fine among them", __file__):
            optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.5
        train(optimizer, [calls + 1])


def first_gradient(optimizer):
    weights_of(optimizer)[2].grad = normal(*SHAPE)


def through_data(tensor):
    tensor.data = tensor.data.clone()


EVENTS = {
    "a new group": lambda o: o.add_param_group({"params": named(SHAPE, first=9)}),
    "a load": lambda o: o.load_state_dict(o.state_dict()),
    "an offload": lambda o: o.offload(),
    "a first gradient": first_gradient,
    "a weight's memory": lambda o: through_data(weights_of(o)[0]),
    "AdamW's weight's memory": lambda o: through_data(weights_of(o)[3]),
    "frozen": lambda o: weights_of(o)[2].requires_grad_(False),
    "state replaced": lambda o: o.state[weights_of(o)[0]].update(U=kept(o.state[weights_of(o)[0]]["U"])),
    "state moved": lambda o: through_data(o.state[weights_of(o)[1]]["Q_L.1"]),
    "AdamW's state moved": lambda o: through_data(o.state[weights_of(o)[3]]["exp_avg"]),
    "a clock": lambda o: o.state[weights_of(o)[0]].update(step=700),
    "a setting": lambda o: o.param_groups[0].update(momentum=0.5),
    "a new key": lambda o: o.param_groups[0].update(new_key=1),
    "AdamW's setting": lambda o: o.param_groups[2].update(betas=(0.5, 0.5)),
}
QUIET = {
    "rates": lambda o: [group.update(lr=0.5, weight_decay=0.5) for group in o.param_groups],
    "a key of one's own": lambda o: [group.update(own_key=5) for group in o.param_groups],
    "an equal list": lambda o: o.param_groups[0].update(split=[None, 3]),
    "a wrapper's tensor": lambda o: o.state[weights_of(o)[0]].update(slow=torch.ones(1)),
}
BUILDS = {name: (event, 1) for name, event in EVENTS.items()} | {name: (event, 0) for name, event in QUIET.items()}


@pytest.mark.parametrize("event, count", BUILDS.values(), ids=BUILDS)
def test_the_layout_is_built_once_after_a_stated_event_alone(event, count, monkeypatch):
    optimizer = mixed()
    builds, build = [], Engine.build
    monkeypatch.setattr(Engine, "build", lambda engine: (builds.append(1), build(engine)))
    event(optimizer)
    for call in range(3):
        for p in weights_of(optimizer):
            p.grad = p.grad if p.grad is None else torch.ones_like(p)
        for group in optimizer.param_groups:
            group.update(lr=0.01 / (1 + call), weight_decay=0.1 * call)  # as schedulers do
        optimizer.step()
    assert len(builds) == count


@both
def test_every_setting_is_among_those_that_are_changed(cls):
    assert cls(named(SHAPE)).defaults.keys() - OTHERS.keys() == {"algorithm", "transposed", "split"}


# Random mixtures

ALL = 200
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
NO_TENSORS = (None, 3, "M_Q", [1.0])
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
ENTRIES = {  # of the state of a weight p, with a key of it and another weight's
    "gone": lambda state, p, key, other, rng: state.pop(p),
    "empty": lambda state, p, key, other, rng: state[p].clear(),
    "another's": lambda state, p, key, other, rng: state.update({p: copy.deepcopy(state[other])}),
    "a key gone": lambda state, p, key, other, rng: state[p].pop(key),
    "a key of a wrapper": lambda state, p, key, other, rng: state[p].update(slow=kept(p)),
    "no tensor": lambda state, p, key, other, rng: state[p].update({key: rng.choice(NO_TENSORS)}),
    "a clock": lambda state, p, key, other, rng: state[p].update(step=rng.choice(CLOCKS)),
}


class Mixture:
    """An optimizer that has stepped some times."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.seed = seed
        dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        matrices = [rng.choice(MATRICES) for _ in range(rng.randint(1, 3))]
        vectors = [rng.choice(VECTORS) for _ in range(rng.randint(1, 2))]
        params = named(*matrices, *vectors, dtype=dtype, first=10 * seed)
        flags = rng.choice([{}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
        groups = [
            {"params": params[: len(matrices)], "bf16_weights": rng.choice(["stochastic", "master"])},
            {"params": params[len(matrices) :], "algorithm": "adamw", "lr": 0.1, **flags},
        ]
        rng.shuffle(groups)
        self.optimizer = rng.choice([PRO, KL])(groups, precondition_frequency=2)
        self.weights = weights_of(self.optimizer)
        train(self.optimizer, range(rng.randint(0, 4)), missing=self.missing())

    def missing(self):
        rng = random.Random(f"{self.seed}")
        return {(call, i) for call in range(20) for i in range(len(self.weights)) if rng.random() < 0.15}

    def change(self):
        """Change one thing; return what it is called."""
        rng, state = self.rng, self.optimizer.state
        kind = rng.choice(["tensor"] * 4 + ["data", "entry", "entry", "setting", "setting", "W", "g"])
        i = rng.randrange(len(self.weights))
        p = self.weights[i]
        if p.grad is None:  # without one AdamW's state is nobody's business
            p.grad = normal(*p.shape, seed=i, dtype=p.dtype)
        own = state[p]
        keys = [key for key, value in own.items() if torch.is_tensor(value) and key != "step"]
        if kind in ("W", "g") or (kind in ("tensor", "data") and keys):
            key = rng.choice(keys) if kind in ("tensor", "data") else kind
            others = [OTHER_SHAPES, OTHER_KINDS, OTHER_PLACES] + [OTHER_VALUES] * (key != kind)
            changes = rng.choice(others)
            what = rng.choice([*changes])
            try:
                self.put(kind, p, own, key, changes[what])
            except RuntimeError as error:  # torch has no such tensor
                return f"nothing: {error}"
            return f"{key} of {i}, {kind}, {what}"
        if kind == "entry" and own:
            what, key = rng.choice([*ENTRIES]), rng.choice([*own])
            ENTRIES[what](state, p, key, rng.choice(self.weights), rng)
            return f"entry of {i}, {key}, {what}: {state.get(p, {}).get('step')!r}"
        group, key = rng.choice(self.optimizer.param_groups), rng.choice([*SETTINGS])
        if key in group and rng.random() < 0.1:
            del group[key]
        elif key in group:
            group[key] = rng.choice(SETTINGS[key])
        return f"{key}={group.get(key, 'gone')!r} of an {group.get('algorithm')} group"

    @staticmethod
    def put(kind, p, own, key, change):
        if kind == "tensor":
            own[key] = change(own[key])
        elif kind == "data":
            other = change(own[key].data)
            own[key].data = other.clone()  # of what is moved the address tells
        elif kind == "W":
            p.data = change(p.data)
        else:
            p.grad_dtype = None
            p.grad = change(p.grad).detach()

    def held(self):
        """Everything, copied, gradients too."""
        found = contents(self.optimizer, self.weights)
        return [{**own, "gradient": kept(p.grad)} for own, p in zip(found, self.weights, strict=True)]

    def give(self, optimizer, call):
        give(weights_of(optimizer), call, self.missing())


def examine(seed):
    """Return what a mixture did that it must not, in a list; none where all is well."""
    mixture = Mixture(seed)
    optimizer, weights = mixture.optimizer, mixture.weights
    mixture.give(optimizer, 10)
    what, before = mixture.change(), mixture.held()
    try:
        twin = fresh(optimizer)
        for p, q in zip(weights, weights_of(twin), strict=True):
            q.grad = None if p.grad is None else p.grad.resolve_neg().contiguous().clone().to(q.dtype)
    except Exception as error:
        twin, refusal = None, f"{type(error).__name__}: {error}"
    try:
        optimizer.step()
    except Exception as error:
        message, names = f"{type(error).__name__}: {error}", r"\bw\d|Invalid|[Gg]roup \d|A group with"
        if type(error) not in (ValueError, RuntimeError) or not re.search(names, message):
            return [f"{what}: an error without a name: {message}"]
        moved = differences(before, mixture.held())
        return [f"{what}: {sorted(map(str, moved))} changed before {message}"] if moved else []
    if twin is None and "with values that are" in refusal:  # which a step does not wait for
        return [] if all(p.isfinite().all() for p in weights) else [f"{what}: not finite"]
    if twin is None:
        return [f"{what}: a step where a fresh optimizer says {refusal}"]
    twin.step()
    for call in (11, 12):
        if parted := differences(optimizer, twin):
            return [f"{what}: {sorted(parted)} differ from a fresh optimizer's before call {call}"]
        for each in (optimizer, twin):
            mixture.give(each, call)
            each.step()
    return []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(ALL, 50))
def test_a_step_after_a_change_is_a_fresh_optimizers_or_none(seeds):
    assert failures(examine, seeds) == []
