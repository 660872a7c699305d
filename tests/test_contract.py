"""The contract of torch.optim: closures, schedulers, hooks, groups and hyper-parameters that change between steps.

Where two runs do the same arithmetic on the same shapes they are compared bit for bit.
"""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.inputs import KL, PRO, changed, everything, normal, same_bits, step, weight
from tests.problems import made, same_clocks

SHAPES = [(6, 10), (10, 6), (6, 10), (2, 4, 5), (7, 7)]


@pytest.fixture(params=["reference", "torch"])
def backend(request):
    return request.param


def make(shapes=SHAPES, dtype=torch.float32):
    return [weight(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


def copies(weights):
    return [torch.nn.Parameter(w.detach().clone()) for w in weights]


def gradients(weights, call):
    return [normal(*w.shape, seed=100 * call + i, dtype=w.dtype) for i, w in enumerate(weights)]


def train(optimizer, weights, calls, missing=()):
    """Step over the gradients of the calls; `missing` lists (call, weight) without a gradient."""
    for call in calls:
        grads = gradients(weights, call)
        step(optimizer, weights, [None if (call, i) in missing else g for i, g in enumerate(grads)])
    return optimizer


def differences(a, b):
    """(index, key) of what differs, bit for bit."""
    return {(i, k) for i, (x, y) in enumerate(zip(a, b, strict=True)) for k in changed(x, y)}


def assert_close(a, b, start, tolerance=1e-9):
    """Weights against the distance moved, state tensors against themselves."""
    for x, y, w in zip(a, b, start, strict=True):
        assert same_clocks(x, y)
        assert (x["W"] - y["W"]).norm() <= tolerance * (x["W"] - w).norm()
        for k in x.keys() - {"W", "step", "skipped"}:
            assert (x[k] - y[k]).norm() <= tolerance * x[k].norm(), k


@pytest.mark.parametrize("outer", [torch.enable_grad, torch.no_grad])
def test_closure_runs_once_with_grad_enabled_and_its_loss_is_returned(method, outer):
    cls, kwargs = method
    w, x = torch.nn.Parameter(normal(6, 10)), normal(4, 6)
    optimizer = cls([w], **kwargs)
    losses = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (x @ w).square().mean()
        loss.backward()
        losses.append(loss)
        return loss

    with outer():
        returned = [optimizer.step(closure) for _ in range(5)]
        assert torch.is_grad_enabled() == (outer is torch.enable_grad)
    assert all(a is b for a, b in zip(returned, losses, strict=True))
    assert losses[-1] < losses[0]
    assert optimizer.step() is None


def test_maximize_equals_minimising_the_negated_gradient(method, backend):
    cls, kwargs = method
    a, b = make(), make()
    up = cls(a, backend=backend, maximize=True, precondition_frequency=3, **kwargs)
    down = cls(b, backend=backend, precondition_frequency=3, **kwargs)
    for call in range(6):
        grads = gradients(a, call)
        step(up, a, grads)
        step(down, b, [-g for g in grads])
    assert differences(everything(up), everything(down)) == set()


def test_zero_grad_clears_the_gradients(method):
    cls, kwargs = method
    weights = make()
    bias = torch.nn.Parameter(torch.zeros(3))
    optimizer = cls([{"params": weights}, {"params": [bias], "algorithm": "adamw", "lr": 0.1}], **kwargs)
    step(optimizer, [*weights, bias], gradients([*weights, bias], 0))
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in [*weights, bias])
    optimizer.zero_grad()
    assert all(p.grad is None for p in [*weights, bias])


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_is_never_written(method, backend, dtype, maximize):
    cls, kwargs = method
    weights = make(dtype=dtype)
    bias = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    adamw = {"params": [bias], "algorithm": "adamw", "lr": 0.1}
    optimizer = cls(
        [{"params": weights}, adamw], backend=backend, maximize=maximize, precondition_frequency=2, **kwargs
    )
    everyone = [*weights, bias]
    for call in range(5):
        grads = gradients(everyone, call)
        grads[0].view(-1)[0] = -0.0
        if call in (0, 3):
            grads[2].view(-1)[5] = float("nan")
        for p, g in zip(everyone, grads, strict=True):
            p.grad = g.clone()
        before = [(p.grad, p.grad._version) for p in everyone]
        optimizer.step()
        assert all(p.grad is g and g._version == v for p, (g, v) in zip(everyone, before, strict=True))
        assert all(same_bits(p.grad, g) for p, g in zip(everyone, grads, strict=True))


def test_weights_without_a_gradient_are_skipped_entirely(method, backend):
    cls, kwargs = method
    weights = make()
    optimizer = cls(weights, backend=backend, **kwargs)
    never = train(optimizer, weights, range(3), missing=[(t, 2) for t in range(3)]).state.get(weights[2])
    assert never["step"] == -1 and not any(v.any() for v in never.values() if torch.is_tensor(v))  # an entry, no more
    assert same_bits(weights[2], make()[2])
    train(optimizer, weights, range(3, 6))
    assert (optimizer.state[weights[0]]["step"], optimizer.state[weights[2]]["step"]) == (5, 2)
    before = everything(optimizer)
    train(optimizer, weights, range(6, 9), missing=[(t, i) for t in range(6, 9) for i in (0, 3)])
    assert {i for i, _ in differences(before, everything(optimizer))} == {1, 2, 4}


def test_weights_without_a_gradient_are_not_written(method, backend):
    """A write would be an error in backward for whoever saved the weight for a pass that is still to come."""
    cls, kwargs = method
    weights = make()
    optimizer = train(cls(weights, backend=backend, **kwargs), weights, range(3))
    versions = [w._version for w in weights]
    train(optimizer, weights, range(3, 5), missing=[(t, i) for t in (3, 4) for i in (0, 3)])
    assert {i for i, w in enumerate(weights) if w._version == versions[i]} == {0, 3}


def test_weights_frozen_later_stay_as_they_are(method):
    cls, kwargs = method
    model = torch.nn.Sequential(torch.nn.Linear(6, 10, bias=False), torch.nn.Linear(10, 6, bias=False))
    optimizer = cls(model.parameters(), **kwargs)
    for call in range(6):
        if call == 3:
            model[0].weight.requires_grad_(False)
            before = everything(optimizer)
        optimizer.zero_grad()
        model(normal(8, 6, seed=call)).square().mean().backward()
        optimizer.step()
    assert {i for i, _ in differences(before, everything(optimizer))} == {1}
    assert [p.requires_grad for p in model.parameters()] == [False, True]


def test_parameters_keep_their_place_in_autograd(method, backend):
    cls, kwargs = method
    weights = make()
    storage = [w.data_ptr() for w in weights]
    optimizer = train(cls(weights, backend=backend, **kwargs), weights, range(4))
    assert all(w.requires_grad and w.is_leaf and w.grad_fn is None for w in weights)
    assert [w.data_ptr() for w in weights] == storage
    state = [v for w in weights for v in optimizer.state[w].values() if torch.is_tensor(v)]
    assert not any(v.requires_grad or v.is_inference() for v in state)


def test_a_late_starter_equals_an_optimizer_started_then(method, backend):
    cls, kwargs = method
    weights = make([(6, 10)] * 3, torch.float64)
    late = copies(weights[1:2])
    optimizer = cls(weights, backend=backend, precondition_frequency=3, **kwargs)
    fresh = cls(late, backend=backend, precondition_frequency=3, **kwargs)
    for call in range(12):
        grads = gradients(weights, call)
        step(optimizer, weights, [grads[0], grads[1] if call >= 4 else None, grads[2]])
        if call >= 4:
            step(fresh, late, grads[1:2])
    # In float64: a product may round differently in a batch of another size.
    assert_close(everything(fresh), everything(optimizer)[1:2], [make([(6, 10)] * 3, torch.float64)[1]])
    if backend == "reference":
        assert differences(everything(fresh), everything(optimizer)[1:2]) == set()


def test_the_scale_of_the_loss_does_not_matter_with_auto(method, backend):
    cls, kwargs = method
    runs = []
    for s in (1.0, 1e-6):
        weights = make(dtype=torch.float64)
        optimizer = made(cls, weights, backend=backend, weight_decay=0.1, eps=1e-3, **kwargs)
        for call in range(22):
            noisy = [g * 10 ** (0.2 * (call % 5 - 2)) for g in gradients(weights, call)]
            step(optimizer, weights, [s * g for g in noisy])
        runs.append(weights)
    for w, one, other in zip(make(dtype=torch.float64), *runs, strict=True):
        assert (one - other).norm() < 1e-9 * (one - w).norm()


def test_an_added_group_trains_like_an_optimizer_of_its_own(method, backend):
    cls, kwargs = method
    weights = make()
    apart = copies(weights)
    optimizer = cls(weights[:2], backend=backend, **kwargs)
    one = cls(apart[:2], backend=backend, **kwargs)
    two = cls(apart[2:], backend=backend, lr=0.5, beta2=0.8, **kwargs)
    for call in range(6):
        if call == 2:
            optimizer.add_param_group({"params": weights[2:], "lr": 0.5, "beta2": 0.8})
        grads = gradients(weights, call)
        step(optimizer, weights, grads)
        step(one, apart[:2], grads[:2])
        if call >= 2:
            step(two, apart[2:], grads[2:])
    assert differences(everything(optimizer), everything(one) + everything(two)) == set()


GROUPS = {
    PRO: [
        {"lr": 0.1, "rank": 2, "momentum": 0.5},
        {"variant": "smok-hop", "beta2": 0.5, "init_eigenvalue": 0.1, "eps": 1e-2},
        {"alpha_kl": 0.5, "weight_decay": 0.3, "precondition_frequency": 2, "state_dtype": torch.bfloat16},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "maximize": True, "ns_dtype": torch.float32},
        {"variant": "subspace-only", "backend": "reference", "precondition_frequency": 3},
    ],
    KL: [
        {"lr": 0.1, "momentum": 0.5},
        {"beta2": 0.5, "init_eigenvalue": 0.1, "eps": 1e-2},
        {"weight_decay": 0.3, "precondition_frequency": 2, "state_dtype": torch.bfloat16},
        {"maximize": True},
        {"backend": "reference", "precondition_frequency": 3},
    ],
}


