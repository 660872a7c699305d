"""Groups: weights of one shape share a batch whatever groups they are in, and each group has its own lr and decay."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from prokl import ProKLShampoo, param_groups
from prokl.kernels import launch
from tests.inputs import KL, PRO, both, weight
from tests.test_graphs import few_kernels, recorded  # noqa: F401  (fixtures)
from tests.training import contents, differences, fresh, named, train

SHAPES = [(6, 10), (10, 6), (2, 6, 10), (6, 10)]
RATES = [(0.1, 0.0), (torch.tensor(0.02), 0.3), (0.5, 0.1), (torch.tensor(0.02), 0.3)]
"""Learning rates, which schedulers fill in place where they are tensors, and weight decays."""
INTERPRETED = pytest.mark.skipif(not launch.INTERPRETED, reason="kernels run on a CPU in Triton's interpreter alone")
CAUTIOUS = pytest.param("triton", True, marks=[pytest.mark.slow, INTERPRETED])
METHODS = {"pro-klshampoo": (PRO, {"rank": 3, "ns_dtype": torch.float32}), "klshampoo": (KL, {})}
each = pytest.mark.parametrize("cls, kwargs", METHODS.values(), ids=METHODS)


def apart(rates=RATES, dtype=torch.float32, shapes=SHAPES):
    """A group a weight."""
    pairs = zip(named(*shapes, dtype=dtype), rates, strict=False)
    return [{"params": [own], "lr": lr, "weight_decay": decay} for own, (lr, decay) in pairs]


def together(lr, weight_decay, dtype=torch.float32, shapes=SHAPES):
    return [{"params": named(*shapes, dtype=dtype), "lr": lr, "weight_decay": weight_decay}]


def counts(optimizer):
    return [bucket.layout.count for bucket in optimizer.engine.buckets]


def factor(i):
    return lambda t: (1 + i) / (1 + i + t)


@pytest.mark.slow
@each
@pytest.mark.parametrize("backend, cautious", [("reference", True), ("torch", False), ("torch", True), CAUTIOUS])
def test_each_weight_has_its_own_lr_and_decay_in_one_batch(cls, kwargs, backend, cautious):
    """Bit for bit: what is learnt of a weight does not depend on how far others move."""
    kwargs = {**kwargs, "backend": backend, "precondition_frequency": 2, "cautious_weight_decay": cautious}
    shapes, rates, calls = (SHAPES[1:3], RATES[1:3], 3) if backend == "triton" else (SHAPES, RATES, 4)
    optimizer = cls(apart(rates, shapes=shapes), **kwargs)
    schedule = LambdaLR(optimizer, [factor(i) for i in range(len(rates))])
    for call in range(calls):
        train(optimizer, [call])
        schedule.step()
    assert counts(optimizer) == [len(shapes) + 1]
    for i, (lr, decay) in enumerate(rates):
        twin = cls(together(lr, decay, shapes=shapes), **kwargs)
        schedule = LambdaLR(twin, factor(i))
        for call in range(calls):
            train(twin, [call])
            schedule.step()
        assert differences(contents(optimizer)[i : i + 1], contents(twin)[i : i + 1]) == set()


@each
@pytest.mark.parametrize(
    "dtype, own", [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"bf16_weights": "master"})]
)
def test_equal_groups_are_one_batch_in_their_order(cls, kwargs, dtype, own):
    """Bit for bit, also where a weight starts late, misses a gradient or is frozen; random numbers go by names."""
    missing = [(0, 1), (1, 1), (3, 2), *((call, 3) for call in range(5))]

    def trained(groups):
        groups[-1]["params"][-1][1].requires_grad_(False)
        return train(cls(groups, **own, **kwargs), range(5), missing=missing)

    one, many = trained(together(0.1, 0.1, dtype)), trained(apart([(0.1, 0.1)] * 4, dtype))
    assert counts(one) == counts(many) == [4]
    assert differences(one, many) == set()


@each
def test_a_batch_follows_the_groups_and_state_goes_along(cls, kwargs):
    """It is split where a group gets another setting, is whole again without it, and a new group joins it."""
    optimizer = train(cls(apart(), **kwargs), range(4))
    assert counts(optimizer) == [5]
    other, usual = optimizer.param_groups[1], optimizer.param_groups[1]["beta2"]
    for call, beta2, expected in ((4, 0.5, [4, 1]), (6, usual, [5]), (8, usual, [6])):
        other["beta2"] = beta2
        if call == 8:
            optimizer.add_param_group({"params": named((6, 10), first=len(SHAPES))})
        twin = fresh(optimizer)
        for one in (optimizer, twin):
            train(one, range(call, call + 2))
            assert counts(one) == expected
        assert differences(optimizer, twin) == set()
    batches = optimizer.engine.buckets
    for group in optimizer.param_groups:  # all alike
        group["momentum"] = 0.8
    train(optimizer, [10])
    assert optimizer.engine.buckets == batches


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [lambda t, i: 0.1 * (1 + i) / (1 + t), lambda t, i: 0.1 / (1 + t + (i > t % 4))],
    ids=["apart", "now apart, now alike"],
)
def test_rates_of_many_groups_change_under_one_recording(schedule, recorded, few_kernels):  # noqa: F811
    """One lr is a tensor."""

    def trained(graphs):
        lr = torch.tensor(0.1)
        settings = {"rank": 3, "precondition_frequency": 3, "cuda_graphs": graphs, "backend": "triton"}
        optimizer = ProKLShampoo(apart(shapes=SHAPES[2:]), **settings)
        for call in range(8):
            for i, group in enumerate(optimizer.param_groups):
                group.update(lr=schedule(call, i), weight_decay=0.1 * schedule(call, 3 - i))
            optimizer.param_groups[0]["lr"] = lr.fill_(schedule(call, 0))
            train(optimizer, [call])
        return optimizer

    replayed, plain = trained(True), trained(False)
    assert len(recorded) == 2
    assert differences(replayed, plain) == set()


def test_many_groups_are_checked_once_when_they_are_made(monkeypatch):
    """A check of all groups would take the square of their number, were it done for every one."""
    calls = []
    monkeypatch.setattr("prokl.matrix_optimizer.check_names", calls.append)
    optimizer = KL(apart([(0.1, 0.0)] * 20, shapes=[(4, 6)] * 20))
    assert len(calls) == 1
    optimizer.add_param_group({"params": [("more", weight(4, 6))]})
    assert len(calls) == 2


# A learning rate in a tensor, which schedulers fill in place


def halve(groups):
    for group in groups:
        group["lr"].mul_(0.5)


def rates(groups):
    return [float(group["lr"]) for group in groups]


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("optimizer", [list, PRO, KL, torch.optim.AdamW])
def test_groups_of_a_model_do_not_share_a_tensor_lr(optimizer, names):
    lr, adamw_lr = torch.tensor(0.5, requires_grad=True), torch.tensor(0.25)
    model = nn.Sequential(nn.LSTM(4, 5), nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    made = optimizer(param_groups(model, lr=lr, adamw_lr=adamw_lr, names=names))
    groups = made if optimizer is list else made.param_groups
    assert len(groups) == (3 if names else 4)
    halve(groups)
    assert rates(groups) == [0.25] * (len(groups) - 2) + [0.125] * 2
    assert (lr.item(), adamw_lr.item()) == (0.5, 0.25)
    assert all(g["lr"].is_leaf and not g["lr"].requires_grad for g in groups)


@both
def test_an_optimizers_groups_do_not_share_a_tensor_lr(cls):
    """Given to the constructor, to groups that are added, and by a file whose groups shared it."""
    lr = torch.tensor(0.5)
    optimizer = cls([{"params": [weight(4, 6, seed=i)]} for i in range(2)], lr=lr)
    halve(optimizer.param_groups)
    optimizer.add_param_group({"params": [weight(4, 6, seed=2)]})  # begins at the constructor's, not at a decayed one
    assert rates(optimizer.param_groups) == [0.25, 0.25, 0.5] and float(lr) == 0.5
    lr.fill_(8.0)
    given = {"params": [weight(4, 6, seed=3)], "lr": lr}, {"params": [weight(6)], "algorithm": "adamw", "lr": lr}
    optimizer.add_param_group({"params": [weight(4, 6, seed=4)]})
    for group in given:
        optimizer.add_param_group(group)
    halve(optimizer.param_groups[3:])
    assert rates(optimizer.param_groups) == [0.25, 0.25, 0.5, 0.25, 4.0, 4.0] and float(lr) == 8.0
    assert all(group["lr"] is lr for group in given)  # what was given stays as it was
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group["lr"] = lr
    optimizer.load_state_dict(state)
    halve(optimizer.param_groups)
    assert rates(optimizer.param_groups) == [4.0] * 6 and float(lr) == 8.0


@both
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_rate_of_one_dimension_steps_as_one_of_none_does(cls, backend):
    """A float64 one would make the products float64; one on the CPU would not multiply weights that are elsewhere."""
    shapes = torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    one, other = (cls([("w", weight(8, 12))], backend=backend, weight_decay=0.1) for _ in shapes)
    for optimizer, lr in zip((one, other), shapes, strict=True):
        optimizer.param_groups[0]["lr"] = lr
    assert differences(train(one, range(4)), train(other, range(4))) == set()
