"""Gradients that are not finite, zero, tiny or degenerate: the weight is left alone, or steps sanely.

"Untouched" means bit for bit, which tells -0.0 from 0.0.
"""

import warnings

import pytest
import torch

from prokl import KLShampoo
from prokl.engine.bucket import NEVER_MOVED_AFTER
from tests.inputs import (
    BACKENDS,
    INF,
    NAN,
    PRO,
    TAU,
    VARIANTS,
    both,
    forbid_host_reads,
    normal,
    same_bits,
    step,
    weight,
)
from tests.training import contents, differences, train, weights_of

POISONS = {"nan": NAN, "inf": INF, "-inf": -INF, "square overflows": 1e25, "sum of squares overflows": 1e19}
# Calls of the optimizer: the initialising one is number 0 and has step 0, so that call TAU is a refresh.
WHEN = {"first": 0, "second": 1, "at a refresh": TAU}
SHAPE = (6, 10)
BAD = [*POISONS, "stack"]
GOOD = ["good 0", "good 1"]
NAMES = [GOOD[0], *BAD, GOOD[1]]


def poisoned(g, value):
    g = g.clone()
    g.view(-1)[slice(None) if value == 1e19 else 7] = value  # 60 * 1e38 > 3.4e38
    return g


def poison_run(method, backend, dtype, bad_call, calls, names=NAMES):
    """Two good weights around bad ones, in one bucket: one a poison, and a stack with one in a matrix, at one call.

    Yields the optimizer before every call from the poisoned one on, and once at the end.
    """
    cls, kwargs = method
    shapes = {name: (3, *SHAPE) if name == "stack" else SHAPE for name in names}
    weights = {name: weight(*shape, seed=NAMES.index(name), dtype=dtype) for name, shape in shapes.items()}
    with torch.no_grad():
        for w in weights.values():
            w.view(-1)[0] = -0.0
    adamw = {"params": [("bias", weight(4, dtype=dtype))], "algorithm": "adamw", "lr": 1e-3}
    groups = [{"params": list(weights.items())}, adamw]
    optimizer = cls(groups, backend=backend, precondition_frequency=TAU, **kwargs)
    for call in range(calls):
        given = {n: normal(*shapes[n], seed=100 * call + NAMES.index(n), dtype=dtype) for n in names}
        if call == bad_call and names is NAMES:
            given |= {name: poisoned(given[name], value) for name, value in POISONS.items()}
            given["stack"][1] = poisoned(given["stack"][1], NAN)
        if call >= bad_call:
            yield optimizer
        step(optimizer, list(weights.values()), list(given.values()))
    yield optimizer


# Skipping does not depend on the dtypes: each step has one of them.
@pytest.mark.parametrize(
    "dtype, state_dtype, when",
    [
        (torch.float32, None, "first"),
        (torch.float32, None, "at a refresh"),
        (torch.bfloat16, None, "second"),
        (torch.bfloat16, torch.bfloat16, "at a refresh"),
        (torch.float64, None, "second"),
    ],
    ids=str,
)
def test_a_non_finite_gradient_leaves_its_neighbours_alone(method, path, dtype, state_dtype, when):
    """A whole stack is checked; and the reference does not write the weight."""
    cls, kwargs = method
    kwargs = {**kwargs, "state_dtype": state_dtype}
    if cls is PRO:  # Newton-Schulz in bfloat16 would round differently in a batch of another size
        kwargs["ns_dtype"] = torch.float32
    run = (cls, kwargs), path, dtype, WHEN[when], WHEN[when] + 3
    states = poison_run(*run)
    optimizer, bad = next(states), [NAMES.index(name) for name in BAD]
    weights = weights_of(optimizer)
    before, versions = contents(optimizer), [p._version for p in weights]
    next(states)
    after = contents(optimizer)
    for old, new, version, p in ((before[i], after[i], versions[i], weights[i]) for i in bad):
        clock = torch.as_tensor(new["step"])
        assert int(new["skipped"]) == 1
        assert path not in ("reference", "blind") or p._version == version
        if when == "first":
            assert same_bits(old["W"], new["W"]) and (clock == -2).all()
            assert not any(v.any() for k, v in new.items() if k not in ("W", "step", "skipped"))
        else:
            assert differences([old], [new]) == {(0, "step"), (0, "skipped")}
            assert torch.equal(clock, torch.as_tensor(old["step"]) + 1)
    assert optimizer.skipped() == {name: int(name in BAD) for name in NAMES}
    for _ in states:
        pass
    found = contents(optimizer)
    for i in bad:  # and training goes on
        assert not same_bits(found[i]["W"], before[i]["W"])
        assert all(v.isfinite().all() for k, v in found[i].items() if k != "step")
    *_, alone = poison_run(*run, names=GOOD)
    expected, found = contents(alone)[:2], [found[0], found[-2]]
    if path == "reference":
        assert differences(expected, found) == set()
    # A product may round differently in a batch of another size, and so may what a batch decides as one.
    for i, key in differences(expected, found) if state_dtype is None else ():
        one, other = expected[i][key], found[i][key]
        if one.dtype == torch.bfloat16:
            assert int((one != other).sum()) <= 1, key
        else:
            assert (one - other).norm() < 1e-5 * one.norm(), key


