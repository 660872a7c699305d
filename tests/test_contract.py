"""The contract of torch.optim: groups, hyper-parameters that change between steps, what a step touches.

What PyTorch asks of every optimizer of its own, under schedulers and hooks, is in the files test_torch_optimizers_*.
"""

import pytest
import torch

from tests.inputs import BACKENDS, KL, NAN, PRO, both, normal, same_bits, step, weight
from tests.training import (
    OTHERS,
    assert_close,
    contents,
    differences,
    fresh,
    gradients,
    moved,
    named,
    train,
    weights_of,
)

SHAPES = [(6, 10), (10, 6), (6, 10), (2, 4, 5), (7, 7)]
ALL = set(range(len(SHAPES)))


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def build(method, *shapes, dtype=torch.float32, **settings):
    cls, kwargs = method
    return cls(named(*(shapes or SHAPES), dtype=dtype), **kwargs, **settings)


def test_maximize_equals_minimising_the_negated_gradient(method, backend):
    up, down = (build(method, backend=backend, maximize=up, precondition_frequency=3) for up in (True, False))
    assert differences(train(up, range(6)), train(down, range(6), size=-1.0)) == set()


# The three dtypes write by code of their own; maximize, which negates a copy, needs one of them.
@pytest.mark.parametrize("dtype, maximize", [(torch.float32, False), (torch.bfloat16, True), (torch.float64, False)])
def test_a_step_writes_weights_and_state_alone(method, backend, dtype, maximize):
    """Gradients, with -0.0 and NaN in them, are the caller's; weights stay leaves, where they lie."""
    optimizer = build(method, dtype=dtype, backend=backend, maximize=maximize, precondition_frequency=2)
    optimizer.add_param_group({"params": [("bias", weight(3, dtype=dtype))], "algorithm": "adamw", "lr": 0.1})
    weights = weights_of(optimizer)
    places = [p.data_ptr() for p in weights]
    for call in range(5):
        given = gradients(weights, call)
        given[0].view(-1)[0] = -0.0
        if call in (0, 3):
            given[2].view(-1)[5] = NAN
        for p, G in zip(weights, given, strict=True):
            p.grad = G.clone()
        before = [(p.grad, p.grad._version) for p in weights]
        optimizer.step()
        assert all(p.grad is g and g._version == v for p, (g, v) in zip(weights, before, strict=True))
        assert all(same_bits(p.grad, G) for p, G in zip(weights, given, strict=True))
    assert [p.data_ptr() for p in weights] == places
    assert all(p.requires_grad and p.is_leaf and p.grad_fn is None for p in weights)
    state = [v for p in weights for v in optimizer.state[p].values() if torch.is_tensor(v)]
    assert not any(v.requires_grad or v.is_inference() for v in state)


def test_weights_without_a_gradient_are_skipped_entirely(method, backend):
    """And not written, which would be an error in backward for whoever saved the weight for a pass still to come."""
    optimizer = train(build(method, backend=backend), range(3), missing={(t, 2) for t in range(3)})
    weights = weights_of(optimizer)
    never = optimizer.state[weights[2]]
    assert never["step"] == -1 and not any(v.any() for v in never.values() if torch.is_tensor(v))  # an entry, no more
    assert weights[2] not in {member.p for bucket in optimizer.engine.buckets for member in bucket.members}
    assert same_bits(weights[2], weight(*SHAPES[2], seed=2))
    train(optimizer, range(3, 6))
    assert (optimizer.state[weights[0]]["step"], never["step"]) == (5, 2)
    before, versions = contents(optimizer), [w._version for w in weights]
    train(optimizer, range(6, 9), missing={(t, i) for t in range(6, 9) for i in (0, 3)})
    assert moved(before, optimizer) == {1, 2, 4}
    assert {i for i, w in enumerate(weights) if w._version == versions[i]} == {0, 3}


def test_a_late_starter_equals_an_optimizer_started_then(method, backend):
    """Before its start it had no gradients, or zero ones."""
    settings = {"dtype": torch.float64, "backend": backend, "precondition_frequency": 3}
    optimizer = build(method, *[(6, 10)] * 3, **settings)
    alone = {late: build(method, (6, 10), **settings) for late in (1, 2)}
    starts = [p.detach().clone() for p in weights_of(optimizer)]
    for late, own in alone.items():
        weights_of(own)[0].data.copy_(starts[late])
    for call in range(12):
        given = gradients(weights_of(optimizer), call)
        for late, own in alone.items() if call >= 4 else ():
            step(own, weights_of(own), [given[late]])
        step(optimizer, weights_of(optimizer), [given[0], None, -0.0 * given[2].abs()] if call < 4 else given)
    for late, own in alone.items():
        # In float64: a product may round differently in a batch of another size.
        assert_close(contents(own), contents(optimizer)[late : late + 1], [starts[late]])
        assert backend != "reference" or not differences(contents(own), contents(optimizer)[late : late + 1])


SETTINGS = [(cls, key) for cls in (PRO, KL) for key in OTHERS if key in cls([weight(2, 3)]).defaults]