@pytest.mark.parametrize("cls", [PRO, KL])
def test_groups_that_differ_equal_optimizers_that_differ(cls):
    weights = [w for _ in GROUPS[cls] for w in make([(6, 10), (10, 6)])]
    apart = copies(weights)
    pairs = [slice(i, i + 2) for i in range(0, len(weights), 2)]
    options = list(zip(pairs, GROUPS[cls], strict=True))
    together = cls([{"params": weights[i], **kwargs} for i, kwargs in options])
    separate = [made(cls, apart[i], **kwargs) for i, kwargs in options]
    for call in range(7):
        grads = gradients(weights, call)
        step(together, weights, grads)
        for optimizer, i in zip(separate, pairs, strict=True):
            step(optimizer, apart[i], grads[i])
    expected = [c for optimizer in separate for c in everything(optimizer)]
    assert differences(everything(together), expected) == set()


def test_named_parameters_are_taken_and_shown(method):
    cls, kwargs = method
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False))
    optimizer = cls(model.named_parameters(), **kwargs)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["0.weight", "1.weight"]
    with pytest.raises(ValueError, match="names"):
        optimizer.add_param_group({"params": make([(4, 6)])})
    grouped = cls([{"params": model.named_parameters()}], **kwargs)
    assert grouped.param_groups[0]["param_names"] == ["0.weight", "1.weight"]


