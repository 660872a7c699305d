"""What PyTorch's own optimizer tests ask of a step, asked of both optimizers in every setting.

The checks are those of PyTorch's ``test_optim.py``, ``test_lrscheduler.py`` and ``test_swa_utils.py`` that concern an
optimizer; :mod:`tests.torch_optimizers` has the settings. What differs by design is in docs/torch-optim.md.
"""

import copy
import gc
import warnings
import weakref
from collections import namedtuple

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from tests.inputs import normal, same_bits, weight
from tests.problems import made
from tests.torch_optimizers import (
    OURS,
    SCHEDULERS,
    Problem,
    equal,
    grouped,
    of_all,
    of_all_settings,
    of_our_settings,
)

ERRORS = [(info, error) for info in OURS for error in info.optim_error_inputs_func("cpu", torch.float32)]


@pytest.mark.parametrize("info, error", ERRORS, ids=lambda x: x.name if x in OURS else x.optimizer_error_input.desc)
def test_what_an_optimizer_cannot_take_is_an_error_of_its_constructor(info, error):
    given = error.optimizer_error_input
    expected = pytest.warns if issubclass(error.error_type, Warning) else pytest.raises
    with expected(error.error_type, match=error.error_regex):
        made(info.optim_cls, given.params, **given.kwargs)


@of_all_settings
def test_the_loss_goes_the_right_way(info, chosen):
    """Of sliced weights, under schedulers."""
    problem = Problem(info, chosen.kwargs, contiguous=False)
    # Chance decides the first few: gradients hardly turn here, and a bfloat16 U, orthonormal to 2^-9, leaves more
    # rounding than gradient in the complement, of which Newton-Schulz makes full steps. Of 60 such problems 19 went up
    # in 8 steps; this one wanders for some 50, in which these schedulers would end its rate.
    wanders = "state_dtype" in chosen.kwargs
    schedulers = () if wanders else SCHEDULERS["StepLR and ReduceLROnPlateau"]
    running = [make(problem.optimizer) for make in schedulers]
    before = problem.loss().item()
    problem.steps(80 if wanders else 24, running)
    assert problem.improves(before, problem.loss().item())
    assert not problem.weight.is_contiguous()


@of_all
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_loss_goes_down_under_a_scheduler_that_sets_the_rates_of_all_groups(info, name):
    """Also of those whose rate is a tensor, which it fills; that of the AdamW group is a number."""
    problem = Problem(info, {"lr": torch.tensor(0.01)})
    groups = problem.optimizer.param_groups
    before, seen, lr = problem.loss().item(), set(), groups[0]["lr"]
    running = [make(problem.optimizer) for make in SCHEDULERS[name]]
    for _ in range(6):
        problem.steps(1, running)
        seen.add(tuple(float(group["lr"]) for group in groups))
    assert problem.loss().item() < before
    assert all(len(set(own)) > 1 for own in zip(*seen, strict=True)), "a rate that never changed"
    assert groups[0]["lr"] is lr


@of_all
def test_weight_averaging_takes_the_weights_and_its_scheduler_the_rate(info):
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) == two] for two in (True, False))
    optimizer = info.optim_cls(grouped(info, matrices, vectors))
    averaged, scheduler = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, swa_lr=0.005, anneal_epochs=2)
    total = torch.zeros_like(matrices[0])
    for call in range(4):
        optimizer.zero_grad()
        model(normal(8, 5, seed=call)).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
        scheduler.step()
        total += matrices[0].detach()
    swa_utils.update_bn([normal(8, 5)], averaged)
    torch.testing.assert_close(averaged.module[0].weight, total / 4)
    assert averaged.module[1].num_batches_tracked == 1 and optimizer.param_groups[0]["lr"] == 0.005


def stepped(problem):
    problem.steps(12)


def scheduled(problem):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of the order of their steps
        problem.steps(2, [lr_scheduler.StepLR(problem.optimizer, 1)])


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
def test_an_optimizer_that_is_dropped_frees_its_state_at_once(info, life):
    """Without the cycle collector; a reference to itself would keep the state until that runs."""
    problem = Problem(info, {})
    gc.disable()
    try:
        life(problem)
        state = problem.optimizer.state[problem.weight]
        alive = [weakref.ref(problem.optimizer), *(weakref.ref(v) for v in state.values() if torch.is_tensor(v))]
        del problem, state
        assert not any(reference() is not None for reference in alive)
    finally:
        gc.enable()


@of_our_settings
def test_a_tensor_lr_steps_as_its_number_does_and_is_only_read(info, chosen):
    number = Problem(info, {**chosen.kwargs, "lr": 0.0625})  # a power of two: no product with it rounds
    lr = torch.tensor(0.0625, requires_grad=True)
    tensor = number.twin(lr=lr)
    tensor.optimizer.param_groups[0]["lr"] = lr  # the constructor's was copied
    for _ in range(6):
        assert equal(number.steps(1).contents(), tensor.steps(1).contents())
    assert lr.item() == 0.0625 and lr._version == 0 and lr.grad is None
    assert tensor.weight.is_leaf and tensor.weight.grad_fn is None


@of_all_settings
def test_groups_step_with_their_own_rate_and_decay(info, chosen):
    """Against an optimizer a group: whatever is set for one is not for the other."""
    shapes = [(6, 4), (4, 6)]
    together, apart = ([weight(*shape, seed=i) for i, shape in enumerate(shapes)] for _ in range(2))
    own = [{**chosen.kwargs, "lr": lr, "weight_decay": decay} for lr, decay in ((0.25, 0.0), (0.5, 0.125))]
    one = info.optim_cls([{"params": [p], **k} for p, k in zip(together, own, strict=True)], lr=1e-28)
    others = [info.optim_cls([p], **k) for p, k in zip(apart, own, strict=True)]
    for call in range(5):
        for p, q in zip(together, apart, strict=True):
            p.grad, q.grad = (normal(*p.shape, seed=call) for _ in range(2))
        for optimizer in (one, *others):
            optimizer.step()
    assert all(map(same_bits, together, apart))


