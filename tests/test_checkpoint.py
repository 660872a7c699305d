"""Saving and loading: a run that is interrupted continues bit for bit, and a wrong checkpoint changes nothing.

The common run has everything in it that a checkpoint could lose: weights of both orientations in one bucket, a
late starter among them, a stack with a late matrix, skipped and missing gradients, a fused weight and an AdamW group.
"""

import copy
import io
import pickle
from functools import partial

import numpy as np
import pytest
import torch

from prokl.engine.checkpoint import with_step_tensors
from tests.distributed.checkpoints import load, save
from tests.distributed.placements import BAD, LATE, PERIOD, SHAPES
from tests.distributed.placements import Run as AnyRun
from tests.inputs import BACKENDS, KL, PRO, VARIANTS, both, same_bits, weight
from tests.training import (
    COPIES,
    OTHERS,
    contents,
    differences,
    fine_and_odd,
    named,
    refused,
    reloaded,
    same,
    train,
    weights_of,
)

METHODS = {**{variant: {"cls": PRO, "variant": variant} for variant in VARIANTS}, "klshampoo": {"cls": KL}}
DTYPES = {  # of the weights, of the state
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, bfloat16 state": (torch.bfloat16, torch.bfloat16),
    "bfloat16, float32 state": (torch.bfloat16, torch.float32),
    "float32, bfloat16 state": (torch.float32, torch.bfloat16),
    "float64, float32 state": (torch.float64, torch.float32),
}
# Both methods in every dtype, each backend in every other; the variants and masters once.
CASES = {
    f"{method}-{name}": {**METHODS[method], "backend": BACKENDS[(i + j) % 2], "dtype": dtype, "state_dtype": state}
    for i, method in enumerate(("pro-klshampoo", "klshampoo"))
    for j, (name, (dtype, state)) in enumerate(DTYPES.items())
}
CASES |= {variant: METHODS[variant] for variant in VARIANTS[1:]}
CASES["Newton-Schulz in half precision"] = {"ns_dtype": torch.bfloat16}
CASES["as published"] = {"init_eigenvalue": 0.1, "clip_threshold": None}
CASES |= {
    f"{cls.__name__}-masters": {"cls": cls, "dtype": torch.bfloat16, "bf16_weights": "master"} for cls in (PRO, KL)
}
SOME = {
    name: SHAPES[name] for name in ("square3", "wide", "late", "experts", "qkv", "conv", "sometimes", "table", "gains")
}
CALLS = BAD[-1] + 1


Run = partial(AnyRun, shapes=SOME, dtype=torch.float32, weight_decay=0.1)


@pytest.fixture(params=["pro-klshampoo", "klshampoo"])
def method(request):
    return METHODS[request.param]


def loaded(state, run, given):
    """A new run that goes on with another's weights and this state, as a new process would make it.

    Settings come with the state, whatever they were before.
    """
    other = Run(**given)
    (group, _), of_state = other.optimizer.param_groups, OTHERS.keys() - {"backend", "precision", "cuda_graphs"}
    group.update({key: OTHERS[key] for key in of_state & group.keys()}, split=None)
    other.net.load_state_dict(run.net.state_dict())
    other.optimizer.load_state_dict(state)
    return other


def with_steps_as_numbers(run):
    state = copy.deepcopy(run.optimizer.state_dict())
    for own in state["state"].values():
        steps = {key: value.tolist() for key, value in own.items() if key.startswith("step")}
        own.update({} if "exp_avg" in own else steps)  # AdamW's are tensors
    return state


def through_a_distributed_checkpoint(run, given, route, folder):
    other = Run(**given)
    save(run, folder / route, route)
    load(other, folder / route, route)
    return other


