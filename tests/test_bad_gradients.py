"""Gradients that are not finite, zero, tiny or degenerate: the weight is left alone, or steps sanely.

"Untouched" means bit for bit, which tells -0.0 from 0.0.
"""

import warnings

import pytest
import torch

from prokl.engine.bucket import NEVER_MOVED_AFTER
from tests.inputs import (
    BACKENDS,
    INF,
    KL,
    NAN,
    PRO,
    TAU,
    VARIANTS,
    changed,
    forbid_host_reads,
    frozen,
    normal,
    same_bits,
    step,
    weight,
)
from tests.problems import made

POISONS = {"nan": NAN, "inf": INF, "-inf": -INF, "square overflows": 1e25, "sum of squares overflows": 1e19}
# Calls of the optimizer: the initialising one is number 0 and has step 0, so that call TAU is a refresh.
WHEN = {"first": 0, "second": 1, "at a refresh": TAU}
SHAPE, LAST = (6, 10), len(POISONS) + 1


def poisoned(g, value):
    g = g.clone()
    g.view(-1)[slice(None) if value == 1e19 else 7] = value  # 60 * 1e38 > 3.4e38
    return g


def poison_run(method, backend, dtype, bad_call, calls):
    """Two good weights around one bad weight per poison, in one bucket; the bad ones are poisoned at one call.

    Yields (optimizer, good, bad) before every call from the poisoned one on, and once at the end.
    """
    cls, kwargs = method
    names = ["good 0", *POISONS, "good 1"]
    weights = {name: weight(*SHAPE, seed=i, dtype=dtype) for i, name in enumerate(names)}
    with torch.no_grad():
        for w in weights.values():
            w[0, 0] = -0.0
    optimizer = made(cls, list(weights.items()), backend=backend, precondition_frequency=TAU, **kwargs)
    bad = [weights[name] for name in POISONS]
    for call in range(calls):
        gradients = [normal(*SHAPE, seed=100 * call + i, dtype=dtype) for i in range(len(names))]
        if call == bad_call:
            gradients[1:-1] = [poisoned(g, v) for g, v in zip(gradients[1:-1], POISONS.values(), strict=True)]
        if call >= bad_call:
            yield optimizer, weights, bad
        step(optimizer, list(weights.values()), gradients)
    yield optimizer, weights, bad


# What is skipped does not depend on the dtypes: of them each step has one.
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
def test_a_non_finite_gradient_changes_only_step_and_skipped(method, path, dtype, state_dtype, when):
    cls, kwargs = method
    method = cls, {**kwargs, "state_dtype": state_dtype}
    states = poison_run(method, path, dtype, WHEN[when], calls=WHEN[when] + 4)
    optimizer, weights, bad = next(states)
    before = [frozen(optimizer, p) for p in bad]
    next(states)
    for p, old in zip(bad, before, strict=True):
        new = frozen(optimizer, p)
        if when == "first":
            assert same_bits(old["W"], new["W"])
            assert (new["step"], int(new["skipped"])) == (-1, 1)
            assert not any(v.any() for k, v in new.items() if k not in ("W", "step", "skipped"))
        else:
            assert changed(old, new) == {"step", "skipped"}
            assert (new["step"], int(new["skipped"])) == (old["step"] + 1, int(old["skipped"]) + 1)
    assert optimizer.skipped() == {name: int(name in POISONS) for name in weights}
    for _ in states:
        pass
    for p, old in zip(bad, before, strict=True):  # and training goes on
        assert not same_bits(p, old["W"])
        assert all(v.isfinite().all() for k, v in frozen(optimizer, p).items() if k != "step")