@of_all_settings
def test_a_rate_of_next_to_nothing_moves_nothing(info, chosen):
    still = weight(3, 4)
    before = still.detach().clone()
    optimizer = info.optim_cls([{"params": [weight(4, 5)], **chosen.kwargs}, {"params": [still]}], lr=1e-28)
    for call in range(5):
        for group in optimizer.param_groups:
            group["params"][0].grad = normal(*group["params"][0].shape, seed=call)
        optimizer.step()
    assert same_bits(still, before)


@of_all_settings
@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_a_step_without_gradients_changes_nothing_and_returns_the_closures_loss(info, chosen, begun):
    """Of a closure that runs once, with gradients enabled."""
    problem = Problem(info, chosen.kwargs)
    problem.steps(3 if begun else 0)
    problem.optimizer.zero_grad()
    before, loss, enabled = problem.contents(), torch.tensor([1.0]), []

    def closure():
        enabled.append(torch.is_grad_enabled())
        return loss

    for outer in (torch.enable_grad, torch.no_grad):
        with outer():
            assert problem.optimizer.step(closure) is loss
            assert torch.is_grad_enabled() == (outer is torch.enable_grad)
    assert enabled == [True, True]
    assert problem.optimizer.step(closure=lambda: 2) == 2
    for old, new in zip(before, problem.contents(), strict=True):
        assert equal(old, {k: new[k] for k in old})


@of_all_settings
def test_gradients_of_zero_move_nothing(info, chosen):
    p = weight(5, 1)
    before = p.detach().clone()
    optimizer = info.optim_cls([p], **({"weight_decay": 0.0} | chosen.kwargs))
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert same_bits(p, before)


@of_our_settings
def test_the_batched_step_is_the_one_by_one_step(info, chosen):
    """As foreach is the loop: layers freeze, thaw and miss gradients, beside a scalar and an empty weight."""
    runs = []
    for backend in (None, "reference", "torch"):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 3), torch.nn.Sigmoid()
        )
        odd = [torch.nn.Parameter(torch.ones(shape)) for shape in ((), (0,))]
        matrices, vectors = ([p for p in model.double().parameters() if (p.ndim == 2) == two] for two in (True, False))
        groups = grouped(info, matrices, [*vectors, *odd])
        own = {"backend": backend} | ({"precision": None} if backend == "reference" else {})  # exact as its dtype
        optimizer = info.optim_cls(groups, **{**chosen.kwargs, **own})
        for call in range(7 if backend else 0):
            optimizer.zero_grad()
            if call in (3, 5):
                model[2].requires_grad_(call == 5)
            if call != 2:
                (model(normal(3, 2, dtype=torch.float64)).sum() + sum(p.sum() for p in odd)).backward()
            optimizer.step()
        runs.append([p.detach() for p in (*model.parameters(), odd[0])])
    tolerance = (
        2**-7 if "state_dtype" in chosen.kwargs else 1e-9
    )  # a rounding of half-precision state may fall either way
    for start, a, b in zip(*runs, strict=True):
        assert (a - b).norm() <= tolerance * (a - start).norm()


@of_all_settings
def test_weights_of_several_dtypes_in_one_group_step_as_if_each_were_alone(info, chosen):
    dtypes = (torch.bfloat16, torch.float64, torch.float32, torch.float16)  # bfloat16 may round by its place
    together, alone = ([weight(3, 4, seed=i, dtype=d) for i, d in enumerate(dtypes)] for _ in range(2))
    optimizer = info.optim_cls(together, **chosen.kwargs)
    others = [info.optim_cls([p], **chosen.kwargs) for p in alone]
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
def test_parameters_come_in_every_way_that_pytorch_takes(info, way):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False))
    optimizer = info.optim_cls(way(model))
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    for call in range(2):
        model(normal(3, 4, seed=call)).square().sum().backward()
        optimizer.step()
    assert not any(map(same_bits, before, model.parameters()))
    assert repr(optimizer).startswith(info.name)


@of_all
def test_defaults_that_are_changed_are_those_of_groups_added_later(info):
    optimizer = info.optim_cls([weight(2, 3)])
    first = optimizer.param_groups[0]["lr"]
    optimizer.defaults["lr"] = 0.5
    optimizer.add_param_group({"params": weight(3, 4)})
    assert [group["lr"] for group in optimizer.param_groups] == [first, 0.5]


@of_all
def test_a_step_inside_backward_is_the_step_after_it(info):
    """One optimizer a weight, called when its gradient is there."""
    runs = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False))
        each = {p: info.optim_cls([p]) for p in model.parameters()}

        def update(p, each=each):
            each[p].step()
            each[p].zero_grad()

        for p in each if inside else ():
            p.register_post_accumulate_grad_hook(update)
        for call in range(3):
            model(normal(3, 4, seed=call)).square().sum().backward()
            for p in () if inside else each:
                update(p)
        runs.append(list(each))
    assert all(map(same_bits, *runs))


@of_all
def test_a_weight_given_twice_is_stepped_twice_after_a_warning(info):
    once, twice = weight(3, 4), weight(3, 4)
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        optimizers = [info.optim_cls([once]), info.optim_cls([twice, twice])]
    for call in range(3):
        for p, optimizer in zip((once, twice), optimizers, strict=True):
            p.grad = normal(3, 4, seed=call)
            optimizer.step()
    start = weight(3, 4)
    assert (twice - start).norm() > 1.5 * (once - start).norm()