def test_matrices_of_a_stack_go_where_they_go_alone(method, path):
    """However their gradients differ in size; one of zeros delays only its own matrix."""
    cls, kwargs = method
    stack = weight(3, 4, 6)
    singles = [torch.nn.Parameter(m.clone()) for m in stack.detach()]
    together, apart = (cls(p, backend=path, precondition_frequency=TAU, **kwargs) for p in ([stack], singles))
    for call in range(7):
        g = normal(3, 4, 6, seed=call) * torch.tensor([1.0, 0.1, 10.0]).view(3, 1, 1)
        if call < 2:
            g[1] = 0.0
        step(together, [stack], [g])
        step(apart, singles, g)
        state = together.state[stack]
        assert state["step"].tolist() == [call, (-2, -3, 0)[call] if call < 3 else call - 2, call]
    for i, p in enumerate(singles):
        assert same_bits(stack[i], p)
        own = apart.state[p]
        assert all(same_bits(state[k][i], own[k]) for k in own if k not in ("step", "skipped"))


STEPPED_IN = step.__code__.co_filename
"""The file that calls the optimizer's step: warnings point at the caller's line."""


def never_moved_warnings(calls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls()
    return [w for w in caught if "not moved" in str(w.message)]


def test_a_direction_beyond_the_range_makes_no_nan():
    """Its norm is infinite in float32, after gradients 1e37 times larger that the spectra have forgotten at once."""
    W = torch.nn.Parameter(torch.zeros(96, 128))
    optimizer = KLShampoo([W], lr=0.01, momentum=0.9, beta2=0.0)
    g = torch.Generator().manual_seed(0)
    for i in range(10):
        W.grad = torch.randn(96, 128, generator=g) * (1e16 if i < 5 else 1e-21)
        optimizer.step()
        assert W.isfinite().all(), i


@both
def test_a_weight_that_never_moves_is_warned_about_once_by_name(cls):
    """Whatever comes into its batch before and after, and not one that has moved."""
    late = {"late 0": NEVER_MOVED_AFTER // 2, "late 1": NEVER_MOVED_AFTER + 5, "late 2": NEVER_MOVED_AFTER + 10}
    weights = {name: weight(4, 6, seed=i) for i, name in enumerate(["zeros", "nan", "once", "just", "absent", *late])}
    optimizer = cls([*weights.items()])

    def stepped(t):
        gradients = {"zeros": torch.zeros(4, 6), "nan": torch.full((4, 6), NAN), "absent": None}
        gradients["once"] = normal(4, 6, seed=t) if t < 5 else gradients["nan"]
        gradients["just"] = normal(4, 6, seed=t) if t >= NEVER_MOVED_AFTER - 12 else gradients["zeros"]
        gradients |= {name: normal(4, 6, seed=t) if t >= start else None for name, start in late.items()}
        step(optimizer, [*weights.values()], [gradients[name] for name in weights])

    warned = [(t, w) for t in range(2 * NEVER_MOVED_AFTER + 20) for w in never_moved_warnings(lambda: stepped(t))]  # noqa: B023
    assert [(t, str(w.message).split()[0]) for t, w in warned] == [
        (NEVER_MOVED_AFTER - 1, "zeros"),
        (NEVER_MOVED_AFTER - 1, "nan"),
    ]
    assert all(f" {NEVER_MOVED_AFTER} steps" in str(w.message) and w.filename == STEPPED_IN for _, w in warned)
    assert all(same_bits(weights[name], weight(4, 6, seed=i)) for i, name in enumerate(["zeros", "nan"]))


@both
def test_a_split_weight_that_never_moves_is_warned_about_once(cls):
    """Also where pieces have other shapes, and so other batches; one that does not move beside others counts."""
    groups = [{"params": [("whole", weight(20, 6))], "split": (4, 4, 12)}]
    groups.append({"params": [("in part", weight(8, 6))], "split": 2})
    optimizer = cls(groups)
    whole, part = (group["params"][0] for group in optimizer.param_groups)

    def stepped():
        for t in range(NEVER_MOVED_AFTER + 5):
            step(optimizer, [whole, part], [torch.zeros(20, 6), torch.cat([normal(4, 6, seed=t), torch.zeros(4, 6)])])

    told = [str(w.message).split(" has not moved")[0] for w in never_moved_warnings(stepped)]
    assert told == ["whole.0 at least", "in part.1 at least"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3], ids=["part of U", "all of U"])
def test_a_gradient_in_the_subspace_steps_on_no_rounding(path, width, dtype):
    directions, _ = torch.linalg.qr(normal(10, width, dtype=dtype))
    final = {}
    for variant in VARIANTS:
        w = weight(6, 10, dtype=dtype)
        optimizer = PRO([w], rank=3, variant=variant, backend=path)
        for t in range(12):
            step(optimizer, [w], [normal(6, width, seed=t, dtype=dtype) @ directions.mT])
        final[variant] = w.detach()
    assert same_bits(final["complement-only"], weight(6, 10, dtype=dtype))
    assert same_bits(final["pro-klshampoo"], final["subspace-only"])
    assert not same_bits(final["pro-klshampoo"], weight(6, 10, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-25, 1e-60, 1e-140])
def test_float64_gradients_of_any_size_train_alike(method, path, scale):
    cls, kwargs = method
    final = []
    for size in (1.0, scale):
        w = weight(4, 6, dtype=torch.float64)
        train(cls([w], backend=path, **kwargs), range(8), size=size)
        final.append(w.detach())
    moved = (final[0] - weight(4, 6, dtype=torch.float64).detach()).norm()
    assert moved > 0
    assert (final[0] - final[1]).norm() < 1e-9 * moved


@pytest.mark.parametrize("scale", [1e-20, 1e-35])
@pytest.mark.parametrize("start", ["auto", 0.1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_gradients_with_tiny_squares_train_or_are_told(method, backend, scale, start):
    cls, kwargs = method
    w = weight(4, 6)
    optimizer = train(cls([w], backend=backend, init_eigenvalue=start, **kwargs), range(12), size=scale)
    assert all(v.isfinite().all() for k, v in contents(optimizer)[0].items() if k != "step")
    if optimizer.state[w]["step"] < 0:
        rest = range(12, NEVER_MOVED_AFTER)
        assert len(never_moved_warnings(lambda: train(optimizer, rest, size=scale))) == 1
    elif start == "auto":
        assert (w - weight(4, 6)).norm() > 1e-4


@pytest.mark.parametrize("ns_steps, shape", [(2, (2, 16)), (5, (6, 10))])
def test_a_complement_with_tiny_squares_makes_no_step(path, ns_steps, shape):
    """Its norm, of which rounding leaves a part, would make a start outside Newton-Schulz's region of convergence."""
    w, size = weight(*shape), {}
    optimizer = PRO(
        [w], rank=1, lr=1.0, variant="complement-only", ns_steps=ns_steps, init_eigenvalue=3e3, backend=path
    )
    for t in range(8):
        before = w.detach().clone()
        train(optimizer, [t], size=3e-22)
        size[t] = float((w - before).detach().norm())
    assert max(size.values()) <= 1.3 * shape[0] ** 0.5, size


def test_a_bucket_that_cannot_be_made_is_made_at_the_next_step(monkeypatch):
    p = weight(4, 6)
    optimizer = PRO([p], rank=2)

    def no_memory(*args):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("prokl.engine.engine.Bucket", no_memory)
        with pytest.raises(MemoryError):
            train(optimizer, [0])
    before = p.detach().clone()
    train(optimizer, range(2))
    assert not torch.equal(p, before)


def test_the_reference_skips_bad_gradients_without_device_reads(monkeypatch):
    forbid_host_reads(monkeypatch)
    p = weight(4, 6)
    optimizer = train(PRO([p], rank=2, backend="reference"), [0])
    before = contents(optimizer)
    step(optimizer, [p], [torch.full((4, 6), NAN)])
    assert differences(before, optimizer) == {(0, "step"), (0, "skipped")}


@both
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("call", [0, 4])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 2e19])
def test_adamw_skips_a_gradient_that_is_not_finite(cls, flags, value, call):
    """Weights beside it step on a CPU, and gradients are the caller's as they were.

    Of one that is too large to square AdamW makes a second moment of infinity, by which every later update is zero.
    """
    weights = [("matrix", weight(4, 6)), ("bad", weight(5, seed=1)), ("good", weight(5, seed=2))]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "algorithm": "adamw", "lr": 0.1, **flags}]
    groups[1]["weight_decay"] = 0.1
    optimizer = train(cls(groups), range(call))
    before, gradients = contents(optimizer), [normal(*p.shape, seed=i) for i, (_, p) in enumerate(weights)]
    gradients[1][2] = value
    step(optimizer, [p for _, p in weights], gradients)
    found, kept = contents(optimizer), {key for key in before[1] if key != "step"}
    assert all(same_bits(before[1][key], found[1][key]) for key in kept)
    assert float(found[1].get("step", 0)) == call and float(found[2]["step"]) == call + 1
    assert not same_bits(before[2]["W"], found[2]["W"]) and same_bits(weights[1][1].grad, gradients[1])
    assert optimizer.skipped() == {"matrix": 0, "bad": 1}
    train(optimizer, range(call + 1, call + 3))
    assert all(p.isfinite().all() for _, p in weights) and not same_bits(before[1]["W"], weights[1][1])