@pytest.mark.parametrize(
    "dtype, when", [(torch.float32, "first"), (torch.bfloat16, "second"), (torch.float32, "at a refresh")], ids=str
)
def test_a_bad_neighbour_in_the_bucket_does_not_show_in_the_others(method, path, dtype, when):
    calls = WHEN[when] + 3
    cls, kwargs = method
    if cls is PRO:  # Newton-Schulz in bfloat16 would round differently in a batch of another size
        kwargs = {**kwargs, "ns_dtype": torch.float32}
    *_, (optimizer, weights, _) = poison_run((cls, kwargs), path, dtype, WHEN[when], calls)
    alone = {name: weight(*SHAPE, seed=i, dtype=dtype) for name, i in (("good 0", 0), ("good 1", LAST))}
    for w in alone.values():
        w.data[0, 0] = -0.0
    clean = cls(list(alone.items()), backend=path, precondition_frequency=TAU, **kwargs)  # rounded alike by name
    for call in range(calls):
        step(clean, list(alone.values()), [normal(*SHAPE, seed=100 * call + i, dtype=dtype) for i in (0, LAST)])
    for name, w in alone.items():
        expected, found = frozen(clean, w), frozen(optimizer, weights[name])
        if path == "reference":
            assert changed(expected, found) == set()
        else:  # a product may round differently in a batch of another size, and so may what a batch decides as one
            for key in changed(expected, found):
                if expected[key].dtype == torch.bfloat16:
                    assert int((expected[key] != found[key]).sum()) <= 1, key
                else:
                    assert (expected[key] - found[key]).norm() < 1e-5 * expected[key].norm(), key


def test_skipped_counts_by_name_and_leaves_adamw_out(method):
    cls, kwargs = method
    a, b, idle, bias = weight(4, 6), weight(6, 4), weight(4, 6), weight(4)
    adamw = {"params": [("bias", bias)], "algorithm": "adamw", "lr": 1e-3}
    optimizer = made(cls, [{"params": [("a", a), ("b", b), ("idle", idle)]}, adamw], **kwargs)
    for bad_a, bad_b in ((0, 1), (1, 1), (0, 1), (0, 0)):
        gradients = [normal(4, 6), normal(6, 4)]
        gradients = [poisoned(g, NAN) if bad else g for g, bad in zip(gradients, (bad_a, bad_b), strict=True)]
        step(optimizer, [a, b, idle, bias], [*gradients, None, normal(4)])
    assert optimizer.skipped() == {"a": 1, "b": 3, "idle": 0}
    del optimizer.param_groups[0]["param_names"], optimizer.param_groups[1]["param_names"]
    assert optimizer.skipped() == {f"parameter {i} of group 0": count for i, count in enumerate((1, 3, 0))}


@pytest.mark.parametrize("poison", [NAN, 1e25])
@pytest.mark.parametrize("bad_call", WHEN.values(), ids=WHEN)
def test_one_bad_matrix_skips_the_whole_stack(method, path, poison, bad_call):
    cls, kwargs = method
    stack, other = weight(3, 4, 6), weight(4, 6, seed=1)
    optimizer = made(cls, [stack, other], backend=path, precondition_frequency=TAU, **kwargs)
    for call in range(bad_call):
        step(optimizer, [stack, other], [normal(3, 4, 6, seed=call), normal(4, 6, seed=50 + call)])
    before, moved = frozen(optimizer, stack), frozen(optimizer, other)
    bad = normal(3, 4, 6, seed=99)
    bad[1, 2, 3] = poison
    step(optimizer, [stack, other], [bad, normal(4, 6, seed=99)])
    after = frozen(optimizer, stack)
    assert int(after["skipped"]) == 1
    assert after["step"].tolist() == ([int(before["step"][0]) + 1] * 3 if bad_call else [-1] * 3)
    if bad_call:
        assert changed(before, after) == {"step", "skipped"}
        assert not same_bits(moved["W"], other)
    else:
        assert same_bits(before["W"], after["W"])
        assert optimizer.state[other]["step"] == 0


def test_a_zero_matrix_of_a_stack_delays_only_itself(method, path):
    cls, kwargs = method
    stack = weight(3, 4, 6)
    singles = [torch.nn.Parameter(m.clone()) for m in stack.detach()]
    together, apart = (made(cls, p, backend=path, precondition_frequency=TAU, **kwargs) for p in ([stack], singles))
    for call in range(7):
        g = normal(3, 4, 6, seed=call)
        if call < 2:
            g[1] = 0.0
        step(together, [stack], [g])
        step(apart, singles, g)
        state = together.state[stack]
        assert state["step"].tolist() == [call, max(-1, call - 2), call]
    for i, p in enumerate(singles):
        assert same_bits(stack[i], p)
        own = apart.state[p]
        assert all(same_bits(state[k][i], own[k]) for k in own if k not in ("step", "skipped"))


STEPPED_IN = step.__code__.co_filename
"""Where the optimizer's step is called: warnings point at the caller's line."""


