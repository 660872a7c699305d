"""Checkpoints of earlier versions go on as they did there; tests/freeze.py makes the files and says what is in them.

Backends are those of tests/inputs.py, so that every file meets three orders of operations.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import freeze
from tests.distributed.checkpoints import read, written
from tests.inputs import same_bits
from tests.training import reloaded, silent

FOLDER = Path(__file__).parent / "data" / "frozen"
BEFORE_ITS_TIME = {"0.4.0": {"clip_threshold": None, "bf16_weights": "plain"}}
"""By version: settings that it did not have, so that steps are as they were: no bound, weights rounded to nearest."""
TURNED = {"0.4.0": ("U", "S", "Q_L", "Q_S", "Q_R")}
"""By version: keys whose entries have other signs today where a weight begins. A gradient leaves the signs of its
singular vectors open; the rule that picks them has changed, and no weight depends on it."""
GONE = {"trust", "stale"}
"""Keys of state that are read no more."""
FAINT = {("c4a04ab.pt", "bounded"): ("stack",), ("c4a04ab.pt", "bounded klshampoo"): ("wide", "stack")}
"""By file and case: weights whose gradient is a thousandth or fifty times what it was, of which lambda_0 fell at
once then, or grew. They have to go on as the specification says today."""
ROUNDING = 200
"""How far results may be apart, in units of the dtype's eps and of the tensor's largest entry. Measured over all files
and today's three orders of operations: 21. It was weights of Pro-KLShampoo: Newton-Schulz multiplies the rounding of
directions that the complement hardly has by up to 3.4445^5 = 485."""
HALF = 2
"""The same for a state in bfloat16, in units of its eps: a number near the middle of two neighbours may be stored as
either, which are up to 1 apart. For a weight beside such a state the unit is eps of how far it went. Measured: 0.14,
where one entry of M was stored as its other neighbour."""
FLIPS = 2
"""How many of a case's bfloat16 weights, some 110 entries, may be rounded to the other neighbour. Measured on masters,
as parts of the distance between neighbours: the three orders are 0.013 apart, summed over all entries. That is the
chance of one flip."""


@cache
def frozen(file):
    """Return what a file has."""
    return torch.load(FOLDER / file, weights_only=True)


CASES = [(path.name, name) for path in sorted(FOLDER.glob("*.pt")) for name in frozen(path.name)["cases"]]
every_case = pytest.mark.parametrize("file, name", CASES, ids=[f"{Path(file).stem}-{name}" for file, name in CASES])


def loaded(file, name, **more):
    """Return the case, its weights, and an optimizer of today's defaults with its state: the file brings its settings.

    Whatever has become the default since, or is missing in the file.
    """
    version, case = frozen(file)["version"], frozen(file)["cases"][name]
    weights, optimizer = freeze.build({**case, "settings": {}}, **{**BEFORE_ITS_TIME.get(version, {}), **more})
    with silent():
        optimizer.load_state_dict(case["state_dict"])
    return case, weights, optimizer


def saved_anew(case, weights, optimizer, **more):
    """Return weights and optimizer through a file of today's."""
    again = reloaded({**freeze.contents(weights, optimizer), "optimizer": optimizer.state_dict()})
    weights, optimizer = freeze.build({**case, "settings": {}, "weights": again["weights"]}, **more)
    optimizer.load_state_dict(again["optimizer"])
    return weights, optimizer


def assert_close(found, expected, bound, what):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    apart = (found.double() - expected.double()).abs().max()
    assert apart <= bound, f"{what}: {float(apart)} apart, bound {float(bound)}"


