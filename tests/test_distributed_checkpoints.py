"""What was saved on some ranks loads on others, under another wrapper or alone, and training goes on as it would."""

import re
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.checkpoints import DCP, SAVED, one_ranks_part, read, refuse, resume, save_and_go_on
from tests.distributed.pool import pools  # noqa: F401  (a fixture)
from tests.distributed.problem import Model, Plan, optimizer_of
from tests.inputs import same_bits

EXACT = 1e-9  # as in test_distributed_equal: orders of sums differ, which costs 4e-14 in thirty steps
ROUTES = ("nested", "flattened", "async", "full", "gathered")
# Each way of training by each other, and every route; nested on fewer ranks is in test_distributed_failures.
LOADS = [
    ("ddp", "alone", 1, "nested"),
    ("ddp", "ddp", 4, "flattened"),
    ("ddp", "fsdp", 4, "async"),
    ("fsdp", "alone", 1, "gathered"),
    ("fsdp", "ddp", 2, "broadcast"),
    ("fsdp", "fsdp", 4, "nested"),
    ("fsdp", "hsdp", 4, "flattened"),
    ("alone", "fsdp", 4, "full"),
]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def on(world, pools, function, *args):  # noqa: F811
    """What a function returns on each rank, of one in this process."""
    return [function(*args)] if world == 1 else pools[world].run(function, *args)


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):  # noqa: F811
    """By how it was trained on four ranks, or alone: the folder, and every rank's outcome and state at saving."""
    made = {}

    def of(how):
        if how not in made:
            folder = tmp_path_factory.mktemp(how)
            routes = tuple(route for route in ROUTES if how != "alone" or route in ("nested", "full"))
            found = on(1 if how == "alone" else 4, pools, save_and_go_on, Plan(how), folder, routes)
            made[how] = folder, [outcome for outcome, _ in found], read(found[0][1])
        return made[how]

    return of


def assert_same_state(one, other):
    assert one["state"].keys() == other["state"].keys()
    for i, own in one["state"].items():
        assert own.keys() == other["state"][i].keys()
        for key, value in own.items():
            assert same_bits(value, other["state"][i][key]), (i, key)
    assert listed(one["groups"]) == listed(other["groups"])


def listed(value):
    """The value with lists for tuples, which torch's full state dicts change into them."""
    if isinstance(value, dict):
        return {key: listed(own) for key, own in value.items()}
    return [*map(listed, value)] if isinstance(value, (list, tuple)) else value


@pytest.mark.slow
@pytest.mark.parametrize(("source", "how", "world", "route"), LOADS)
def test_a_run_goes_on_as_it_would_have(source, how, world, route, saved, pools):  # noqa: F811
    folder, expected, state = saved(source)
    found = on(world, pools, resume, Plan(how), folder, route)
    assert_same_state(state, read(found[0][1]))  # bit for bit, whatever its parts were
    exact = source == how and world == 4
    for (outcome, _), other in zip(found, expected if exact else expected[:1] * world, strict=True):
        assert outcome.losses == other.losses[-len(outcome.losses) :] or not exact
        np.testing.assert_allclose(outcome.losses, other.losses[-len(outcome.losses) :], rtol=EXACT)
        for name, value in other.weights.items():
            assert value.tobytes() == outcome.weights[name].tobytes() or not exact, name
            assert np.abs(value - outcome.weights[name]).max() < EXACT * np.abs(value).max(), name
        if exact:
            assert (outcome.skipped, outcome.clipped) == (other.skipped, other.clipped)


