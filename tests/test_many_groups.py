"""Weights of one shape share a batch whatever groups they are in, and step with their group's lr and weight decay."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from prokl import ProKLShampoo
from tests.inputs import KL, PRO, changed, everything, frozen, normal, step, weight
from tests.test_graphs import few_kernels, recorded  # noqa: F401  (fixtures)

SHAPES = [(6, 10), (10, 6), (2, 6, 10), (6, 10)]
RATES = [(0.1, 0.0), (0.02, 0.3), (0.5, 0.1), (0.02, 0.3)]
TRITON = pytest.param("triton", marks=pytest.mark.slow)
CAUTIOUS = pytest.param("triton", True, marks=pytest.mark.slow)
METHODS = {"pro-klshampoo": (PRO, {"rank": 3, "ns_dtype": torch.float32}), "klshampoo": (KL, {})}
each = pytest.mark.parametrize("cls, kwargs", METHODS.values(), ids=METHODS)


def make(dtype=torch.float32, shapes=SHAPES):
    return [weight(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


def apart(weights, rates=RATES, **own):
    """A group a weight."""
    groups = [{"params": [(f"w{i}", p)]} for i, p in enumerate(weights)]
    return [{**group, "lr": lr, "weight_decay": d, **own} for group, (lr, d) in zip(groups, rates, strict=False)]


def together(weights, lr, weight_decay):
    named = [(f"w{i}", p) for i, p in enumerate(weights)]
    return [{"params": named, "lr": lr, "weight_decay": weight_decay}]


def train(optimizer, calls, missing=()):
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for call in calls:
        found = [normal(*w.shape, seed=100 * call + i).to(w.dtype) for i, w in enumerate(weights)]
        step(optimizer, weights, [None if (call, i) in missing else g for i, g in enumerate(found)])
    return optimizer


def assert_same(one, other):
    assert not set().union(*map(changed, one, other)) and len(one) == len(other)


def counts(optimizer):
    return [bucket.layout.count for bucket in optimizer.engine.buckets()]


def factor(i):
    return lambda t: (1 + i) / (1 + i + t)


@each
@pytest.mark.parametrize("backend, cautious", [("reference", True), ("torch", False), ("torch", True), CAUTIOUS])
def test_each_weight_steps_as_in_one_batch_of_them_all_with_its_own_lr_and_decay(cls, kwargs, backend, cautious):
    """Bit for bit: what is learnt of a weight does not depend on how far others move."""
    kwargs = {**kwargs, "backend": backend, "precondition_frequency": 2, "cautious_weight_decay": cautious}
    optimizer = cls(apart(make()), **kwargs)
    schedule = LambdaLR(optimizer, [factor(i) for i in range(4)])
    for call in range(4):
        train(optimizer, [call])
        schedule.step()
    assert counts(optimizer) == [5]
    for i, (lr, decay) in enumerate(RATES):
        twin = cls(together(make(), lr, decay), **kwargs)
        schedule = LambdaLR(twin, factor(i))
        for call in range(4):
            train(twin, [call])
            schedule.step()
        ours, theirs = optimizer.param_groups[i]["params"][0], twin.param_groups[0]["params"][i]
        assert changed(frozen(optimizer, ours), frozen(twin, theirs)) == set()


@each
@pytest.mark.parametrize("backend", ["reference", "torch", TRITON])
def test_lrs_that_are_tensors_are_followed_weight_by_weight(cls, kwargs, backend):
    found = []
    for make_groups in (lambda w, lrs: apart(w, [(lr, 0.1) for lr in lrs]), None):
        weights, lrs = make(), [torch.tensor(lr) for lr, _ in RATES]
        if make_groups is None:  # one after the other
            made = [cls(apart([w], [(lr, 0.1)]), backend=backend, **kwargs) for w, lr in zip(weights, lrs, strict=True)]
        else:
            made = [cls(make_groups(weights, lrs), backend=backend, **kwargs)]
        for call in range(4):
            for i, lr in enumerate(lrs):
                lr.fill_(0.1 / (1 + call + i))
            for i, p in enumerate(weights):
                p.grad = normal(*p.shape, seed=100 * call + i)
            for optimizer in made:
                optimizer.step()
        found.append(weights)
    for one, other, start in zip(*found, make(), strict=True):
        # Batches of another size may round a product otherwise; measured: at most 27 units of float32 of the distance.
        assert (one - other).norm() <= 100 * 2**-24 * (one - start).norm()


@each
@pytest.mark.parametrize(
    "dtype, own", [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"bf16_weights": "master"})]
)
def test_equal_groups_are_one_batch_in_their_order(cls, kwargs, dtype, own):
    """Bit for bit, also where a weight starts late, misses a gradient or is frozen; random numbers go by names."""
    missing = [(0, 1), (1, 1), (3, 2), *((call, 3) for call in range(5))]

    def trained(groups):
        weights = make(dtype)
        weights[3].requires_grad_(False)
        return train(cls(groups(weights), **own, **kwargs), range(5), missing)

    one = trained(lambda weights: together(weights, 0.1, 0.1))
    many = trained(lambda weights: apart(weights, [(0.1, 0.1)] * 4))
    assert counts(one) == counts(many) == [4]
    assert_same(everything(one), everything(many))


@each
def test_a_batch_is_split_where_a_group_gets_another_setting_and_state_goes_along(cls, kwargs):
    optimizer = train(cls(apart(make()), **kwargs), range(4))
    assert counts(optimizer) == [5]
    optimizer.param_groups[1]["beta2"] = 0.5
    saved, weights = (
        copy.deepcopy(optimizer.state_dict()),
        copy.deepcopy([g["params"][0] for g in optimizer.param_groups]),
    )
    twin = cls(apart(weights), **kwargs)
    twin.load_state_dict(saved)
    for one in (optimizer, twin):
        train(one, range(4, 8))
        assert counts(one) == [4, 1]
    assert_same(everything(optimizer), everything(twin))
    optimizer.param_groups[1]["beta2"] = optimizer.param_groups[0]["beta2"]
    train(optimizer, [8])
    assert counts(optimizer) == [5]
    assert [optimizer.state[g["params"][0]]["step"] for g in optimizer.param_groups[:2]] == [8, 8]


@each
def test_a_setting_that_all_groups_change_alike_keeps_the_batch(cls, kwargs):
    optimizer = train(cls(apart(make()), **kwargs), range(3))
    before = list(optimizer.engine.buckets())
    for group in optimizer.param_groups:
        group["momentum"] = 0.8
    train(optimizer, range(3, 5))
    assert list(optimizer.engine.buckets()) == before
    twin = train(cls(apart(make()), **kwargs), range(3))
    for group in twin.param_groups:
        group["momentum"] = 0.8
    twin.load_state_dict(copy.deepcopy(twin.state_dict()))  # all anew
    train(twin, range(3, 5))
    assert_same(everything(optimizer), everything(twin))


SETTINGS = {
    "rank": (PRO, 2), "momentum": (KL, 0.5), "eps": (KL, 0.1), "variant": (PRO, "smok-hop"), "ns_steps": (PRO, 2),
    "ns_coefficients": (PRO, [2.0, -1.5, 0.5]), "maximize": (KL, True), "backend": (KL, "reference"),
    "clip_threshold": (KL, None), "precondition_frequency": (KL, 2), "cautious_weight_decay": (KL, True),
    "state_dtype": (KL, torch.bfloat16), "adjust_lr_fn": (KL, "match_rms_adamw"), "init_eigenvalue": (KL, 0.1),
    "bf16_weights": (KL, "plain"), "precision": (KL, "balanced"), "cuda_graphs": (KL, False),
}  # fmt: skip


@pytest.mark.parametrize("key", SETTINGS)
def test_groups_of_other_settings_have_batches_of_their_own(key):
    cls, value = SETTINGS[key]
    groups = apart(make())
    groups[1][key] = groups[3][key] = value
    assert counts(train(cls(groups), range(2))) == [3, 2]


@each
def test_a_group_that_is_added_later_joins_the_batch_and_all_go_on(cls, kwargs):
    """In float64, as a product may round otherwise in a batch of another size."""
    start = make(torch.float64)
    weights, twins = make(torch.float64), make(torch.float64)
    optimizer = cls(apart(weights[:3]), precondition_frequency=2, **kwargs)
    singles = [
        cls(apart([p], [rates]), precondition_frequency=2, **kwargs) for p, rates in zip(twins, RATES, strict=True)
    ]
    for call in range(8):
        if call == 3:
            optimizer.add_param_group(apart(weights)[3])
        for i, pair in enumerate(zip(weights, twins, strict=True)):
            for p in pair:
                p.grad = normal(*p.shape, seed=100 * call + i, dtype=torch.float64) if i < 3 or call >= 3 else None
        optimizer.step()
        for own in singles:
            own.step()
    assert counts(optimizer) == [5]
    for p, q, w in zip(weights, twins, start, strict=True):
        assert (p - q).norm() <= 1e-9 * (p - w).norm()


@each
def test_a_run_in_many_groups_resumes_bit_for_bit(cls, kwargs):
    optimizer = train(cls(apart(make(torch.bfloat16)), **kwargs), range(5), [(0, 1), (1, 1)])
    saved, weights = (
        copy.deepcopy(optimizer.state_dict()),
        copy.deepcopy([g["params"][0] for g in optimizer.param_groups]),
    )
    resumed = cls(apart(weights, [(1.0, 1.0)] * 4), **kwargs)
    resumed.load_state_dict(saved)
    train(optimizer, range(5, 9))
    train(resumed, range(5, 9))
    assert_same(everything(optimizer), everything(resumed))


@each
def test_a_bad_setting_of_one_group_of_many_is_named_and_nothing_has_moved(cls, kwargs):
    optimizer = train(cls(apart(make()), **kwargs), range(3))
    before = everything(optimizer)
    for key in ("lr", "weight_decay", "momentum"):
        good, optimizer.param_groups[2][key] = optimizer.param_groups[2][key], -1.0
        with pytest.raises(ValueError, match=f"Invalid {key}=-1.0"):
            train(optimizer, [3])
        optimizer.param_groups[2][key] = good
    assert_same(before, everything(optimizer))
    train(optimizer, [3])


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(lambda t, i: 0.1 * (1 + i) / (1 + t), marks=pytest.mark.slow, id="apart"),
        pytest.param(lambda t, i: 0.1 / (1 + t + (i > t % 4)), id="now apart, now alike"),
    ],
)
def test_lrs_and_decays_of_many_groups_change_under_one_recording(schedule, recorded, few_kernels):  # noqa: F811
    """One lr is a tensor."""

    def trained(graphs):
        lr = torch.tensor(0.1)
        optimizer = ProKLShampoo(
            apart(make(shapes=SHAPES[2:])),
            rank=3,
            precondition_frequency=3,
            advanced={"cuda_graphs": graphs},
            backend="triton",
        )
        for call in range(8):
            for i, group in enumerate(optimizer.param_groups):
                group.update(lr=schedule(call, i), weight_decay=0.1 * schedule(call, 3 - i))
            optimizer.param_groups[0]["lr"] = lr.fill_(schedule(call, 0))
            train(optimizer, [call])
        return optimizer

    replayed, plain = trained(True), trained(False)
    assert len(recorded) == 2
    assert_same(everything(replayed), everything(plain))


def test_many_groups_are_checked_once_when_they_are_made(monkeypatch):
    """What takes all groups would take the square of their number, were it done for every one."""
    calls = []
    monkeypatch.setattr("prokl.matrix_optimizer.check_names", calls.append)
    optimizer = KL(apart(make(shapes=[(4, 6)] * 20), [(0.1, 0.0)] * 20))
    assert len(calls) == 1
    optimizer.add_param_group({"params": [("more", weight(4, 6))]})
    assert len(calls) == 2
