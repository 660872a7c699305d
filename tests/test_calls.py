"""Calls that nobody means: each is refused with the remedy, and nothing has changed then."""

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import prokl
from prokl import diagnostics
from prokl.algorithm import settings
from prokl.algorithm.settings import PRO_ADVANCED
from tests.inputs import KL, PRO, weight
from tests.training import differences, fine_and_odd, refused, silent, train


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))


def groups(**given):
    return prokl.param_groups(model(), **{"lr": 0.02, "adamw_lr": 1e-3, **given})


@pytest.mark.parametrize("cls", [PRO, KL])
def test_state_is_not_offloaded_to_a_device_without_values(cls):
    optimizer, twin = fine_and_odd(cls), fine_and_odd(cls)
    for device in ("meta", torch.device("meta")):
        with pytest.raises(ValueError, match=r"Invalid device='meta': it holds no values.*use 'cpu'"):
            optimizer.offload(device)
    assert differences(train(optimizer, [3]), train(twin, [3])) == set()


LOADED = {
    "a checkpoint": (
        lambda own: {"model": model().state_dict(), "opt": own},
        ValueError,
        r"load\(path\)\['opt'\]",
    ),
    "a path": (lambda own: "run/last.pt", TypeError, r"got str: .* as by torch.load"),
    "a Path": (lambda own: Path("last.pt"), TypeError, r"got \w*Path: .* as by torch.load"),
    "nothing": (lambda own: None, TypeError, "got NoneType: pass what state_dict"),
    "an optimizer": (lambda own: torch.optim.AdamW([weight(2, 3)]), TypeError, "got AdamW: pass what state_dict"),
    "an empty dict": (lambda own: {}, ValueError, "got a dict of nothing"),
    "a model's": (lambda own: model().state_dict(), ValueError, "got a dict of '0.weight', "),
    "no state": (lambda own: {"param_groups": own["param_groups"]}, ValueError, "got a dict of 'param_groups'"),
}


@pytest.mark.parametrize("make, error, says", LOADED.values(), ids=LOADED)
def test_what_is_no_state_dict_of_this_optimizer_is_named(make, error, says):
    optimizer, twin = fine_and_odd(PRO), fine_and_odd(PRO)
    loaded = make(fine_and_odd(PRO).state_dict())
    with refused(optimizer, says, error):
        optimizer.load_state_dict(loaded)
    assert differences(train(optimizer, [3]), train(twin, [3])) == set()


@pytest.mark.parametrize(
    "given, says",
    [
        ({"betas": (0.9, 0.99)}, "no betas: AdamW's are adamw_betas"),
        ({"momentum": 0.9}, r"no momentum: it goes to the constructor, ProKLShampoo\(groups, momentum=...\)"),
        ({"process_group": None}, "no process_group: it goes to the constructor"),
        ({"ns_steps": 3}, r"no ns_steps: it goes to the constructor, ProKLShampoo\(groups, ns_steps=...\)"),
        ({"eps": 1e-8}, "no eps: .*AdamW's is adamw_eps"),
        ({"fused": True}, 'no fused: it is AdamW.s, .* those with "algorithm": "adamw", as "fused"'),
        ({"adamw_wd": 0.1}, "argument 'adamw_wd': the nearest is 'adamw_weight_decay'"),
        ({"adamw_learning_rate": 0.1}, "argument 'adamw_learning_rate': the nearest is 'adamw_lr'"),
        ({"lr_adamw": 0.1}, "argument 'lr_adamw': the nearest is 'adamw_lr'"),
        ({"wd_adamw": 0.1}, "argument 'wd_adamw': the nearest is 'adamw_weight_decay'"),
        ({"learning_rate": 0.1}, "argument 'learning_rate': the nearest is 'lr'"),
        ({"typo": 1}, "argument 'typo': it takes model, lr, adamw_lr"),
    ],
    ids=str,
)
def test_a_foreign_argument_is_told_where_it_belongs(given, says):
    with pytest.raises(TypeError, match=says):
        groups(**given)


def test_every_argument_has_its_place():
    """A new argument is told where it belongs by the calls that do not take it."""
    constructor, groups_of = (inspect.signature(call).parameters.keys() for call in (PRO, prokl.param_groups))
    assert settings.CONSTRUCTOR == (constructor | PRO_ADVANCED.keys()) - {"params", "advanced"} - groups_of
    assert groups_of - {"model"} - constructor == settings.PARAM_GROUPS
    adamw = inspect.signature(torch.optim.AdamW).parameters.keys() - {"params", "betas", "differentiable"}
    assert adamw - constructor - PRO_ADVANCED.keys() == settings.ADAMW


def test_groups_without_named_rates_say_what_to_write():
    with pytest.raises(TypeError, match=r"lacks lr and adamw_lr: write param_groups\(model, lr=0.02, adamw_lr=...\)"):
        prokl.param_groups(model())
    with pytest.raises(TypeError, match="all else by name"):
        prokl.param_groups(model(), 0.02, 1e-3)