WAYS = {
    "alive": lambda run, given, folder: loaded(run.optimizer.state_dict(), run, given),
    "a file": lambda run, given, folder: loaded(reloaded(run.optimizer.state_dict()), run, given),
    "numbers": lambda run, given, folder: loaded(with_steps_as_numbers(run), run, given),
    "deepcopy": lambda run, given, folder: COPIES["deepcopy"](run),
    "pickle": lambda run, given, folder: COPIES["pickle"](run),
    "nested": lambda run, given, folder: through_a_distributed_checkpoint(run, given, "nested", folder),
    "flattened": lambda run, given, folder: through_a_distributed_checkpoint(run, given, "flattened", folder),
    "full": lambda run, given, folder: through_a_distributed_checkpoint(run, given, "full", folder),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_a_run_carried_over_in_any_way_goes_on_the_same(given, tmp_path):
    """Whatever torch's generator is; and the state is in the dtype that was asked for, before and after."""
    # Before a refresh, in a call without a gradient for one weight; just refreshed; before the late starter begins.
    ways = {PERIOD: ["a file"], PERIOD + 1: ["a file", "alive"], LATE: WAYS}
    run, others = Run(**given), []
    for call in range(CALLS):
        if call == PERIOD:
            run.optimizer.state[run.weights["wide"]]["clipped"].add_(3)  # none is bounded here
        for way in ways.get(call, ()):
            others.append((call, way, WAYS[way](run, given, tmp_path)))
            assert differences(run.optimizer, others[-1][2].optimizer) == set(), (call, way)
        run.train(call, call + 1)
    torch.manual_seed(0)
    before, expected = torch.get_rng_state(), contents(run.optimizer)
    for call, way, other in others:
        assert differences(expected, other.train(call, CALLS).optimizer) == set(), (call, way)
        assert other.optimizer.skipped() == run.optimizer.skipped()
        assert other.optimizer.state_dict()["param_groups"] == run.optimizer.state_dict()["param_groups"], way
    assert torch.equal(torch.get_rng_state(), before)
    counts = run.optimizer.skipped()
    assert {name for name, count in counts.items() if count} == {"square3"} and counts["square3"] == len(BAD)
    dtype, state_dtype = run.weights["wide"].dtype, given.get("state_dtype")
    stored = state_dtype or (torch.float32 if dtype == torch.bfloat16 else dtype)
    wide = torch.float64 if torch.float64 in (dtype, stored) else torch.float32
    dtypes = {"W": dtype, "step": torch.int64, "skipped": torch.int64, "lambda_0": wide, "clipped": wide}
    dtypes |= {f"inv_sqrt_{eigenvalues}": wide for eigenvalues in ("lambda_L", "lambda_R", "lambda_S", "mu")}
    dtypes |= dict.fromkeys(("Q_L", "Q_R"), torch.promote_types(stored, torch.float32))
    for name in counts:
        for key, value in run.optimizer.state[run.weights[name]].items():
            kind = key.partition(".")[0]
            assert not torch.is_tensor(value) or value.dtype == dtypes.get(kind, stored), (name, key)


def state_bytes(optimizer):
    return sum(v.numel() * v.itemsize for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))


