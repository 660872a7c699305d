"""Groups, weights and state edited between steps: the optimizer goes on from what they are now, or says no."""

import warnings

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from prokl.engine.rows import KEPT
from tests.problems import relative

METHODS = [(ProKLShampoo, {"rank": 3}), (KLShampoo, {})]


def stepped(cls, kwargs, steps, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(6, 9, generator=g).to(dtype)) for _ in range(2)]
    optimizer = cls(parameters, **kwargs)
    step(parameters, optimizer, range(steps))
    return parameters, optimizer


def step(parameters, optimizer, times):
    for t in times:
        g = torch.Generator().manual_seed(100 + t)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
        optimizer.step()


def test_deleting_a_group_leaves_the_others_their_own_settings():
    first, second = (torch.nn.Parameter(torch.randn(6, 9)) for _ in range(2))
    optimizer = ProKLShampoo([{"params": [first], "rank": 2}, {"params": [second], "rank": 3}])
    step([first, second], optimizer, range(3))
    del optimizer.param_groups[0]
    kept = first.detach().clone()
    step([first, second], optimizer, range(3, 5))
    assert torch.equal(first, kept) and optimizer.state[second]["U"].shape[-1] == 3
    optimizer.param_groups[0]["rank"] = 4
    with pytest.raises(ValueError, match="rank=4.*rank=3"):
        step([second], optimizer, [5])


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_weights_converted_to_another_dtype_step_in_it(cls, kwargs):
    parameters, optimizer = stepped(cls, kwargs, 3)
    for p in parameters:
        p.data = p.data.double()
    step(parameters, optimizer, range(3, 6))
    assert optimizer.state[parameters[0]]["M"].dtype == torch.float64
    assert not torch.equal(parameters[0], parameters[0].float().double())


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_weights_converted_to_bfloat16_go_on_from_the_same_state(cls, kwargs):
    """Which stays float32: it is what it would have been beside the weights as they were."""
    exact, one = stepped(cls, kwargs, 3)
    converted, two = stepped(cls, kwargs, 3)
    for p in converted:
        p.data = p.data.bfloat16()
    for t in range(3, 14):
        for p, q in zip(exact, converted, strict=True):
            q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t)).bfloat16()
            p.grad = q.grad.float()
        one.step()
        two.step()
    for p, q in zip(exact, converted, strict=True):
        for key, value in one.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(two.state[q][key])), key


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("start, end", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float64")])
@pytest.mark.parametrize("kind", [{}, {"foreach": False}, {"fused": True}], ids=["", "single", "fused"])
def test_a_model_converted_under_adamw_is_told_before_anything_moves(cls, kwargs, start, end, kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 9, dtype=getattr(torch, start))
    adamw = {"params": [("bias", model.bias)], "algorithm": "adamw", "lr": 0.1, **kind}
    optimizer = cls([{"params": [("weight", model.weight)]}, adamw], **kwargs)

    def one_step():
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=model.bias.dtype)).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        one_step()
    model.to(getattr(torch, end))
    before, moment = [p.detach().clone() for p in model.parameters()], optimizer.state[model.weight]["M"].clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^bias is torch.{end} on cpu and its AdamW state still torch.{start} on"):
            one_step()
        assert all(map(torch.equal, before, model.parameters()))
        assert torch.equal(optimizer.state[model.weight]["M"], moment)
    optimizer.load_state_dict(optimizer.state_dict())  # as the message says
    one_step()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
