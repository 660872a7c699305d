"""Ask both optimizers, in every setting, what PyTorch's own tests ask of a step.

The checks are those of PyTorch's ``test_optim.py``, ``test_lrscheduler.py`` and ``test_swa_utils.py`` that concern an
optimizer; :mod:`tests.torch_optimizers` has the settings. Differences by design are in docs/torch-optim.md.
"""

import copy
import gc
import weakref
from collections import namedtuple

import pytest
import torch
from torch.optim import lr_scheduler

from tests.inputs import normal, same_bits, weight
from tests.torch_optimizers import (
    OURS,
    SCHEDULERS,
    Problem,
    errors,
    grouped,
    of_all,
    of_all_settings,
    of_our_settings,
)
from tests.training import contents, differences, same, silent


@pytest.mark.parametrize("error", errors(), ids=lambda error: error.optimizer_error_input.desc)
@pytest.mark.parametrize("cls", OURS)
def test_an_unfit_argument_is_an_error_of_the_constructor(cls, error):
    given = error.optimizer_error_input
    expected = pytest.warns if issubclass(error.error_type, Warning) else pytest.raises
    with expected(error.error_type, match=error.error_regex):
        cls(given.params, **given.kwargs)


@of_all
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_loss_falls_under_a_scheduler_of_all_groups(cls, name):
    """Also of those whose rate is a tensor, which it fills; that of the AdamW group is a number."""
    problem = Problem(cls, {"lr": torch.tensor(0.01)})
    groups = problem.optimizer.param_groups
    before, seen, lr = problem.loss().item(), set(), groups[0]["lr"]
    running = [make(problem.optimizer) for make in SCHEDULERS[name]]
    for _ in range(6):
        problem.steps(1, running)
        seen.add(tuple(float(group["lr"]) for group in groups))
    assert problem.loss().item() < before
    assert all(len(set(own)) > 1 for own in zip(*seen, strict=True)), "a rate that never changed"
    assert groups[0]["lr"] is lr


def stepped(problem):
    problem.steps(12)


def scheduled(problem):
    with silent():  # of the order of their steps
        problem.steps(2, [lr_scheduler.StepLR(problem.optimizer, 1)])


@of_all
def test_a_scheduled_rate_may_end_below_zero_by_rounding(cls):
    problem = Problem(cls, {})
    problem.steps(9, [lr_scheduler.LinearLR(problem.optimizer, end_factor=0.0, total_iters=7)])
    assert -1e-17 < problem.optimizer.param_groups[0]["lr"] < 0
    copied = Problem(cls, {})
    copied.optimizer.load_state_dict(problem.optimizer.state_dict())
    copied.steps(1)


def loaded(problem):
    problem.steps(2).optimizer.load_state_dict(copy.deepcopy(problem.optimizer.state_dict()))
    problem.steps(2)


def refused(problem):
    problem.steps(2)
    with pytest.raises(ZeroDivisionError):
        problem.optimizer.step(lambda: 1 / 0)
    with pytest.raises(ValueError):
        problem.optimizer.load_state_dict({"state": {}, "param_groups": []})


