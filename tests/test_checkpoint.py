"""Saving and loading: a run that is interrupted continues bit for bit, and a wrong checkpoint changes nothing.

The common run has everything in it that a checkpoint could lose: weights of both orientations in one bucket, a
late starter between them, a stack with a late matrix, skipped and missing gradients, an AdamW group, and a fused weight
in a group with settings of its own.
"""

import copy
import io
import pickle

import pytest
import torch

from tests.inputs import BACKENDS, KL, PRO, VARIANTS, normal, same_bits, weight
from tests.problems import made
from tests.training import contents, differences, fine_and_odd, named, refused, train, weights_of

METHODS = {
    **{variant: (PRO, {"variant": variant, "rank": 5}) for variant in VARIANTS},
    "klshampoo": (KL, {}),
}
DTYPES = {  # of the weights, state_dtype
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, bfloat16 state": (torch.bfloat16, torch.bfloat16),
    "bfloat16, float32 state": (torch.bfloat16, torch.float32),
    "float32, bfloat16 state": (torch.float32, torch.bfloat16),
    "float64, float32 state": (torch.float64, torch.float32),
}
# Both methods in every dtype, each backend in every other; the variants and masters once.
CASES = [
    pytest.param(*METHODS[method], BACKENDS[(i + j) % 2], *dtypes, id=f"{method}-{name}")
    for i, method in enumerate(("pro-klshampoo", "klshampoo"))
    for j, (name, dtypes) in enumerate(DTYPES.items())
]
CASES += [pytest.param(*METHODS[variant], "torch", torch.float32, None, id=variant) for variant in VARIANTS[1:]]
CASES += [
    pytest.param(cls, {"bf16_weights": "master"}, "torch", torch.bfloat16, None, id=f"{cls.__name__}-masters")
    for cls in (PRO, KL)
]


@pytest.fixture(params=["pro-klshampoo", "klshampoo"])
def method(request):
    return METHODS[request.param]


SHAPES = {"a": (12, 20), "late": (20, 12), "b": (12, 20), "stack": (3, 6, 9), "conv": (6, 2, 3, 3)}
ADAMW_SHAPES = {"bias": (7,), "table": (5, 4)}
FUSED_SHAPES = {"fused": (18, 20)}
CALLS, TAU = 8, 3


