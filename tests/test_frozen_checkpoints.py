"""Checkpoints of earlier versions go on as they did there; tests/freeze.py makes the files and says what is in them.

Backends are those of tests/inputs.py, so that every file meets three orders of operations.
"""

import re
import warnings
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
ROUNDING = 200
"""Largest distance of results, in units of the dtype's eps and of the tensor's largest entry. Measured over all files
and today's three orders of operations: 21. It was weights of Pro-KLShampoo: Newton-Schulz multiplies the rounding of
directions that the complement hardly has by up to 3.4445^5 = 485."""
HALF = 2
"""The same for a state in bfloat16, in units of its eps: a number near the middle of two neighbours may be stored as
either, which are up to 1 apart, and bases follow from such factors."""
WAY = 5
"""The same for a weight beside such a state, in units of eps of how far it went. Measured: 3.9, as 0.6 rounded inverse
roots to bfloat16 at every step, and 0.14 where today's are rounded so."""
FLIPS = 2
"""Number of a case's bfloat16 weights, some 110 entries, that may be rounded to the other neighbour. Measured on
masters, as parts of the distance between neighbours: the three orders are 0.013 apart, summed over all entries. That
is the chance of one flip."""


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
    case = frozen(file)["cases"][name]
    weights, optimizer = freeze.build({**case, "settings": {}}, **more)
    with silent():
        warnings.filterwarnings("ignore", "The loaded state dict has")  # what it was built with is not the file's
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


def assert_goes_on(found, case):
    """Compare weights and state with what the version's own steps led to."""
    after = case["after"]
    half = case["settings"]["state_dtype"] is not None
    flips = 0
    for name, W in after["weights"].items():
        W_found, eps = found["weights"][name], torch.finfo(W.dtype).eps
        if W.dtype == torch.bfloat16:
            flips += int((W_found != W).sum())
            assert ((W_found - W).abs() <= eps * W.abs().maximum(W_found.abs())).all(), name
        elif half:
            way = (W.double() - case["weights"][name].double()).abs().max()
            assert_close(W_found, W, WAY * torch.finfo(torch.bfloat16).eps * way, name)
        else:
            assert_close(W_found, W, ROUNDING * eps * W.abs().max(), name)
    assert flips <= FLIPS
    names = [name for group in case["groups"] for name in group["params"]]
    state = found["state"]
    assert state.keys() == after["state"].keys()
    for i, own in after["state"].items():
        assert state[i].keys() == own.keys()
        for key, value in own.items():
            value_found, what = state[i][key], f"{key} of {names[i]}"
            if key.startswith("step"):
                assert torch.as_tensor(value_found).tolist() == torch.as_tensor(value).tolist(), what
            elif not value.is_floating_point():
                assert same_bits(value_found, value), what
            else:
                if half and key.startswith("inv_sqrt"):  # 0.6.0 kept them in bfloat16, too
                    value_found = value_found.to(value.dtype)
                exact = not half or key.partition(".")[0] in ("lambda_0", "clipped")
                units, dtype = (ROUNDING, value.dtype) if exact else (HALF, torch.bfloat16)
                assert_close(value_found, value, units * torch.finfo(dtype).eps * value.abs().max(), what)


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
    assert all((before[key] != after[key]).any() for key in ("Q_L", "L_Q"))
    assert_goes_on(freeze.contents(weights, optimizer), case)


@pytest.mark.parametrize("name", ["pro-klshampoo", "klshampoo", "divided"])
def test_a_checkpoint_of_0_5_is_refused_with_what_reads_it(name):
    """Its M, L and R are under these names, in the weight's coordinates."""
    case = frozen("0.6.0.pt")["cases"][name]
    weights, optimizer = freeze.build({**case, "settings": {}})
    before = {name: W.detach().clone() for name, W in weights.items()}
    state = {
        i: {re.sub(r"^([MLR])_Q", r"\1", key): value for key, value in own.items()}
        for i, own in case["state_dict"]["state"].items()
    }
    with pytest.raises(ValueError, match="is of prokl 0.5 or older.*Load it with prokl 0.6 and save it there"):
        optimizer.load_state_dict({**case["state_dict"], "state": state})
    assert not optimizer.state and all(torch.equal(W, before[name]) for name, W in weights.items())


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
    assert_goes_on(found, frozen(file)["cases"][name])