def test_a_weight_on_the_meta_device_is_refused_whenever_it_comes_before_anything_moves(cls, kwargs, algorithm):
    own, shape = {"algorithm": algorithm, "lr": 0.1}, (6, 9)
    empty = torch.nn.Parameter(torch.empty(shape, device="meta"))
    says = "is on the meta device, which holds no values.*materialise the model"
    parameters, optimizer = stepped(cls, kwargs, 3)
    with pytest.raises(ValueError, match=f"^parameter 0 of group 1 {says}"):
        optimizer.add_param_group({"params": [empty], **own})
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(shape))], **own})
    optimizer.param_groups[1]["params"][0] = empty
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(ValueError, match=f"^parameter 0 of group 1 {says}"):
        step(parameters, optimizer, [3])
    assert all(map(torch.equal, before, parameters))
    optimizer.param_groups.pop()
    step(parameters, optimizer, [3])
    assert not any(map(torch.equal, before, parameters))


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_replaced_state_tensors_are_what_the_next_step_uses(cls, kwargs):
    plain, one = stepped(cls, kwargs, 12)
    moved, two = stepped(cls, kwargs, 6)
    for state in two.state.values():
        for key, value in state.items():
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value
    step(moved, two, range(6, 12))
    for p, q in zip(plain, moved, strict=True):
        assert torch.equal(p, q)
        assert two.state[q]["M"].equal(one.state[p]["M"])


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_cleared_state_starts_anew(cls, kwargs):
    parameters, optimizer = stepped(cls, kwargs, 6)
    optimizer.state.clear()
    before = parameters[0].detach().clone()
    step(parameters, optimizer, [6])
    assert torch.equal(parameters[0], before) and optimizer.state[parameters[0]]["step"] == 0
    fresh = cls([torch.nn.Parameter(p.detach().clone()) for p in parameters], **kwargs)
    twins = fresh.param_groups[0]["params"]
    step(twins, fresh, [6, 7])
    step(parameters, optimizer, [7])
    assert relative(parameters[0], twins[0]) == 0


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "newcomer, says",
    [
        (torch.zeros(54), r"has shape \(54,\).*at least 2 dimensions.*adamw.*flattened matrices .*as DeepSpeed's ZeRO"),
        (torch.zeros(6, 9, dtype=torch.complex64), "is complex"),
        (torch.zeros(6, 9).to_sparse(), "layout"),
        (torch.zeros(1, 9).expand(6, 9), "share memory"),
    ],
    ids=["flat", "complex", "sparse", "expanded"],
)
def test_what_a_trainer_puts_in_a_weights_place_is_checked_before_anything_moves(cls, kwargs, begun, newcomer, says):
    parameters, optimizer = stepped(cls, kwargs, 3 if begun else 0)
    before = parameters[1].detach().clone()
    swapped = torch.nn.Parameter(newcomer)
    optimizer.param_groups[0]["params"][0] = swapped
    for p in parameters[1:]:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=f"parameter 0 of group 0 {says}|parameter 0 of group 0 has .*{says}"):
        optimizer.step()
    assert torch.equal(parameters[1], before)
    optimizer.param_groups[0]["params"][0] = parameters[0]
    optimizer.step()


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_a_weight_removed_with_its_state_stays_removed(cls, kwargs):
    parameters, optimizer = stepped(cls, kwargs, 3)
    removed = optimizer.param_groups[0]["params"].pop(0)
    del optimizer.state[removed]
    step(parameters, optimizer, range(3, 6))
    assert removed not in optimizer.state
    assert optimizer.state_dict()["state"].keys() == {0}


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_what_a_wrapper_keeps_beside_the_state_is_kept_and_saved(cls, kwargs):
    """Lookahead and averaging wrappers put tensors of their own into ``optimizer.state[p]``."""
    parameters, optimizer = stepped(cls, kwargs, 0)
    late, early = parameters
    early.grad = torch.randn(6, 9)
    optimizer.step()
    slow = optimizer.state[early]["slow"] = early.detach().clone()
    optimizer.state[early]["count"] = 7
    step(parameters, optimizer, range(3))  # the other one begins
    assert optimizer.state[early]["slow"] is slow and optimizer.state[early]["count"] == 7
    saved = optimizer.state_dict()
    twin, fresh = stepped(cls, kwargs, 0)
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.state[twin[1]]["slow"], slow) and fresh.state[twin[1]]["count"] == 7
    for p, q in zip(parameters, twin, strict=True):
        with torch.no_grad():
            q.copy_(p)
    step(parameters, optimizer, range(3, 6))
    step(twin, fresh, range(3, 6))
    for p, q in zip(parameters, twin, strict=True):
        assert torch.equal(p, q)
    assert torch.equal(fresh.state[twin[1]]["slow"], slow)