@pytest.mark.parametrize(
    "pattern, says",
    [
        ("bias", r"whole names, and '\*.bias' matches 3"),
        ("0", r"whole names, and '0.\*' matches 2"),
        (".*weight", r"fnmatch's, .* and '\*weight' matches 3"),
        (r"^1\.weight$", "'1.weight' matches 1"),
        ("module.1.weight", "'1.weight' matches 1"),
        ("2.Weight", "the nearest name is '2.weight'"),
        ("0.weigth", "the nearest name is '0.weight'"),
        ("router", "model.named_parameters"),
    ],
)
@pytest.mark.parametrize("argument", ["adamw", "matrix", "transposed", "split", "heads"])
def test_a_pattern_that_matches_nothing_says_which_one_was_meant(argument, pattern, says):
    with pytest.raises(ValueError, match=f"{argument}={re.escape(repr(pattern))} matches no parameter; .*{says}"):
        groups(**{argument: {pattern: 2} if argument in ("split", "heads") else [pattern]})


def test_names_with_brackets_match_as_they_are():
    blocks = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])})
    with pytest.raises(ValueError, match=r"'layers.1.weight' matches 1"):
        prokl.param_groups(blocks, lr=0.1, adamw_lr=0.1, adamw=["layers[1].weight"])
    blocks["a[0]"] = nn.Linear(8, 8)
    routes = prokl.param_groups(blocks, lr=0.1, adamw_lr=0.1, adamw=["a[0].weight"]).routes
    assert {route.names[0]: route.algorithm for route in routes}["a[0].weight"] == "adamw"


@pytest.mark.parametrize("given", ["tensor", "tensors", "module"])
def test_tensors_in_the_place_of_names_are_told_by_their_shape(given):
    w, layer = weight(8, 16), nn.Linear(8, 16)
    with pytest.raises(TypeError, match="adamw must hold patterns of names, got a .*pass names") as caught:
        groups(adamw={"tensor": w, "tensors": [w], "module": [layer]}[given])
    assert "tensor(" not in str(caught.value) and "Linear(" not in str(caught.value)


@pytest.mark.parametrize("shape, warned", [((32, 16, 1), 1), ((8, 16, 3), 1), ((4, 12, 12), 0), ((2, 5, 3), 0)])
def test_a_stack_that_looks_like_a_conv1d_is_told(shape, warned):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        PRO([("conv.weight", weight(*shape))])
    count, rows, cols = shape
    says = f"conv.weight of shape {shape} is read as a stack of {count} matrices of {rows} x {cols}."
    assert [str(w.message).startswith(says) for w in found] == [True] * warned


def test_what_is_no_health_is_refused_as_the_last_one():
    optimizer = fine_and_odd(PRO)
    numbers = diagnostics.health(optimizer).numbers
    with pytest.raises(TypeError, match=r"^since must be what the last health\(\) returned, .* got a dict: pass that"):
        diagnostics.health(optimizer, since=numbers)


def test_the_papers_settings_unpack_and_cannot_be_changed():
    assert dict(**prokl.PAPER) == dict(prokl.PAPER)
    assert (prokl.PAPER | {"rank": 64}).items() > prokl.PAPER.items()
    with pytest.raises(TypeError):
        prokl.PAPER["alpha_kl"] = 0.015


def test_the_doctor_is_there_without_an_import_of_its_own():
    assert prokl.doctor.main and "doctor" not in vars(type(prokl))
    with pytest.raises(AttributeError, match="no attribute 'nurse'"):
        prokl.nurse  # noqa: B018


SPECTRUM = torch.tensor([4.0, 3.0, 2.0, 1.0])
BAD_SPECTRA = [SPECTRUM.flip(0), SPECTRUM - 1]


@pytest.mark.parametrize("measure", [diagnostics.tail_am_gm, lambda *a: diagnostics.gap_bound(*a, 3)])
def test_figures_of_a_spectrum_refuse_what_is_none(measure):
    for spectrum in BAD_SPECTRA:
        with pytest.raises(ValueError, match="eigenvalues"):
            measure(spectrum, 1)
    for rank in (1.5, True, "auto", -1, 4, None):
        with pytest.raises(ValueError, match=f"Invalid rank={rank!r}: must be an integer from 0 to 3"):
            measure(SPECTRUM, rank)
    assert measure(torch.tensor([torch.nan] * 3), 1).isnan().all()
    for other in (0, -3, 2.5, True, "m"):
        with pytest.raises(ValueError, match=f"Invalid other_side={other!r}: must be an integer of at least 1"):
            diagnostics.gap_bound(SPECTRUM, 1, other)


@pytest.mark.parametrize("cls", [PRO, KL])
def test_an_optimizer_of_a_copy_says_once_that_nothing_trains(cls):
    trained, of_copy = model(), cls(prokl.param_groups(model(), lr=0.02, adamw_lr=1e-3))
    warned = []
    for _ in range(25):
        trained(torch.ones(2, 8)).sum().backward()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            of_copy.step()
        warned.append([str(w.message) for w in found])
    (message,) = warned[9]
    assert "None of the 6 weights of this optimizer had a gradient in its first 10 steps" in message
    assert not any(warned[:9] + warned[10:])


@pytest.mark.parametrize("why", ["a late gradient", "all frozen", "no weights"])
def test_steps_without_a_gradient_that_have_a_reason_say_nothing(why):
    w = weight(4, 6)
    w.requires_grad_(why != "all frozen")
    optimizer = PRO([w])
    if why == "no weights":
        optimizer.param_groups[0]["params"] = []
    with silent():
        for call in range(30):
            w.grad = torch.ones(4, 6) if why == "a late gradient" and call == 9 else None
            optimizer.step()