def test_a_weight_taken_out_of_its_group_by_hand_is_no_longer_stepped(method):
    cls, kwargs = method
    weights = make([(6, 10)] * 2)
    optimizer = train(cls(weights, **kwargs), weights, range(3))
    before = weights[0].detach().clone()
    del optimizer.param_groups[0]["params"][0]
    train(optimizer, weights, range(3, 5))
    assert same_bits(weights[0], before)


def test_a_group_taken_out_by_hand_leaves_the_others_their_hyperparameters(method):
    cls, kwargs = method
    weights = make([(6, 10)] * 2)
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5, "precondition_frequency": 2}]
    optimizer = train(cls(groups, **kwargs), weights, range(3))
    twin = copy.deepcopy(optimizer)
    before = weights[0].detach().clone()
    del optimizer.param_groups[0]
    train(optimizer, weights, range(3, 6))
    train(twin, [p for g in twin.param_groups for p in g["params"]], range(3, 6))
    assert same_bits(weights[0], before)
    assert differences(everything(optimizer), everything(twin)[1:]) == set()


def test_repr_shows_the_groups(method):
    cls, kwargs = method
    weights = make()
    optimizer = cls(
        [{"params": weights}, {"params": [torch.nn.Parameter(torch.zeros(3))], "algorithm": "adamw", "lr": 0.125}],
        **kwargs,
    )
    train(optimizer, weights, range(2))
    text = repr(optimizer)
    assert text.startswith(cls.__name__)
    assert "precondition_frequency: 10" in text
    assert "lr: 0.125" in text