def test_a_warning_made_an_error_comes_after_a_whole_step():
    dead, alive = (torch.nn.Parameter(torch.randn(6, 9)) for _ in range(2))
    optimizer = ProKLShampoo([dead, alive])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(99):
            dead.grad, alive.grad = torch.zeros(6, 9), torch.randn(6, 9)
            optimizer.step()
        before = alive.detach().clone()
        with pytest.raises(UserWarning, match="has not moved in 100 steps"):
            optimizer.step()
    assert not torch.equal(alive, before)
    assert optimizer.state[alive]["step"] == 99


def test_clocks_that_drift_apart_keep_a_bounded_number_of_sets_on_the_device():
    """Every set of refreshing or of moving matrices has an index and a mask of its own there."""
    parameters = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(12)]
    optimizer = ProKLShampoo(parameters, rank=2, precondition_frequency=2)
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        given = torch.rand(12, generator=g) < 0.5
        for p, own in zip(parameters, given.tolist(), strict=True):
            p.grad = torch.randn(3, 4, generator=g) if own else None
        optimizer.step()
    ((bucket,),) = optimizer.engine._buckets.values()
    assert len(bucket.rows.kept) == KEPT


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("only", [None, "M", "L", "Q_L", "inv_sqrt_lambda_L", "clipped", "skipped"])
def test_state_moved_through_data_is_what_the_next_step_uses(cls, kwargs, only):
    """As trainers do that move state off a device, and back, while something else needs its memory."""
    plain, one = stepped(cls, kwargs, 6)
    moved, two = stepped(cls, kwargs, 6)
    for state in two.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and only in (None, key):
                former = value.detach()
                value.data = value.data.clone()
                former.mul_(3).add_(1)  # somebody else's by now
    step(plain, one, range(6, 12))
    step(moved, two, range(6, 12))
    for p, q in zip(plain, moved, strict=True):
        assert torch.equal(p, q)
        for key, value in one.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(two.state[q][key])), key


def test_a_step_in_which_nothing_changed_but_lr_and_gradients_checks_nothing_anew(monkeypatch):
    optimizer, parameters = mixed()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.engine, "_look_anew", None)  # which a call would show
        for t in range(3):
            for group in optimizer.param_groups:
                group.update(lr=0.01 / (t + 1), weight_decay=0.1 * t, own_key=t)
            optimizer.zero_grad()
            given(parameters, t)
            optimizer.step()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="Invalid lr=-1.0"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()


def mixed():
    """An optimizer of begun, waiting and AdamW weights that has stepped until it has nothing more to make."""
    parameters = [torch.nn.Parameter(torch.randn(6, 9)) for _ in range(3)] + [torch.nn.Parameter(torch.randn(9))]
    a, b, waiting, bias = ((f"w{i}", p) for i, p in enumerate(parameters))
    groups = [
        {"params": [a, b], "transposed": [False, True], "split": [None, 3], "ns_coefficients": [2.0, -1.5, 0.5]},
        {"params": [waiting]},
        {"params": [bias], "algorithm": "adamw", "lr": 0.1, "betas": [0.9, 0.95]},
    ]
    optimizer = ProKLShampoo(groups, rank=2)
    for t in range(3):
        given(parameters, t)
        optimizer.step()
    return optimizer, parameters


def given(parameters, t):
    for i, p in enumerate(parameters):
        p.grad = None if i == 2 else torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i))