def assert_goes_on(found, file, case, but=()):
    """Compare weights and state with what the version's own steps led to, ``but`` some weights'."""
    after, turned = case["after"], TURNED.get(frozen(file)["version"], ())
    half = case["settings"]["state_dtype"] is not None
    flips = 0
    for name, W in ((name, W) for name, W in after["weights"].items() if name not in but):
        W_found, eps = found["weights"][name], torch.finfo(W.dtype).eps
        if W.dtype == torch.bfloat16:
            flips += int((W_found != W).sum())
            assert ((W_found - W).abs() <= eps * W.abs().maximum(W_found.abs())).all(), name
        elif half:
            way = (W.double() - case["weights"][name].double()).abs().max()
            assert_close(W_found, W, HALF * torch.finfo(torch.bfloat16).eps * way, name)
        else:
            assert_close(W_found, W, ROUNDING * eps * W.abs().max(), name)
    assert flips <= FLIPS
    names = [name for group in case["groups"] for name in group["params"]]
    assert found["state"].keys() == after["state"].keys()
    for i, own in ((i, own) for i, own in after["state"].items() if names[i] not in but):
        kept = {key: value for key, value in own.items() if key.partition(".")[0] not in GONE}
        assert found["state"][i].keys() >= kept.keys() and found["state"][i].keys().isdisjoint(own.keys() - kept)
        for key, value in kept.items():
            value_found, what = found["state"][i][key], f"{key} of {names[i]}"
            if key.startswith("step"):  # integers and lists until 0.4.0
                assert torch.as_tensor(value_found).tolist() == torch.as_tensor(value).tolist(), what
            elif not value.is_floating_point():
                assert same_bits(value_found, value), what
            else:
                if names[i] == "late" and key in turned:
                    value_found, value = value_found.abs(), value.abs()
                units = HALF if value.dtype == torch.bfloat16 else ROUNDING
                assert_close(value_found, value, units * torch.finfo(value.dtype).eps * value.abs().max(), what)


@every_case
def test_an_old_checkpoint_goes_on_as_it_did(file, name, path):
    """And is saved anew on the way. The steps move every weight and refresh: what is compared was not only copied."""
    case, weights, optimizer = loaded(file, name, backend=path)
    for call, given in enumerate(case["gradients"]):
        freeze.step(weights, optimizer, given)
        if call == 0:
            weights, optimizer = saved_anew(case, weights, optimizer, backend=path)
    assert all((W != case["after"]["weights"][key]).any() for key, W in case["weights"].items())
    before, after = case["state_dict"]["state"][0], case["after"]["state"][0]
    assert all((before[key] != after[key]).any() for key in ("Q_L", "L"))
    assert_goes_on(freeze.contents(weights, optimizer), file, case, but=FAINT.get((file, name), ()))


@pytest.mark.parametrize("file, name", FAINT)
def test_what_goes_on_by_another_rule_goes_on_as_the_specification(file, name):
    found = []
    for each in ("reference", "torch"):
        case, weights, optimizer = loaded(file, name, backend=each)
        for given in case["gradients"]:
            freeze.step(weights, optimizer, given)
        found.append(freeze.contents(weights, optimizer))
    assert_goes_on(found[1], file, {**case, "after": found[0]})
    old = dict(zip((n for g in case["groups"] for n in g["params"]), case["after"]["state"].values(), strict=True))
    new = dict(zip(old, found[0]["state"].values(), strict=True))
    for key in FAINT[file, name]:
        assert (old[key]["lambda_0"] != new[key]["lambda_0"]).any(), key


@pytest.mark.parametrize("name", frozen("0.4.0.pt")["cases"])
def test_todays_bound_changes_no_step_whose_gradients_are_in_proportion(name):
    """A file of 0.4.0 says nothing of a bound, and gets the optimizer's; "conv" begins with a gradient of zero."""
    case, weights, optimizer = loaded("0.4.0.pt", name, clip_threshold=5.0)
    for call, given in enumerate(case["gradients"]):
        freeze.step(weights, optimizer, given)
        if call == 0 and "conv" in weights:  # it moved by momentum and weight decay until 0.4.0
            assert same_bits(weights["conv"], case["weights"]["conv"])
    assert not any(optimizer.clipped().values())
    assert_goes_on(freeze.contents(weights, optimizer), "0.4.0.pt", case, but=("conv",))


def go_on_divided(file, name):
    """Load a case on every rank and take its steps; return the end on the first one, as bytes."""
    case, weights, optimizer = loaded(file, name, process_group=dist.group.WORLD)
    for given in case["gradients"]:
        freeze.step(weights, optimizer, given)
    return written(freeze.contents(weights, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("file, name", [case for case in CASES if case[1] in freeze.EVERY])
def test_an_old_checkpoint_goes_on_divided(file, name, pools):
    """One that was saved divided, and those of one process."""
    found = read(pools[2].run(go_on_divided, file, name)[0])
    assert_goes_on(found, file, frozen(file)["cases"][name])