class Run:
    """Weights, optimizer and the gradients of every call."""

    def __init__(self, cls, kwargs, backend=None, dtype=torch.float32, state_dtype=None):
        shapes = SHAPES | ADAMW_SHAPES | FUSED_SHAPES
        self.weights = {name: weight(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
        groups = [
            {"params": [(name, self.weights[name]) for name in SHAPES]},
            {"params": [(name, self.weights[name]) for name in ADAMW_SHAPES], "algorithm": "adamw", "lr": 0.01},
        ]
        groups[1]["weight_decay"] = 0.1
        groups.append({"params": [(name, self.weights[name]) for name in FUSED_SHAPES], "split": (6, 12), "lr": 0.1})
        options = {"precondition_frequency": TAU, "backend": backend, "state_dtype": state_dtype, **kwargs}
        self.optimizer = made(cls, groups, weight_decay=0.1, **options)
        self.made_by = cls, kwargs, backend, dtype, state_dtype

    def step(self, call):
        for i, (name, p) in enumerate(self.weights.items()):
            p.grad = normal(*p.shape, seed=100 * call + i, dtype=p.dtype)
            if name == "late" and call < 4 or (name, call) in {("a", 5), ("stack", 4), ("table", 2)}:
                p.grad = None
            elif name == "stack" and call < 3:
                p.grad[1] = 0.0
            elif (name, call) in {("b", 2), ("conv", 0), ("stack", 6)}:
                p.grad.view(-1)[3] = float("nan")
        self.optimizer.step()

    def steps(self, first, last=CALLS):
        for call in range(first, last):
            self.step(call)
        return self

    def save(self, file):
        torch.save({"weights": self.weights, "optimizer": self.optimizer.state_dict()}, file)

    def resumed(self, file):
        """A new run from the file, as a new process would make it."""
        run, saved = Run(*self.made_by), torch.load(file, weights_only=True)
        run.optimizer.param_groups[2].update(split=None, lr=1.0)  # they come with the state
        run.take(saved["weights"])
        run.optimizer.load_state_dict(saved["optimizer"])
        return run

    def take(self, weights):
        with torch.no_grad():
            for name, p in self.weights.items():
                p.copy_(weights[name])

    def contents(self):
        return contents(self.optimizer)


@pytest.mark.parametrize("cls, kwargs, backend, dtype, state_dtype", CASES)
def test_save_load_continue_equals_an_uninterrupted_run(cls, kwargs, backend, dtype, state_dtype, tmp_path):
    """Whatever torch's generator is; and the state is in the dtype that was asked for, before and after."""
    # Before a refresh, just refreshed with the late starter about to begin, and before a call that has no gradient
    # for one weight of a bucket: the oldest weights have step n - 1 when n calls are done.
    moments = (TAU, TAU + 1, TAU + 2)
    run, at = Run(cls, kwargs, backend, dtype, state_dtype), {}
    for call in range(CALLS):
        run.step(call)
        if call + 1 in moments:
            run.save(tmp_path / f"{call + 1}.pt")
            at[call + 1] = run.contents()
    for moment in moments:
        torch.manual_seed(moment)
        before = torch.get_rng_state()
        resumed = run.resumed(tmp_path / f"{moment}.pt")
        assert differences(at[moment], resumed.contents()) == set()
        assert differences(run.contents(), resumed.steps(moment).contents()) == set(), moment
        assert torch.equal(torch.get_rng_state(), before)
    skipped = {"a": 0, "late": 0, "b": 1, "stack": 1, "conv": 1, "fused": 0}
    assert resumed.optimizer.skipped() == run.optimizer.skipped() == skipped
    stored = state_dtype or (torch.float32 if dtype == torch.bfloat16 else dtype)
    wide = torch.float64 if torch.float64 in (dtype, stored) else torch.float32
    for own in at[TAU][: len(SHAPES)]:
        found = {k: v.dtype for k, v in own.items() if torch.is_tensor(v) and k not in ("W", "step")}
        assert found.pop("skipped") == torch.int64
        assert {found.pop(key) for key in ("lambda_0", "clipped")} == {wide} and set(found.values()) == {stored}


COMMON_KEYS = {"step", "skipped", "clipped", "M", "L", "Q_L", "inv_sqrt_lambda_L"}
KEYS = {
    PRO: COMMON_KEYS | {"U", "S", "Q_S", "inv_sqrt_lambda_S", "inv_sqrt_mu"},
    KL: COMMON_KEYS | {"R", "Q_R", "inv_sqrt_lambda_R"},
}


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("start", ["auto", 0.1])
def test_the_state_dict_is_per_parameter_with_the_documented_keys(cls, start):
    run = Run(cls, {"init_eigenvalue": start}).steps(0, 3)
    state = run.optimizer.state_dict()["state"]
    of = {name: state[i] for i, name in enumerate(run.weights)}
    assert len(state) == len(of)
    expected = KEYS[cls] | ({"lambda_0"} if start == "auto" else set())
    assert all(of[name].keys() == expected for name in SHAPES)
    assert all(of[name].keys() == {"step", "exp_avg", "exp_avg_sq"} for name in ADAMW_SHAPES)
    assert [of[name]["M"].shape for name in ("a", "stack", "conv")] == [(12, 20), (3, 6, 9), (6, 18)]
    assert of["stack"]["Q_L"].shape == (3, 6, 6)
    assert [of[name]["step"] for name in ("a", "b", "conv", "late")] == [2, 2, 1, -1]
    assert same_bits(of["stack"]["step"], torch.tensor([2, -1, 2]))


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


@pytest.mark.parametrize("cls", [PRO, KL])
def test_an_entry_saved_alone_is_small_once_its_tensors_are_cloned(cls):
    """The whole state dict has nothing that is not the stacks', and so takes no more memory than they do."""
    optimizer, file = train(cls(named(*[(24, 32)] * 16)), range(2)), io.BytesIO()
    entry, live = optimizer.state_dict()["state"][0], optimizer.state[weights_of(optimizer)[0]]
    torch.save({k: v.clone() for k, v in entry.items()}, file)
    assert file.tell() < 2 * state_bytes(optimizer) / 16 + 1000 * len(entry)  # records of the format
    assert all(v.data_ptr() == live[k].data_ptr() for k, v in entry.items() if k != "step")


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("given", [("param_groups",), ("state",), ("state", "param_groups"), ()], ids=str)
def test_setstate_takes_a_part_as_torchs_does_and_refuses_a_wrong_one(cls, given):
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


@pytest.mark.parametrize("moment", [1, 5])
def test_loading_a_live_state_dict_does_not_tie_the_optimizers_together(method, moment):
    source, target = Run(*method).steps(0, moment), Run(*method)
    target.take(source.weights)
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    loaded = target.contents()
    expected = source.steps(moment).contents()
    assert differences(loaded, target.contents()) == set()
    target.steps(moment)
    assert differences(expected, source.contents()) == differences(expected, target.contents()) == set()


def test_a_state_dict_may_be_loaded_again_and_again_and_stays_as_it_is(method):
    """Of both kinds of groups: who rolls back to it twice finds it whole."""
    run = Run(*method).steps(0, 4)
    state, weights = copy.deepcopy(run.optimizer.state_dict()), {k: p.detach().clone() for k, p in run.weights.items()}
    saved, expected = copy.deepcopy(state), run.steps(4).contents()
    for loads in (1, 2):
        for _ in range(loads):
            run.optimizer.load_state_dict(state)
        run.take(weights)
        assert differences(expected, run.steps(4).contents()) == set()
        assert differences(saved["state"].values(), state["state"].values()) == set()
        assert state["param_groups"] == saved["param_groups"]


def test_a_hook_before_loading_sees_an_ordinary_state_dict_and_may_change_it(method):
    source, target = Run(*method).steps(0, 5), Run(*method)

    def double(optimizer, state_dict):
        assert {type(v) for own in state_dict["state"].values() for v in own.values()} == {torch.Tensor}
        state_dict["state"][0]["M"] = 2 * state_dict["state"][0]["M"]

    target.optimizer.register_load_state_dict_pre_hook(double)
    target.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
    assert torch.equal(target.contents()[0]["M"], 2 * source.contents()[0]["M"])


ALL_KEYS = [(cls, 0, cls([weight(2, 3)]).defaults.keys()) for cls in (PRO, KL)]
ALL_KEYS += [(PRO, 1, ("maximize", "amsgrad", "fused", "foreach", "betas", "eps", "weight_decay"))]


@pytest.mark.parametrize("cls, group, keys", ALL_KEYS, ids=["Pro-KLShampoo", "KL-Shampoo", "AdamW"])
def test_a_group_of_an_older_file_without_its_keys_gets_the_optimizers_own_values(cls, group, keys):
    """Of AdamW's the defaults."""
    run, target = Run(cls, {}).steps(0, 2), Run(cls, {}).steps(0, 2)
    run.optimizer.param_groups[1]["weight_decay"] = 0.0
    state = copy.deepcopy(run.optimizer.state_dict())
    values = {key: state["param_groups"][group].pop(key) for key in keys}
    target.optimizer.load_state_dict(state)
    assert values.items() <= target.optimizer.param_groups[group].items()
    assert differences(run.steps(2, 5).contents(), target.steps(2, 5).contents()) == set()


def test_hyperparameters_come_from_the_checkpoint():
    """As with every torch optimizer; rank and start value too, which the loaded state depends on."""
    run = Run(PRO, {"rank": 3, "init_eigenvalue": 0.1, "momentum": 0.5}).steps(0, 5)
    target = Run(PRO, {"rank": 7})
    target.take(run.weights)
    target.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert target.optimizer.param_groups[0]["rank"] == 3
    assert differences(run.steps(5, 8).contents(), target.steps(5, 8).contents()) == set()


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({}, {"cuda_graphs": False, "precision": "faithful"}),
        ({"cuda_graphs": False, "precision": "faithful"}, {}),
        ({"precision": "balanced"}, {"backend": "reference"}),
    ],
)
def test_what_suits_the_machine_is_the_optimizers_own_and_not_the_checkpoints(theirs, ours):
    run, target = Run(PRO, {}), Run(PRO, ours)
    run.optimizer.param_groups[0].update(theirs)
    own = {key: target.optimizer.param_groups[0][key] for key in ("backend", "precision", "cuda_graphs")}
    target.optimizer.load_state_dict(run.steps(0, 4).optimizer.state_dict())
    assert own | ours == own == {key: target.optimizer.param_groups[0][key] for key in own}
    target.steps(4, 5)