ADAMW = {
    "defaults": {},
    "no foreach": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1, "eps": 1e-3},
    "maximize": {"maximize": True},
    "own betas": {"betas": (0.5, 0.7), "weight_decay": 0.5},
    "lr tensor": {"lr": torch.tensor(0.05)},
}


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", ADAMW.values(), ids=ADAMW)
def test_adamw_groups_equal_torch_adamw(cls, dtype, options):
    shapes = [(5,), (6, 4), (3, 2, 2), (1,)]
    ours, theirs, matrix = make(shapes, dtype), make(shapes, dtype), make([(4, 6)], dtype)
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.0, **options}
    optimizer = cls([{"params": matrix}, {"params": ours, "algorithm": "adamw", **options}])
    expected = torch.optim.AdamW(theirs, **options)
    missing = [(t, 2) for t in (0, 1, 5)]
    for call in range(10):
        if call == 6:
            optimizer.param_groups[1]["weight_decay"] = expected.param_groups[0]["weight_decay"] = 0.25
        train(optimizer, [*ours, *matrix], [call], missing)
        train(expected, theirs, [call], missing)
    assert differences(everything(optimizer)[1:], everything(expected)) == set()


@pytest.mark.parametrize("cls", [PRO, KL])
def test_adamw_groups_have_the_documented_defaults_and_inherit_maximize(cls):
    ours, theirs, matrix = make([(5,)]), make([(5,)]), make([(4, 6)])
    group = {"params": ours, "algorithm": "adamw", "lr": 0.01}
    optimizer = made(cls, [{"params": matrix}, group], maximize=True, weight_decay=0.5, eps=0.5, lr=3.0)
    expected = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, maximize=True)
    for call in range(10):
        train(optimizer, [*ours, *matrix], [call])
        train(expected, theirs, [call])
    assert differences(everything(optimizer)[1:], everything(expected)) == set()


def test_one_optimizer_trains_a_model_with_embedding_matrices_and_biases(method):
    cls, kwargs = method
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)
    )
    matrices = [p for p in model[1:].parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
    optimizer = cls([{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 0.01}], lr=0.02, **kwargs)
    x = torch.arange(16).repeat(4)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), (x * 5 + 3) % 16)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


LIVE = {
    "lr": 0.3,
    "weight_decay": 0.5,
    "momentum": 0.3,
    "beta2": 0.5,
    "eps": 0.5,
    "precondition_frequency": 2,
    "maximize": True,
}
LIVE_PRO = {"alpha_kl": 0.7, "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "ns_dtype": torch.float64}
CHANGES = [(cls, k, v) for cls, table in ((PRO, LIVE | LIVE_PRO), (KL, LIVE)) for k, v in table.items()]


def given_the_state_of(optimizer, weights, **changes):
    """An optimizer made with other hyper-parameters on copies of the weights, given the first one's state."""
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(changes)
    arguments = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in optimizer.param_groups[0].items() if k in arguments and k != "params"}
    twins = copies(weights)
    twin = made(type(optimizer), twins, **{**options, **changes})
    twin.load_state_dict(state)
    return twin, twins


