"""Checkpoints of earlier versions go on as they did there; tests/freeze.py makes the files and says what is in them.

Backends are those of tests/inputs.py, so that every file meets three orders of operations.
"""

import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import prokl
from prokl.engine.matrix_state import upgraded
from tests import freeze
from tests.distributed.checkpoints import read, written
from tests.inputs import same_bits
from tests.problems import relative
from tests.training import as_of_0_5, reloaded, silent

FOLDER = Path(__file__).parent / "data" / "frozen"
ROUNDING = 200
"""Largest distance of results, in units of the dtype's eps and of the tensor's largest entry. Measured over all files
and today's three orders of operations: 21. It was weights of Pro-KLShampoo: Newton-Schulz multiplies the rounding of
directions that the complement hardly has by up to 3.4445^5 = 485."""
HALF = 2
"""The same for a state in bfloat16, in units of its eps: a number near the middle of two neighbours may be stored as
either, which are up to 1 apart. For a weight beside such a state the unit is eps of how far it went. Measured: 0.14,
where one entry of M was stored as its other neighbour."""
FLIPS = 2
"""Number of a case's bfloat16 weights, some 110 entries, that may be rounded to the other neighbour. Measured on
masters, as parts of the distance between neighbours: the three orders are 0.013 apart, summed over all entries. That
is the chance of one flip."""


@cache
def frozen(file):
    """Return what a file has."""
    return torch.load(FOLDER / file, weights_only=True)


HALF_STATE = "bfloat16 state"
CASES = [
    (path.name, name)
    for path in sorted(FOLDER.glob("*.pt"))
    for name in frozen(path.name)["cases"]
    if (path.name, name) != ("0.5.0.pt", HALF_STATE)
]
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
            assert_close(W_found, W, HALF * torch.finfo(torch.bfloat16).eps * way, name)
        else:
            assert_close(W_found, W, ROUNDING * eps * W.abs().max(), name)
    assert flips <= FLIPS
    names = [name for group in case["groups"] for name in group["params"]]
    state = as_of_0_5(found["state"], half) if "L" in after["state"][0] else found["state"]
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
                units = HALF if value.dtype == torch.bfloat16 else ROUNDING
                assert_close(value_found, value, units * torch.finfo(value.dtype).eps * value.abs().max(), what)


def test_state_in_bfloat16_goes_on_nearer_to_exact_state():
    """The version rounded M and L in the weight's coordinates: its own steps are no measure of today's."""
    file = frozen("0.5.0.pt")["cases"][HALF_STATE]
    old, way = file["after"]["weights"], {}
    for kind, wide in (("found", None), ("exact", torch.float64)):
        case = file if wide is None else freeze.mapped(file, lambda t: t.double() if t.is_floating_point() else t)
        if wide is not None:
            for group in (case["settings"], *case["state_dict"]["param_groups"]):
                group["state_dtype"] = wide
        weights, optimizer = freeze.build({**case, "settings": {}}, backend="torch")
        optimizer.load_state_dict(case["state_dict"])
        for given in case["gradients"]:
            freeze.step(weights, optimizer, given)
        way[kind] = {name: p.detach().double() for name, p in weights.items()}
    far, near = (
        sum(float((W.double() - way["exact"][name]).norm()) for name, W in of.items() if name != "bias")
        for of in (old, way["found"])
    )
    print(f"from exact state: {far:.3f} in 0.5, {near:.3f} today")
    assert near < far


def test_a_folder_of_0_5_goes_on_through_one_file(tmp_path):
    """torch.distributed.checkpoint goes by keys, and reads none of before by itself."""

    def built():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 4)).double()
        return model, prokl.ProKLShampoo(prokl.param_groups(model, lr=0.02, adamw_lr=1e-3, matrix=["*.weight"]))

    def trained(model, optimizer, calls):
        for call in calls:
            for i, p in enumerate(model.parameters()):
                p.grad = freeze.normal(*p.shape, seed=100 * call + i)
            optimizer.step()

    model, optimizer = built()
    trained(model, optimizer, range(4))
    saved = get_optimizer_state_dict(model, optimizer)
    dcp.save(
        {"optimizer": {**saved, "state": as_of_0_5(saved["state"])}}, checkpoint_id=tmp_path / "folder", no_dist=True
    )
    again, other = built()
    again.load_state_dict(model.state_dict())
    trained(model, optimizer, range(4, 15))
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load({"optimizer": get_optimizer_state_dict(again, other)}, checkpoint_id=tmp_path / "folder", no_dist=True)
    dcp_to_torch_save(tmp_path / "folder", tmp_path / "file.pt")
    set_optimizer_state_dict(again, other, torch.load(tmp_path / "file.pt", weights_only=True)["optimizer"])
    trained(again, other, range(4, 15))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert relative(p, q) <= 1e-12


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
    assert all((before[key] != after[key]).any() for key in ("Q_L", "L" if "L" in before else "L_Q"))
    assert_goes_on(freeze.contents(weights, optimizer), case)


def test_a_checkpoint_of_0_4_is_refused_with_what_reads_it():
    case = frozen("0.5.0.pt")["cases"]["pro-klshampoo"]
    weights, optimizer = freeze.build({**case, "settings": {}})
    before = {name: W.detach().clone() for name, W in weights.items()}
    state = {i: {k: v for k, v in own.items() if k != "clipped"} for i, own in case["state_dict"]["state"].items()}
    with pytest.raises(ValueError, match="is of prokl 0.4 or older.*Load it with prokl 0.5 and save it there"):
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


def test_a_state_of_0_5_is_converted_in_float64():
    """Whatever torch's TF32 switches say: a basis off by their rounding would stay so until a refresh."""
    L = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    L, Q_L = L @ L.mT, torch.linalg.qr(L)[0]
    entry = {"M": L[:, :40].clone(), "L": L, "Q_L": Q_L, "clipped": torch.zeros(())}
    found, exact = (upgraded(each, "w") for each in (entry, {key: t.double() for key, t in entry.items()}))
    for key in ("M_Q", "L_Q", "Q_L"):
        assert torch.equal(found[key], exact[key].float()), key