def test_an_optimizer_pickled_without_the_machines_settings_gets_their_defaults():
    run = Run(PRO, {}).steps(0, 4)
    for settings in (run.optimizer.defaults, run.optimizer.param_groups[0]):
        for key in ("backend", "precision", "cuda_graphs"):
            del settings[key]
    old = pickle.loads(pickle.dumps(run))
    for settings in (old.optimizer.defaults, old.optimizer.param_groups[0]):
        assert (settings["backend"], settings["precision"], settings["cuda_graphs"]) == (None, None, True)
    assert "precision" not in old.optimizer.param_groups[1]  # of AdamW
    old.steps(4, 5)


@pytest.mark.parametrize("cls", [PRO, KL])
def test_a_checkpoint_of_a_model_of_another_width_is_refused_in_two_sentences(cls):
    def narrow(width):
        shapes = {"same": (5, 9), "first": (width, 6), "stack": (2, 6, width), "last": (4, width)}
        return train(cls([(name, weight(*shape)) for name, shape in shapes.items()]), range(2))

    optimizer = narrow(8)
    says = (
        rf"^The loaded state of first \(weight \(8, 6\)\) has M of shape \(6, 12\) where {cls.__name__} needs \(6, 8\)"
        r"; 2 more differ\. Load a state dict of the same optimizer, model, rank, init_eigenvalue and split\.$"
    )
    with refused(optimizer, says):
        optimizer.load_state_dict(narrow(12).state_dict())