@of_all
@pytest.mark.parametrize("life", [stepped, scheduled, loaded, refused])
def test_an_optimizer_that_is_dropped_frees_its_state_at_once(cls, life):
    """Without the cycle collector; a reference to itself would keep the state until that runs."""
    problem = Problem(cls, {})
    gc.disable()
    try:
        life(problem)
        state = problem.optimizer.state[problem.weight]
        alive = [weakref.ref(problem.optimizer), *(weakref.ref(v) for v in state.values() if torch.is_tensor(v))]
        del problem, state
        assert not any(reference() is not None for reference in alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@of_our_settings
def test_a_tensor_lr_steps_as_its_number_does_and_is_only_read(cls, settings, dtype):
    number = Problem(cls, {**settings, "lr": 0.0625})  # a power of two: no product with a direction rounds
    lr = torch.tensor(0.0625, dtype=dtype, requires_grad=True)
    tensor = number.twin(lr=lr)
    tensor.optimizer.param_groups[0]["lr"] = lr  # the constructor's was copied
    for _ in range(6):
        assert differences(number.steps(1).optimizer, tensor.steps(1).optimizer) == set()
    assert lr.item() == 0.0625 and lr._version == 0 and lr.grad is None
    assert tensor.weight.is_leaf and tensor.weight.grad_fn is None


@of_all_settings
@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_a_step_without_gradients_returns_the_closures_loss(cls, settings, begun):
    """The closure runs once, with gradients enabled."""
    problem = Problem(cls, settings)
    problem.steps(3 if begun else 0)
    problem.optimizer.zero_grad()
    before, loss, enabled = contents(problem.optimizer), torch.tensor([1.0]), []

    def closure():
        enabled.append(torch.is_grad_enabled())
        return loss

    for outer in (torch.enable_grad, torch.no_grad):
        with outer():
            assert problem.optimizer.step(closure) is loss
            assert torch.is_grad_enabled() == (outer is torch.enable_grad)
    assert enabled == [True, True]
    assert problem.optimizer.step(closure=lambda: 2) == 2
    for old, new in zip(before, contents(problem.optimizer), strict=True):
        assert same(old, {k: new[k] for k in old})


@of_our_settings
def test_the_batched_step_is_the_one_by_one_step(cls, settings):
    """Layers freeze, thaw and miss gradients, beside scalars and empty weights; PyTorch's foreach is held so too."""
    runs = []
    for backend in (None, "reference", "torch"):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 3), torch.nn.Sigmoid()
        )
        odd = [torch.nn.Parameter(torch.ones(shape)) for shape in ((), (0,))]
        matrices, vectors = ([p for p in model.double().parameters() if (p.ndim == 2) == two] for two in (True, False))
        groups = grouped(cls, matrices, [*vectors, *odd])
        own = {"backend": backend} | ({"precision": None} if backend == "reference" else {})  # exact as its dtype
        optimizer = cls(groups, **{**settings, **own})
        for call in range(7 if backend else 0):
            optimizer.zero_grad()
            if call in (3, 5):
                model[2].requires_grad_(call == 5)
            if call != 2:
                (model(normal(3, 2, dtype=torch.float64)).sum() + sum(p.sum() for p in odd)).backward()
            optimizer.step()
        runs.append([p.detach() for p in (*model.parameters(), odd[0])])
    tolerance = 2**-7 if "state_dtype" in settings else 1e-9  # a rounding of half-precision state may fall either way
    for start, a, b in zip(*runs, strict=True):
        assert (a - b).norm() <= tolerance * (a - start).norm()


@of_all_settings
def test_weights_of_several_dtypes_step_as_if_alone(cls, settings):
    dtypes = (torch.bfloat16, torch.float64, torch.float32, torch.float16)  # bfloat16 may round by its place
    together, alone = ([weight(3, 4, seed=i, dtype=d) for i, d in enumerate(dtypes)] for _ in range(2))
    optimizer = cls(together, **settings)
    others = [cls([p], **settings) for p in alone]
    for call in range(3):
        for i, p in enumerate([*together, *alone]):
            p.grad = normal(3, 4, seed=10 * call + i % 4, dtype=p.dtype)
        for each in (optimizer, *others):
            each.step()
    assert all(map(same_bits, together, alone))
    assert all(p.isfinite().all() for p in together)


Pair = namedtuple("Pair", ["name", "param"])
WAYS = {
    "a list": lambda model: list(model.parameters()),
    "a tuple": lambda model: tuple(model.parameters()),
    "a generator": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "named tuples": lambda model: [Pair(*pair) for pair in model.named_parameters()],
    "values of a dict": lambda model: dict(model.named_parameters()).values(),
    "a group of a generator": lambda model: [{"params": model.parameters()}],
    "a group of names": lambda model: [{"params": model.named_parameters()}],
    "groups of single tensors": lambda model: [{"params": p} for p in model.parameters()],
    "a generator of groups": lambda model: ({"params": [p]} for p in model.parameters()),
}


@of_all
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_parameters_come_in_every_way_that_pytorch_takes(cls, way):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False))
    optimizer = cls(way(model))
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    for call in range(2):
        model(normal(3, 4, seed=call)).square().sum().backward()
        optimizer.step()
    assert not any(map(same_bits, before, model.parameters()))
    assert repr(optimizer).startswith(cls.__name__)


@of_all
def test_changed_defaults_are_those_of_later_groups(cls):
    optimizer = cls([weight(2, 3)])
    first = optimizer.param_groups[0]["lr"]
    optimizer.defaults["lr"] = 0.5
    optimizer.add_param_group({"params": weight(3, 4)})
    assert [group["lr"] for group in optimizer.param_groups] == [first, 0.5]


@of_all
def test_a_weight_given_twice_is_stepped_twice_after_a_warning(cls):
    once, twice = weight(3, 4), weight(3, 4)
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        optimizers = [cls([once]), cls([twice, twice])]
    for call in range(3):
        for p, optimizer in zip((once, twice), optimizers, strict=True):
            p.grad = normal(3, 4, seed=call)
            optimizer.step()
    start = weight(3, 4)
    assert (twice - start).norm() > 1.5 * (once - start).norm()