@pytest.mark.parametrize("cls, name, value", CHANGES, ids=lambda x: x if isinstance(x, str) else None)
def test_a_changed_hyperparameter_takes_effect_at_the_very_next_step(cls, name, value, backend):
    weights = make()
    optimizer = train(cls(weights, backend=backend, **({"rank": 3} if cls is PRO else {})), weights, range(4))
    unchanged, same = given_the_state_of(optimizer, weights)
    changed, others = given_the_state_of(optimizer, weights, **{name: value})
    optimizer.param_groups[0][name] = value
    for call in (4, 5):
        train(unchanged, same, [call])
        assert {i for i, _ in differences(everything(optimizer), everything(unchanged))}
        train(optimizer, weights, [call])
        train(changed, others, [call])
        assert differences(everything(optimizer), everything(changed)) == set()
        assert {i for i, _ in differences(everything(optimizer), everything(unchanged))} == set(range(len(weights)))


def test_the_backend_may_change_between_steps(method):
    cls, kwargs = method
    runs = []
    for backends in (["torch"] * 6, ["torch", "reference", "reference", None, "reference", "torch"]):
        weights = make(dtype=torch.float64)
        optimizer = cls(weights, precondition_frequency=3, **kwargs)
        for call, name in enumerate(backends):
            optimizer.param_groups[0]["backend"] = name
            train(optimizer, weights, [call])
        runs.append(everything(optimizer))
    assert_close(*runs, make(dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lr_may_be_a_tensor_and_its_value_is_read_at_every_step(method, backend, dtype):
    cls, kwargs = method
    number, tensor = make(dtype=dtype), make(dtype=dtype)
    # Powers of two, so that no product with the learning rate rounds.
    a = cls(number, lr=0.5, weight_decay=0.25, backend=backend, **kwargs)
    b = cls(tensor, lr=torch.tensor(0.5, dtype=dtype), weight_decay=0.25, backend=backend, **kwargs)
    for call in range(5):
        if call == 3:
            a.param_groups[0]["lr"] = 0.125
            b.param_groups[0]["lr"].fill_(0.125)
        train(a, number, [call])
        train(b, tensor, [call])
    assert differences(everything(a), everything(b)) == set()


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.5, 0.01], total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, start_factor=1e-3, total_iters=5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("cls", [PRO, KL])
def test_schedulers_take_effect_at_once(cls, name):
    """The scheduled run against one in which the scheduler's values are set by hand."""

    def build():
        weights, bias = make([(6, 10), (10, 6)]), make([(5,)])
        group = {"params": bias, "algorithm": "adamw", "lr": 0.01}
        return [*weights, *bias], cls([{"params": weights}, group], lr=0.1)

    weights, optimizer = build()
    by_hand, manual = build()
    scheduler = SCHEDULERS[name](optimizer)
    seen = set()
    for call in range(7):
        for target, source in zip(manual.param_groups, optimizer.param_groups, strict=True):
            target["lr"] = source["lr"]
            if target["algorithm"] == "matrix":
                target["momentum"] = source["momentum"]
        seen.add((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        train(optimizer, weights, [call])
        train(manual, by_hand, [call])
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(seen) >= 4
    if name in ("OneCycleLR", "CyclicLR"):
        assert len({momentum for _, momentum in seen}) >= 4
    assert differences(everything(optimizer), everything(manual)) == set()


def test_a_scheduler_fills_an_lr_tensor_in_place():
    weights = make()
    optimizer = PRO(weights, lr=torch.tensor(0.5))
    lr = optimizer.param_groups[0]["lr"]
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for call in range(3):
        train(optimizer, weights, [call])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.0625


FIXED = {
    "rank": (PRO, 2),
    "variant": (PRO, "smok-hop"),
    "state_dtype": (PRO, torch.bfloat16),
    "init_eigenvalue": (PRO, 0.1),
    "state_dtype of KL-Shampoo": (KL, torch.bfloat16),
    "init_eigenvalue of KL-Shampoo": (KL, 0.1),
}


def loaded(optimizer):
    weights = copies(optimizer.param_groups[0]["params"])
    fresh = type(optimizer)(weights)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return fresh


LIVES = {
    "after steps": lambda o: o,
    "after load_state_dict": loaded,
    "after deepcopy": copy.deepcopy,
    "after unpickling": lambda o: pickle.loads(pickle.dumps(o)),
}


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
@pytest.mark.parametrize("case", FIXED)
def test_changing_what_the_state_was_made_with_raises_and_moves_nothing(case, life):
    cls, value = FIXED[case]
    name = case.split()[0]
    weights = make()
    optimizer = life(train(cls(weights, lr=0.1), weights, range(2)))
    weights = optimizer.param_groups[0]["params"]
    before, old = everything(optimizer), optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        train(optimizer, weights, [2])
    assert differences(before, everything(optimizer)) == set()
    optimizer.param_groups[0][name] = old
    train(optimizer, weights, [2])
    assert {i for i, _ in differences(before, everything(optimizer))} == set(range(len(weights)))


@pytest.mark.parametrize("case", FIXED)
def test_changing_it_before_there_is_state_is_as_good_as_passing_it(case):
    cls, value = FIXED[case]
    name = case.split()[0]
    a, b = make(), make()
    optimizer = cls(a)
    optimizer.param_groups[0][name] = value
    train(optimizer, a, range(3))
    assert differences(everything(optimizer), everything(train(made(cls, b, **{name: value}), b, range(3)))) == set()


@pytest.mark.parametrize("life", ["instance", "global"])
def test_step_hooks_fire_once_a_step(method, life):
    cls, kwargs = method
    weights, bias = make(), make([(5,)])
    optimizer = cls([{"params": weights}, {"params": bias, "algorithm": "adamw", "lr": 0.01}], **kwargs)
    calls = []

    def before(*args):
        calls.append(("before", args[0], weights[0].detach().clone()))

    def after(*args):
        calls.append(("after", args[0], weights[0].detach().clone()))

    if life == "instance":
        handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    else:
        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        train(optimizer, [*weights, *bias], range(3))
    finally:
        for handle in handles:
            handle.remove()
    assert [when for when, _, _ in calls] == ["before", "after"] * 3
    assert all(who is optimizer for _, who, _ in calls)
    assert not same_bits(calls[-2][2], calls[-1][2])


def test_the_default_dtype_does_not_matter(method, backend):
    cls, kwargs = method
    runs = []
    for default in (torch.float32, torch.float64, torch.bfloat16):
        weights = make()
        torch.set_default_dtype(default)
        try:
            optimizer = cls(weights, backend=backend, precondition_frequency=3, **kwargs)
            train(optimizer, weights, range(5), missing=[(0, 2), (1, 2)])
        finally:
            torch.set_default_dtype(torch.float32)
        runs.append(everything(optimizer))
    assert differences(runs[0], runs[1]) == differences(runs[0], runs[2]) == set()


def test_steps_under_no_grad_and_inference_elsewhere_change_nothing(method):
    cls, kwargs = method
    runs = []
    for around in (False, True):
        weights = make()
        optimizer = cls(weights, **kwargs)
        for call in range(5):
            if around:
                with torch.no_grad():
                    train(optimizer, weights, [call])
                with torch.inference_mode():
                    (weights[0] @ weights[1]).sum()
            else:
                train(optimizer, weights, [call])
        runs.append(everything(optimizer))
    assert differences(*runs) == set()


def test_grad_scaler_skips_an_overflow_and_goes_on(method):
    cls, kwargs = method
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = cls([{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 0.01}], **kwargs)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for call in range(12):
        optimizer.zero_grad()
        loss = model(normal(8, 6, seed=1)).square().mean()
        scaler.scale(loss).backward()
        if call == 4:
            model[0].weight.grad[0, 0] = float("inf")
            before = everything(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if call == 4:
            assert differences(before, everything(optimizer)) == set()
            assert scaler.get_scale() == 512.0
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[5] < losses[0]
    assert optimizer.skipped() == {f"parameter {i} of group 0": 0 for i in range(2)}


def test_no_step_warns(method, backend):
    cls, kwargs = method
    weights = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(cls(weights, backend=backend, **kwargs), weights, range(12))