@pytest.mark.parametrize("calls", [0, 3])
def test_a_checkpoint_whose_groups_have_other_algorithms_is_refused(calls):
    """Also where the shapes would fit, and before there is any state."""

    def build(order):
        groups = [
            {"params": [("w", weight(4, 6))]},
            {"params": [("b", weight(6, 4))], "algorithm": "adamw", "lr": 0.01},
        ]
        return train(PRO([groups[i] for i in order], rank=2), range(calls))

    optimizer = build((0, 1))
    with refused(optimizer, "algorithm|w|b"):
        optimizer.load_state_dict(build((1, 0)).state_dict())


@pytest.mark.parametrize("apart", [False, True], ids=["", "groups"])
@pytest.mark.parametrize("cls", [PRO, KL])
def test_a_state_dict_of_the_same_weights_in_another_order_is_refused_and_changes_nothing(cls, apart):
    """By their places they would take each other's state without a word."""

    def build(*names):
        params = [(name, weight(4, 6, seed=i)) for i, name in enumerate(names)]
        return train(cls([{"params": [own]} for own in params] if apart else params), [0])

    source, target = build("up", "down", "gate"), build("up", "gate", "down")
    with refused(target, r"weight 1 is 'down' there and 'gate' here"):
        target.load_state_dict(source.state_dict())
    build("m.up", "m.down", "m.gate").load_state_dict(source.state_dict())  # other names go by place, as torch's do
    nameless = source.state_dict()
    for own in nameless["param_groups"]:
        del own["param_names"]
    target.load_state_dict(nameless)