@pytest.mark.parametrize("cls, key", [own for own in SETTINGS if own[1] not in ("lr", "weight_decay")])
def test_a_setting_of_one_group_is_not_the_other_groups(cls, key):
    """Against an optimizer a group; lr and weight decay, by which batches are not divided, in test_many_groups."""
    together, apart = ([{"params": named((6, 10), first=i), "precondition_frequency": 3} for i in (0, 1)] for _ in "12")
    together[0][key] = apart[0][key] = OTHERS[key]
    optimizer, singles = cls(together), [cls([group]) for group in apart]
    for call in range(5):
        train(optimizer, [call])
        for i, own in enumerate(singles):
            step(own, weights_of(own), gradients(weights_of(optimizer), call)[i : i + 1])
    assert differences(optimizer, [found for own in singles for found in contents(own)]) == set()
    assert len(optimizer.engine.buckets) == 2


ADAMW = {  # the dtype in turn
    "defaults": (torch.float32, {}),
    "no foreach": (torch.bfloat16, {"foreach": False}),
    "foreach": (torch.float32, {"foreach": True}),
    "fused": (torch.bfloat16, {"fused": True}),
    "amsgrad": (torch.float32, {"amsgrad": True, "weight_decay": 0.1, "eps": 1e-3}),
    "maximize": (torch.bfloat16, {"maximize": True}),
    "own betas": (torch.bfloat16, {"betas": (0.5, 0.7), "weight_decay": 0.5}),
    "lr tensor": (torch.float32, {"lr": torch.tensor(0.05)}),
}


@both
@pytest.mark.parametrize("dtype, options", ADAMW.values(), ids=ADAMW)
def test_adamw_groups_equal_torch_adamw(cls, dtype, options):
    ours, theirs = (named((5,), (6, 4), (3, 2, 2), (1,), dtype=dtype) for _ in range(2))
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.0, **options}
    matrix = [("matrix", weight(4, 6, dtype=dtype))]
    optimizer = cls([{"params": ours, "algorithm": "adamw", **options}, {"params": matrix}])
    expected = torch.optim.AdamW(theirs, **options)
    missing = {(t, 2) for t in (0, 1, 5)}
    for call in range(10):
        if call == 6:
            optimizer.param_groups[0]["weight_decay"] = expected.param_groups[0]["weight_decay"] = 0.25
        train(optimizer, [call], missing=missing)
        train(expected, [call], missing=missing)
        begun, late = ({key: v.dtype for key, v in optimizer.state[p].items()} for _, p in ours[1:3])
        assert begun == late  # whose entry, of zeros, a checkpoint needs before it begins
        assert call > 0 or not any(v.any() for v in optimizer.state[ours[2][1]].values())
    assert differences(contents(optimizer)[:-1], expected) == set()


LIVE = ("lr", "weight_decay", "momentum", "beta2", "eps", "precondition_frequency", "maximize")
LIVE_PRO = (*LIVE, "alpha_kl", "ns_steps", "ns_coefficients", "ns_dtype")


@pytest.mark.parametrize("cls, name", [(cls, name) for cls, names in ((PRO, LIVE_PRO), (KL, LIVE)) for name in names])
def test_a_changed_hyperparameter_takes_effect_at_once(cls, name):
    """A scheduler relies on it."""
    own = {"rank": 3, "init_eigenvalue": 0.1} if cls is PRO else {}  # from "auto" step 4 refreshes whatever tau is
    optimizer = train(cls(named(*SHAPES), **own), range(4))
    unchanged, changed = fresh(optimizer), fresh(optimizer, **{name: OTHERS[name]})
    optimizer.param_groups[0][name] = OTHERS[name]
    for call in (4, 5):
        for each in (optimizer, unchanged, changed):
            train(each, [call])
        assert differences(optimizer, changed) == set()
        assert moved(contents(unchanged), optimizer) == ALL


def test_the_backend_may_change_between_steps(method):
    runs = []
    for backends in (["torch"] * 6, ["torch", "reference", "reference", None, "reference", "torch"]):
        optimizer = build(method, dtype=torch.float64, precondition_frequency=3)
        for call, name in enumerate(backends):
            optimizer.param_groups[0]["backend"] = name
            train(optimizer, [call])
        runs.append(contents(optimizer))
    assert_close(*runs, [p for _, p in named(*SHAPES, dtype=torch.float64)])


def test_grad_scaler_skips_an_overflow_and_goes_on(method):
    cls, kwargs = method
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6))
    matrices, vectors = ([p for p in model.parameters() if p.ndim == d] for d in (2, 1))
    optimizer = cls([{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 0.01}], **kwargs)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for call in range(12):
        optimizer.zero_grad()
        loss = model(normal(8, 6, seed=1)).square().mean()
        scaler.scale(loss).backward()
        if call == 4:
            model[0].weight.grad[0, 0] = float("inf")
        before = contents(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (differences(before, optimizer) == set()) == (call == 4)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[5] < losses[0] and scaler.get_scale() == 512.0
    assert optimizer.skipped() == {f"parameter {i} of group 0": 0 for i in range(2)}