SAVES = {
    "state dict": lambda o, file: torch.save(o.state_dict(), file),
    "torch.save of the optimizer": torch.save,
    "pickle of the optimizer": pickle.dump,
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_the_size_of_a_checkpoint_is_that_of_the_state(save):
    optimizer, file = train(PRO(named(*[(24, 32)] * 16), rank=8), [0]), io.BytesIO()
    optimizer.zero_grad()
    save(optimizer, file)
    # One more time for the weights, which a pickled optimizer has in it, and for the records of the format.
    assert file.tell() < 3 * state_bytes(optimizer)


@both
def test_an_entry_saved_alone_is_small_once_cloned(cls):
    """The whole state dict has nothing that is not the stacks', and so takes no more memory than they do."""
    optimizer, file = train(cls(named(*[(24, 32)] * 16)), range(2)), io.BytesIO()
    entry, live = optimizer.state_dict()["state"][0], optimizer.state[weights_of(optimizer)[0]]
    torch.save({k: v.clone() for k, v in entry.items()}, file)
    assert file.tell() < 2 * state_bytes(optimizer) / 16 + 1000 * len(entry)  # records of the format
    assert all(v.data_ptr() == live[k].data_ptr() for k, v in entry.items() if k != "step")


@both
@pytest.mark.parametrize("given", [("param_groups",), ("state",), ("state", "param_groups"), ()], ids=str)
def test_setstate_takes_a_part_and_refuses_a_wrong_one(cls, given):
    optimizer, twin = fine_and_odd(cls), fine_and_odd(cls)
    part = {key: copy.copy(getattr(optimizer, key)) for key in given}
    if "param_groups" in part:
        part["param_groups"] = [{**optimizer.param_groups[0], "lr": -1}, optimizer.param_groups[1]]
        with refused(optimizer, "Group 0 .*lr=-1"):
            optimizer.__setstate__({**part})
        part["param_groups"][0]["lr"] = twin.param_groups[0]["lr"] = 0.25
    optimizer.__setstate__(part)
    assert optimizer.param_groups[0]["lr"] == twin.param_groups[0]["lr"]
    assert differences(train(optimizer, range(3, 6)), train(twin, range(3, 6))) == set()


def test_a_state_dict_loads_many_times_and_stays_as_it_is(method):
    """Both kinds of groups: a run that rolls back to it twice finds it whole."""
    run = Run(**method).train(0, 4)
    state, weights = copy.deepcopy(run.optimizer.state_dict()), copy.deepcopy(run.net.state_dict())
    saved, expected = copy.deepcopy(state), contents(run.train(4, CALLS).optimizer)
    for loads in (1, 2):
        for _ in range(loads):
            run.optimizer.load_state_dict(state)
        run.net.load_state_dict(weights)
        assert differences(expected, run.train(4, CALLS).optimizer) == set()
        assert same(saved, state)


def test_a_load_hook_may_change_an_ordinary_state_dict(method):
    source, target = Run(**method).train(0, 5), Run(**method)

    def double(optimizer, state_dict):
        assert {type(v) for own in state_dict["state"].values() for v in own.values()} == {torch.Tensor}
        state_dict["state"][0]["M_Q"] = 2 * state_dict["state"][0]["M_Q"]

    target.optimizer.register_load_state_dict_pre_hook(double)
    target.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
    assert torch.equal(contents(target.optimizer)[0]["M_Q"], 2 * contents(source.optimizer)[0]["M_Q"])


@both
def test_a_load_hook_may_give_the_state_dict_from_another_one(cls):
    source, target = (Run(cls=cls) for _ in range(2))
    target.optimizer.register_load_state_dict_pre_hook(lambda optimizer, saved: saved["optimizer"])
    target.optimizer.load_state_dict({"optimizer": source.train(0, 3).optimizer.state_dict()})
    one, other = (contents(run.optimizer)[0] for run in (source, target))
    assert one.keys() == other.keys()
    assert all(same_bits(*map(torch.as_tensor, (one[key], other[key]))) for key in one if key != "W")


ALL_KEYS = [(cls, 0, cls([weight(2, 3)]).defaults.keys() - {"split"}) for cls in (PRO, KL)]
ALL_KEYS += [(PRO, 1, ("maximize", "amsgrad", "fused", "foreach", "betas", "eps", "weight_decay"))]


@pytest.mark.parametrize("cls, group, keys", ALL_KEYS, ids=["Pro-KLShampoo", "KL-Shampoo", "AdamW"])
def test_keys_missing_in_an_older_group_take_the_defaults(cls, group, keys):
    """AdamW's groups get its defaults."""
    run = Run(cls=cls)
    run.optimizer.param_groups[1]["amsgrad"] = False
    state = copy.deepcopy(run.train(0, 2).optimizer.state_dict())
    values = {key: state["param_groups"][group].pop(key) for key in keys}
    target = loaded(state, run, {"cls": cls})
    assert values.items() <= target.optimizer.param_groups[group].items()
    assert differences(run.train(2, 5).optimizer, target.train(2, 5).optimizer) == set()


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({}, {"cuda_graphs": False, "precision": "faithful"}),
        ({"cuda_graphs": False, "precision": "faithful"}, {}),
        ({"precision": "balanced"}, {"backend": "reference"}),
    ],
)
def test_machine_settings_are_the_optimizers_not_the_files(theirs, ours):
    run, target = Run(), Run(**ours)
    run.optimizer.param_groups[0].update(theirs)
    own = {key: target.optimizer.param_groups[0][key] for key in ("backend", "precision", "cuda_graphs")}
    target.optimizer.load_state_dict(run.train(0, 4).optimizer.state_dict())
    assert own | ours == own == {key: target.optimizer.param_groups[0][key] for key in own}
    target.train(4, 5)


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_non_finite_adamw_state_is_copied_but_not_loaded(duplicate):
    p, bias = weight(6, 4), weight(4)
    optimizer = PRO([{"params": [p]}, {"params": [bias], "algorithm": "adamw", "lr": 0.01}], rank=2)
    p.grad, bias.grad = torch.ones(6, 4), torch.ones(4)
    optimizer.step()
    optimizer.state[bias]["exp_avg"].fill_(torch.inf)
    assert duplicate(optimizer).state_dict()["state"][1]["exp_avg"].isinf().all()
    with refused(optimizer, "loaded state of .* has exp_avg between inf and inf"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_a_gathered_state_dict_is_a_copy_that_torch_loads():
    optimizer, file = train(PRO(named((6, 4)), rank=2), [0]), io.BytesIO()
    lr = torch.tensor(0.02)
    optimizer.param_groups[0].update(lr=lr, max_lr=np.float64(0.02))
    gathered = optimizer.gather_state_dict()
    M = gathered["state"][0]["M_Q"].clone()
    lr.fill_(1e-3)
    torch.save(gathered, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    train(optimizer, [1])
    assert torch.equal(gathered["state"][0]["M_Q"], M) and torch.equal(read["state"][0]["M_Q"], M)
    assert read["param_groups"][0]["max_lr"] == 0.02
    assert float(gathered["param_groups"][0]["lr"]) == pytest.approx(0.02)


def test_counts_of_a_stack_are_saved_on_its_device():
    """torch.distributed.checkpoint needs it, as it loads a whole state dict onto one device."""
    live = {"M_Q": torch.empty(2, 3, 4, device="meta"), "step": torch.tensor([5, 7])}
    saved = with_step_tensors({0: live, 1: {"M_Q": torch.empty(3, 4, device="meta"), "step": 5}})
    assert saved[0]["step"].is_meta and live["step"].is_cpu
    assert saved[1]["step"].is_cpu and saved[1]["step"].ndim == 0