@pytest.mark.slow
def test_a_checkpoint_has_the_same_tensors_under_fully_qualified_names_however_it_was_trained(saved):
    tensors = {}
    for how in ("alone", "ddp", "fsdp"):
        for route in DCP[:2] if how != "alone" else ("nested",):
            metadata = dcp.FileSystemReader(saved(how)[0] / route).read_metadata().state_dict_metadata
            found = {k: v.size for k, v in metadata.items() if hasattr(v, "size")}
            tensors[how, route] = {k.replace(".state.", ".", 1): v for k, v in found.items() if "param_groups" not in k}
    expected = tensors["alone", "nested"]
    assert all(own == expected for own in tensors.values())
    for name, p in Model().named_parameters():
        assert expected[f"model.{name}"] == p.shape
        own = {k for k in expected if k.startswith(f"optimizer.{name}.")}
        assert own & {f"optimizer.{name}.{key}" for key in ("M", "M.0", "exp_avg")}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "other", "dtype"), [("ddp", "fsdp", torch.float32), ("fsdp", "alone", torch.bfloat16)])
def test_a_state_of_bfloat16_and_masters_of_bfloat16_weights_survive(how, other, dtype, pools, tmp_path):  # noqa: F811
    settings = {"state_dtype": torch.bfloat16} if dtype == torch.float32 else {"bf16_weights": "master"}
    plan = Plan(how, dtype=dtype, settings=settings)
    before = read(pools[4].run(save_and_go_on, plan, tmp_path, ("nested",), SAVED)[0][1])
    key, expected = ("M", torch.bfloat16) if dtype == torch.float32 else ("master", torch.float32)
    assert all(own[key].dtype == expected for own in before["state"].values() if key in own)
    assert any(key in own for own in before["state"].values())
    world, plan = 1 if other == "alone" else 2, Plan(other, dtype=dtype, settings=settings)
    assert_same_state(before, read(on(world, pools, resume, plan, tmp_path, "nested", SAVED)[0][1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "changed", "route", "named"),
    [
        ("fsdp", {"settings": {"rank": 2}}, "nested", r"\[12, 3\].*\[12, 2\].*weight\.U"),
        ("ddp", {"wide": 44}, "flattened", r"\[12, 40\].*\[12, 44\].*mixed\.(up|down)\.weight\.M"),
        ("fsdp", {"wide": 44}, "gathered", r"mixed\.up\.bias has exp_avg of shape \(40,\); must be .* \(44,\)"),
        ("ddp", {"method": "kl"}, "nested", r"Missing key.*\.weight\.R"),
        ("ddp", {"method": "kl", "convolution": True}, "gathered", r"and no tensor R where KLShampoo needs"),
    ],
    ids=["rank", "shape", "shape, gathered", "method", "method, gathered"],
)
def test_what_does_not_fit_is_named_on_every_rank_and_nothing_changes(how, changed, route, named, saved, pools):  # noqa: F811
    folder, _, _ = saved("ddp")
    for kind, message, differs in pools[4].run(refuse, Plan(how, **changed), folder, route):
        assert kind in ("ValueError", "CheckpointException"), message
        assert re.search(named, message, re.DOTALL), message
        assert differs == []


@pytest.mark.slow
def test_a_truncated_file_is_an_error_on_every_rank(saved, pools, tmp_path):  # noqa: F811
    folder, _, _ = saved("ddp")
    shutil.copytree(folder / "nested", tmp_path / "nested")
    largest = max((tmp_path / "nested").glob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    found = pools[4].run(refuse, Plan("ddp"), tmp_path, "nested")
    assert [kind for kind, _, _ in found] == ["CheckpointException"] * 4
    weights = [key for _, _, differs in found for key in differs if key.startswith("weight")]
    assert weights == []


@pytest.mark.slow
def test_one_ranks_part_is_refused_by_one_process_and_by_another_rank(pools, tmp_path):  # noqa: F811
    for kind, message in pools[2].run(one_ranks_part, Plan("ddp"), tmp_path):  # what one cannot load, none does
        assert kind == "ValueError" and "is held by rank" in message and "gather_state_dict()" in message
    model = Model().to(torch.float64)
    optimizer = optimizer_of(model, Plan())
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(Exception, match=r"gather_state_dict\(\)"):
        optimizer.load_state_dict(torch.load(tmp_path / "0", weights_only=False))
    assert not optimizer.state
    assert all(same_bits(p, q) for p, q in zip(weights, model.parameters(), strict=True))