def group_of(i, **settings):
    return lambda optimizer, parameters: optimizer.param_groups[i].update(settings)


SETTINGS = {
    "momentum": 0.5,
    "beta2": 0.5,
    "eps": 0.1,
    "alpha_kl": 0.1,
    "ns_steps": 2,
    "ns_coefficients": (2.0, -1.0, 0.5),
}
SETTINGS |= {"ns_dtype": torch.float64, "precondition_frequency": 3, "clip_threshold": 2.0, "maximize": True}
SETTINGS |= {"adjust_lr_fn": "match_rms_adamw", "cautious_weight_decay": True, "backend": "reference"}
SETTINGS |= {
    "precision": "faithful",
    "cuda_graphs": False,
    "bf16_weights": "master",
    "rank": 2.0,
    "variant": "smok-hop",
}
SETTINGS |= {"state_dtype": torch.float64, "init_eigenvalue": 0.1}
CHANGES = {
    **{key: group_of(0, **{key: value}) for key, value in SETTINGS.items()},
    **{f"AdamW's {key}": group_of(2, **{key: value}) for key, value in (("eps", 0.1), ("amsgrad", True))},
    "how a weight is read": lambda o, p: o.param_groups[0]["transposed"].__setitem__(0, True),
    "a name": lambda o, p: o.param_groups[0]["param_names"].__setitem__(0, "other"),
    "a group": lambda o, p: o.param_groups.__setitem__(0, dict(o.param_groups[0])),
    "no group": lambda o, p: o.param_groups.pop(),
    "a new group": lambda o, p: o.add_param_group({"params": [("new", torch.nn.Parameter(torch.zeros(2, 3)))]}),
    "a weight": lambda o, p: o.param_groups[0]["params"].__setitem__(0, torch.nn.Parameter(torch.zeros(6, 9))),
    "the dtype of a weight": lambda o, p: setattr(p[0], "data", p[0].data.double()),
    "the shape of a weight": lambda o, p: setattr(p[0], "data", p[0].data[:5]),
    "a gradient for who had none": lambda o, p: setattr(p[2], "grad", torch.ones(6, 9)),
    "a weight that is frozen while it waits": lambda o, p: p[2].requires_grad_(False),
    "a sparse gradient": lambda o, p: setattr(p[0], "grad", torch.eye(6, 9).to_sparse()),
    "a sparse gradient of AdamW's": lambda o, p: setattr(p[3], "grad", torch.ones(9).to_sparse()),
    "the state of a weight": lambda o, p: o.state.__setitem__(p[0], dict(o.state[p[0]])),
    "the state of a weight that waits": lambda o, p: o.state.pop(p[2]),
    "AdamW's state": lambda o, p: o.state.pop(p[3]),
    "all state": lambda o, p: o.state.clear(),
    "a tensor of the state": lambda o, p: o.state[p[0]].update(M=o.state[p[0]]["M"].clone()),
    "a tensor of a piece's state": lambda o, p: o.state[p[1]].update({"M.1": o.state[p[1]]["M.1"].mT.mT}),
    "no tensor of the state": lambda o, p: o.state[p[0]].pop("U"),
    "a key of AdamW's in the state": lambda o, p: o.state[p[0]].update(exp_avg=torch.zeros(6, 9)),
    "a key of the matrix method in AdamW's": lambda o, p: o.state[p[3]].update(M=torch.zeros(9)),
    "the dtype of AdamW's state": lambda o, p: o.state[p[3]].update(exp_avg=torch.zeros(9, dtype=torch.float64)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_a_check_looks_at_is_checked_anew_when_it_changes(change, monkeypatch):
    optimizer, parameters = mixed()
    given(parameters, 3)
    change(optimizer, parameters)
    monkeypatch.setattr(optimizer.engine, "_look_anew", checked)
    with pytest.raises(Checked):
        optimizer.step()


class Checked(Exception):
    pass


def checked():
    raise Checked