def never_moved_warnings(calls):
    """The warnings of `calls()` that say that a weight has not moved."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls()
    return [w for w in caught if "not moved" in str(w.message)]


@pytest.mark.parametrize("value", [0.0, NAN])
@pytest.mark.parametrize("cls", [PRO, KL])
def test_a_weight_that_never_moves_is_warned_about_once_by_name(cls, value):
    stuck, fine, absent = weight(4, 6), weight(4, 6, seed=1), weight(4, 6, seed=2)
    optimizer = cls([("stuck", stuck), ("fine", fine), ("absent", absent)])
    start = stuck.detach().clone()

    def run(steps):
        for t in range(steps):
            step(optimizer, [stuck, fine, absent], [torch.full((4, 6), value), normal(4, 6, seed=t), None])

    assert never_moved_warnings(lambda: run(NEVER_MOVED_AFTER - 1)) == []
    (warning,) = never_moved_warnings(lambda: run(1))
    assert "stuck" in str(warning.message)
    assert str(NEVER_MOVED_AFTER) in str(warning.message) and warning.filename == STEPPED_IN
    assert never_moved_warnings(lambda: run(NEVER_MOVED_AFTER + 10)) == []
    assert same_bits(stuck, start)


def test_newcomers_to_the_bucket_neither_postpone_nor_repeat_the_warning():
    stuck, *late = (weight(4, 6, seed=i) for i in range(4))
    optimizer = PRO([("stuck", stuck), *((f"late {i}", w) for i, w in enumerate(late))])
    starts = [NEVER_MOVED_AFTER // 2, NEVER_MOVED_AFTER + 5, NEVER_MOVED_AFTER + 10]

    def run(first, last):
        for t in range(first, last):
            gradients = [normal(4, 6, seed=t) if t >= start else None for start in starts]
            step(optimizer, [stuck, *late], [torch.zeros(4, 6), *gradients])

    assert len(never_moved_warnings(lambda: run(0, NEVER_MOVED_AFTER))) == 1
    assert never_moved_warnings(lambda: run(NEVER_MOVED_AFTER, 2 * NEVER_MOVED_AFTER + 20)) == []


def test_a_weight_that_has_moved_is_not_said_to_have_never_moved():
    w, late = weight(4, 6), weight(4, 6, seed=1)
    optimizer = PRO([w, late])

    def run():
        for t in range(5):
            step(optimizer, [w, late], [normal(4, 6, seed=t), None])
        for t in range(NEVER_MOVED_AFTER + 5):  # the newcomer makes the bucket anew
            step(optimizer, [w, late], [torch.full((4, 6), NAN), normal(4, 6, seed=t)])

    assert never_moved_warnings(run) == []


def orthonormality_error(Q):
    return float((Q.mT @ Q - torch.eye(Q.shape[-1], dtype=Q.dtype)).norm())


def bases(state):
    return {k: state[k] for k in ("U", "Q_L", "Q_R") if k in state}


def test_zero_gradients_delay_initialisation(method, path):
    cls, kwargs = method
    runs = []
    for zeros in (0, 3):
        w = weight(4, 6)
        optimizer = made(cls, [w], backend=path, **kwargs)
        for _ in range(zeros):
            step(optimizer, [w], [-torch.zeros(4, 6)])
            assert optimizer.state[w]["step"] == -1
            assert same_bits(w, weight(4, 6))
        for t in range(5):
            step(optimizer, [w], [normal(4, 6, seed=t)])
            assert optimizer.state[w]["step"] == t
        runs.append(frozen(optimizer, w))
    assert changed(*runs) == set()


RANK_1 = 12  # steps, with a refresh among them


# First, second and last: 10, 10 and 100 times float32's rounding of six to ten products.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize(
    "fixed, shape", [(True, (6, 10)), (False, (10, 6)), (False, (7, 7)), (True, (2, 6, 10))], ids=str
)
def test_rank_1_gradients_from_the_first_on_keep_everything_finite_and_orthonormal(
    method, path, fixed, shape, dtype, tolerance
):
    cls, kwargs = method
    w = weight(*shape, dtype=dtype)
    optimizer = made(cls, [w], backend=path, **kwargs)
    for t in range(RANK_1):
        seed = 0 if fixed else t
        column, row = (
            normal(*shape[:-1], 1, seed=seed, dtype=dtype),
            normal(*shape[:-2], 1, shape[-1], seed=seed, dtype=dtype),
        )
        step(optimizer, [w], [column @ row * (1 + t % 3)])
        for key, Q in bases(optimizer.state[w]).items():
            assert orthonormality_error(Q) < tolerance * (10 if t else 1), (t, key)
    assert w.isfinite().all() and all(v.isfinite().all() for k, v in optimizer.state[w].items() if k != "step")
    # Steps of lr 0.02; an update is a few times an orthogonal matrix (norm 2.4) and never a blown-up one.
    assert (w - weight(*shape, dtype=dtype)).norm() < RANK_1 * 0.02 * 10 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3], ids=["part of U", "all of U"])
def test_a_gradient_inside_the_tracked_subspace_makes_no_step_of_rounding_noise(path, width, dtype):
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
    for s in (1.0, scale):
        w = weight(4, 6, dtype=torch.float64)
        optimizer = made(cls, [w], backend=path, **kwargs)
        for t in range(8):
            step(optimizer, [w], [s * normal(4, 6, seed=t, dtype=torch.float64)])
        final.append(w.detach())
    moved = (final[0] - weight(4, 6, dtype=torch.float64).detach()).norm()
    assert moved > 0
    assert (final[0] - final[1]).norm() < 1e-9 * moved


@pytest.mark.parametrize("scale", [1e-20, 1e-35])
@pytest.mark.parametrize("start", ["auto", 0.1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_gradients_whose_squares_underflow_train_or_are_reported(method, backend, scale, start):
    cls, kwargs = method
    w = weight(4, 6)
    optimizer = made(cls, [w], backend=backend, init_eigenvalue=start, **kwargs)

    def run(steps):
        for t in range(steps):
            step(optimizer, [w], [scale * normal(4, 6, seed=t)])

    run(12)
    assert all(v.isfinite().all() for k, v in frozen(optimizer, w).items() if k != "step")
    if optimizer.state[w]["step"] == -1:
        assert len(never_moved_warnings(lambda: run(NEVER_MOVED_AFTER - 12))) == 1
    elif start == "auto":
        assert (w - weight(4, 6)).norm() > 1e-4


@pytest.mark.parametrize("ns_steps, shape", [(2, (2, 16)), (5, (6, 10))])
def test_a_complement_whose_squares_underflow_makes_no_step_of_their_rounding(path, ns_steps, shape):
    """Its norm, of which rounding leaves a part, would make a start outside Newton-Schulz's region of convergence."""
    w, size = weight(*shape), {}
    optimizer = made(
        PRO, [w], rank=1, lr=1.0, variant="complement-only", ns_steps=ns_steps, init_eigenvalue=3e3, backend=path
    )
    for t in range(8):
        before = w.detach().clone()
        step(optimizer, [w], [3e-22 * normal(*shape, seed=t)])
        size[t] = float((w - before).detach().norm())
    assert max(size.values()) <= 1.3 * shape[0] ** 0.5, size


@pytest.mark.parametrize("bad", [0.0, NAN, INF])
def test_a_weight_that_does_not_move_is_not_written(method, bad):
    cls, kwargs = method
    weights = [weight(4, 6), weight(4, 6, seed=1)]
    optimizer = made(cls, weights, **kwargs)
    step(optimizer, weights, [normal(4, 6), torch.full((4, 6), bad)])
    before = weights[1]._version
    step(optimizer, weights, [normal(4, 6, seed=2), torch.full((4, 6), bad)])
    assert weights[1]._version == before


def test_a_bucket_that_cannot_be_made_is_made_at_the_next_step(monkeypatch):
    p = weight(4, 6)
    optimizer = PRO([p], rank=2)

    def no_memory(*args):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("prokl.engine.engine.Bucket", no_memory)
        with pytest.raises(MemoryError):
            step(optimizer, [p], [normal(4, 6)])
    before = p.detach().clone()
    for seed in range(2):
        step(optimizer, [p], [normal(4, 6, seed=seed)])
    assert not torch.equal(p, before)


def test_the_specification_skips_a_bad_gradient_also_where_reading_the_device_waits_for_it(monkeypatch):
    forbid_host_reads(monkeypatch)
    p = weight(4, 6)
    optimizer = PRO([p], rank=2, backend="reference")
    step(optimizer, [p], [normal(4, 6)])
    before = frozen(optimizer, p)
    step(optimizer, [p], [torch.full((4, 6), NAN)])
    assert changed(before, frozen(optimizer, p)) == {"step", "skipped"}
