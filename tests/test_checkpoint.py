"""Saving and loading: a run that is interrupted continues bit for bit, and a wrong checkpoint changes nothing.

The common run has everything in it that a checkpoint could lose: weights of both orientations in one bucket, a
late starter between them, a stack with a late matrix, skipped and missing gradients, and an AdamW group.
"""

import copy
import io
import math
import pickle

import pytest
import torch

from tests.inputs import BACKENDS, KL, PRO, VARIANTS, changed, frozen, normal, same_bits
from tests.problems import made

METHODS = {
    **{variant: (PRO, {"variant": variant, "rank": 5}) for variant in VARIANTS},
    "klshampoo": (KL, {}),
}
# (dtype of the weights, state_dtype)
DTYPES = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, bfloat16 state": (torch.bfloat16, torch.bfloat16),
    "bfloat16, float32 state": (torch.bfloat16, torch.float32),
    "float32, bfloat16 state": (torch.float32, torch.bfloat16),
    "float64, float32 state": (torch.float64, torch.float32),
}
CASES = [
    pytest.param(*METHODS[method], backend, *DTYPES[dtypes], id=f"{method}-{backend}-{dtypes}")
    for method in METHODS
    for backend in BACKENDS
    for dtypes in DTYPES
    if method in ("pro-klshampoo", "klshampoo") or dtypes == "float32"
]


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


SHAPES = {"a": (12, 20), "late": (20, 12), "b": (12, 20), "stack": (3, 6, 9), "conv": (6, 2, 3, 3)}
ADAMW_SHAPES = {"bias": (7,), "table": (5, 4)}
CALLS, TAU = 11, 3


class Run:
    """Weights, optimizer and the gradients of every call."""

    def __init__(self, cls, kwargs, backend=None, dtype=torch.float32, state_dtype=None):
        self.weights = {
            name: torch.nn.Parameter(normal(*shape, seed=1000 + i, dtype=dtype))
            for i, (name, shape) in enumerate((SHAPES | ADAMW_SHAPES).items())
        }
        matrices = [(name, self.weights[name]) for name in SHAPES]
        rest = [(name, self.weights[name]) for name in ADAMW_SHAPES]
        groups = [
            {"params": matrices},
            {"params": rest, "algorithm": "adamw", "lr": 0.01, "weight_decay": 0.1},
        ]
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
        run = Run(*self.made_by)
        saved = torch.load(file, weights_only=True)
        with torch.no_grad():
            for name, p in run.weights.items():
                p.copy_(saved["weights"][name])
        run.optimizer.load_state_dict(saved["optimizer"])
        return run

    def contents(self):
        return {
            name: {"W": p.detach().clone()} | {k: copy.deepcopy(v) for k, v in self.optimizer.state.get(p, {}).items()}
            for name, p in self.weights.items()
        }


def differences(a, b):
    """(weight, key) of what differs, bit for bit."""
    assert a.keys() == b.keys()
    return {(name, k) for name in a for k in changed(a[name], b[name])}


def snapshot(run):
    file = io.BytesIO()
    run.save(file)
    file.seek(0)
    return file


@pytest.mark.parametrize("cls, kwargs, backend, dtype, state_dtype", CASES)
def test_save_load_continue_equals_an_uninterrupted_run(cls, kwargs, backend, dtype, state_dtype, tmp_path):
    # Before a refresh, just refreshed with the late starter about to begin, and before a call that has no gradient
    # for one weight of a bucket: the oldest weights have step n - 1 when n calls are done.
    moments = (TAU, TAU + 1, TAU + 2)
    run = Run(cls, kwargs, backend, dtype, state_dtype)
    at = {}
    for call in range(CALLS):
        run.step(call)
        if call + 1 in moments:
            run.save(tmp_path / f"{call + 1}.pt")
            at[call + 1] = run.contents()
    for moment in moments:
        resumed = run.resumed(tmp_path / f"{moment}.pt")
        assert differences(at[moment], resumed.contents()) == set()
        assert differences(run.contents(), resumed.steps(moment).contents()) == set(), moment
    skipped = {"a": 0, "late": 0, "b": 1, "stack": 1, "conv": 1}
    assert resumed.optimizer.skipped() == run.optimizer.skipped() == skipped


@pytest.mark.parametrize("dtype, state_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("cls", [PRO, KL])
def test_the_dtype_of_the_state_survives(cls, dtype, state_dtype):
    run = Run(cls, {}, None, dtype, state_dtype).steps(0, 5)
    stored = state_dtype or (torch.float32 if dtype == torch.bfloat16 else dtype)
    resumed = run.resumed(snapshot(run))
    for _ in range(2):
        for name in SHAPES:
            state = resumed.optimizer.state[resumed.weights[name]]
            dtypes = {k: v.dtype for k, v in state.items() if torch.is_tensor(v) and k not in ("skipped", "step")}
            scalars = {dtypes.pop(key) for key in ("lambda_0", "clipped")}
            assert scalars == {torch.float64 if torch.float64 in (dtype, stored) else torch.float32}
            assert set(dtypes.values()) == {stored}
            assert state["skipped"].dtype == torch.int64
        resumed.steps(5, 7)


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
    index = {name: i for i, name in enumerate(run.weights)}
    assert state.keys() == set(index.values())
    expected = KEYS[cls] | ({"lambda_0"} if start == "auto" else set())
    for name in SHAPES:
        assert state[index[name]].keys() == expected
    for name in ADAMW_SHAPES:
        assert state[index[name]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert state[index["a"]]["M"].shape == (12, 20)
    assert state[index["stack"]]["M"].shape == (3, 6, 9)
    assert state[index["stack"]]["Q_L"].shape == (3, 6, 6)
    assert state[index["conv"]]["M"].shape == (6, 18)
    assert [state[index[name]]["step"] for name in ("a", "b", "conv", "late")] == [2, 2, 1, -1]
    assert same_bits(state[index["stack"]]["step"], torch.tensor([2, -1, 2]))


def state_bytes(optimizer):
    return sum(v.numel() * v.itemsize for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))


@pytest.mark.parametrize("save", ["state dict", "torch.save of the optimizer", "pickle of the optimizer"])
def test_the_size_of_a_checkpoint_is_that_of_the_state(save):
    weights = [torch.nn.Parameter(normal(24, 32, seed=i)) for i in range(16)]
    optimizer = PRO(weights, rank=8)
    for w in weights:
        w.grad = normal(24, 32)
    optimizer.step()
    optimizer.zero_grad()
    if save == "pickle of the optimizer":
        size = len(pickle.dumps(optimizer))
    else:
        file = io.BytesIO()
        torch.save(optimizer.state_dict() if save == "state dict" else optimizer, file)
        size = file.tell()
    # One more time for the weights, which a pickled optimizer has in it, and for the records of the format.
    assert size < 3 * state_bytes(optimizer)


@pytest.mark.parametrize("cls", [PRO, KL])
def test_an_entry_saved_alone_is_small_once_its_tensors_are_cloned(cls):
    """The whole state dict has nothing that is not the stacks', and so takes no more memory than they do."""
    weights = [torch.nn.Parameter(normal(24, 32, seed=i)) for i in range(16)]
    optimizer = cls(weights)
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    entry = saved["state"][0]
    file = io.BytesIO()
    torch.save({k: v.clone() for k, v in entry.items()}, file)
    assert file.tell() < 2 * state_bytes(optimizer) / len(weights) + 1000 * len(entry)  # records of the format
    live = optimizer.state[weights[0]]
    assert all(v.data_ptr() == live[k].data_ptr() for k, v in entry.items() if k != "step")


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("given", [("param_groups",), ("state",), ("state", "param_groups"), ()], ids=str)
def test_setstate_takes_a_part_as_torchs_does(cls, given):
    optimizer, twin = pair(cls=cls), pair(cls=cls)
    part = {key: copy.copy(getattr(optimizer, key)) for key in given}
    if "param_groups" in part:
        part["param_groups"] = [{**optimizer.param_groups[0], "lr": 0.25}]
    optimizer.__setstate__(part)
    twin.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["lr"] == (0.25 if "param_groups" in given else optimizer.defaults["lr"])
    train(optimizer, range(3, 6))
    train(twin, range(3, 6))
    for p, q in zip(*(o.param_groups[0]["params"] for o in (optimizer, twin)), strict=True):
        assert same_bits(p, q) and changed(optimizer.state[p], twin.state[q]) == set()


@pytest.mark.parametrize("cls", [PRO, KL])
def test_setstate_of_a_part_that_is_wrong_is_refused_and_changes_nothing(cls):
    optimizer, twin = pair(cls=cls), pair(cls=cls)
    with pytest.raises(ValueError, match="Group 0 .*lr=-1"):
        optimizer.__setstate__({"param_groups": [{**optimizer.param_groups[0], "lr": -1}]})
    train(optimizer, range(3, 6))
    train(twin, range(3, 6))
    for p, q in zip(*(o.param_groups[0]["params"] for o in (optimizer, twin)), strict=True):
        assert same_bits(p, q)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda run: pickle.loads(pickle.dumps(run)),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("moment", [0, 4])
def test_a_copied_optimizer_continues_bit_for_bit_and_on_its_own(method, duplicate, moment):
    run = Run(*method).steps(0, moment)
    before = run.contents()
    twin = duplicate(run)
    assert {id(p) for g in twin.optimizer.param_groups for p in g["params"]} == {id(p) for p in twin.weights.values()}
    assert differences(before, twin.contents()) == set()
    twin.steps(moment, 9)
    assert differences(before, run.contents()) == set()
    assert differences(twin.contents(), run.steps(moment, 9).contents()) == set()


@pytest.mark.parametrize("moment", [1, 5])
def test_loading_a_live_state_dict_does_not_tie_the_optimizers_together(method, moment):
    source, target = Run(*method).steps(0, moment), Run(*method)
    with torch.no_grad():
        for name, p in target.weights.items():
            p.copy_(source.weights[name])
    target.optimizer.load_state_dict(source.optimizer.state_dict())

    def matrices(run):
        return {name: run.contents()[name] for name in SHAPES}

    loaded = matrices(target)
    source.steps(moment)
    assert differences(loaded, matrices(target)) == set()
    expected = matrices(source)
    target.steps(moment)
    assert differences(expected, matrices(source)) == set()


def test_neither_loading_nor_training_on_changes_the_state_dict_that_was_loaded(method):
    source = Run(*method).steps(0, 5)
    state = copy.deepcopy(source.optimizer.state_dict())
    kept = copy.deepcopy(state)
    target = Run(*method)
    target.optimizer.load_state_dict(state)
    assert differences(kept["state"], state["state"]) == set()
    assert state["param_groups"] == kept["param_groups"]
    target.steps(5)
    # Of the matrix weights: PyTorch's AdamW takes the tensors as they are and goes on in them.
    assert {i for i, _ in differences(kept["state"], state["state"])} <= {len(SHAPES), len(SHAPES) + 1}


def test_loading_twice_and_rolling_back_give_the_same_run(method):
    run = Run(*method).steps(0, 4)
    state, weights = copy.deepcopy(run.optimizer.state_dict()), {k: p.detach().clone() for k, p in run.weights.items()}
    expected = run.steps(4).contents()
    for loads in (1, 2):
        for _ in range(loads):
            run.optimizer.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for name, p in run.weights.items():
                p.copy_(weights[name])
        assert differences(expected, run.steps(4).contents()) == set()


def test_load_state_dict_hooks_see_an_ordinary_state_dict(method):
    source, target = Run(*method).steps(0, 5), Run(*method)
    seen = []

    def before(optimizer, state_dict):
        kinds = {type(v) for s in state_dict["state"].values() for v in s.values()}
        seen.append(("before", optimizer, kinds))
        for s in state_dict["state"].values():
            if "M" in s:
                s["M"] = 2 * s["M"]
        return state_dict

    def after(optimizer):
        kinds = {type(v) for s in optimizer.state.values() for v in s.values()}
        seen.append(("after", optimizer, kinds))

    target.optimizer.register_load_state_dict_pre_hook(before)
    target.optimizer.register_load_state_dict_post_hook(after)
    state = copy.deepcopy(source.optimizer.state_dict())
    target.optimizer.load_state_dict(state)
    assert seen == [("before", target.optimizer, {torch.Tensor}), ("after", target.optimizer, {torch.Tensor, int})]
    M = target.optimizer.state[target.weights["a"]]["M"]
    assert torch.equal(M, 2 * source.optimizer.state[source.weights["a"]]["M"])
    target.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
    assert len(seen) == 4


def test_state_dict_hooks_fire_once_and_may_replace_the_result(method):
    run = Run(*method).steps(0, 3)
    seen = []
    run.optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("before"))

    def after(optimizer, state_dict):
        seen.append("after")
        return {**state_dict, "extra": 1}

    run.optimizer.register_state_dict_post_hook(after)
    assert run.optimizer.state_dict()["extra"] == 1
    assert seen == ["before", "after"]


ALL_KEYS = [(cls, key) for cls in (PRO, KL) for key in cls([torch.nn.Parameter(torch.zeros(2, 3))]).defaults]


@pytest.mark.parametrize("cls, key", ALL_KEYS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_group_of_an_older_file_without_a_key_gets_the_optimizers_own_value(cls, key):
    run = Run(cls, {}).steps(0, 4)
    state = copy.deepcopy(run.optimizer.state_dict())
    value = state["param_groups"][0].pop(key)
    target = Run(cls, {}).steps(0, 4)
    target.optimizer.load_state_dict(state)
    assert target.optimizer.param_groups[0][key] == value
    assert differences(run.steps(4, 7).contents(), target.steps(4, 7).contents()) == set()


@pytest.mark.parametrize("key", ["maximize", "amsgrad", "fused", "foreach", "betas", "eps", "weight_decay"])
def test_an_adamw_group_of_an_older_file_without_a_key_gets_its_default(key):
    run = Run(PRO, {}).steps(0, 4)
    run.optimizer.param_groups[1]["weight_decay"] = 0.0
    state = copy.deepcopy(run.optimizer.state_dict())
    value = state["param_groups"][1].pop(key)
    target = Run(PRO, {}).steps(0, 4)
    target.optimizer.load_state_dict(state)
    assert target.optimizer.param_groups[1][key] == value
    assert differences(run.steps(4, 7).contents(), target.steps(4, 7).contents()) == set()


@pytest.mark.parametrize("cls", [PRO, KL])
def test_a_state_of_an_older_file_continues_as_it_did(cls):
    """Until 0.4 there was no bound and no counter."""
    run = Run(cls, {"clip_threshold": None}).steps(0, 8)
    old = copy.deepcopy(run.optimizer.state_dict())
    for state in old["state"].values():
        state.pop("clipped", None)
    for group in old["param_groups"]:
        group.pop("clip_threshold", None)
    resumed = Run(cls, {"clip_threshold": None}).steps(0, 1)
    with torch.no_grad():
        for name, p in resumed.weights.items():
            p.copy_(run.weights[name])
    resumed.optimizer.load_state_dict(old)
    for name in ("a", "stack"):
        state = resumed.optimizer.state[resumed.weights[name]]
        assert not state["clipped"].any() and state["clipped"].shape == state["lambda_0"].shape
    resumed.steps(8, 12)
    run.steps(8, 12)
    for name, p in resumed.weights.items():
        assert torch.equal(p, run.weights[name]), name


def test_hyperparameters_come_from_the_checkpoint():
    """As with every torch optimizer; rank and start value too, which the loaded state depends on."""
    run = Run(PRO, {"rank": 3, "init_eigenvalue": 0.1, "momentum": 0.5}).steps(0, 5)
    target = Run(PRO, {"rank": 7})
    with torch.no_grad():
        for name, p in target.weights.items():
            p.copy_(run.weights[name])
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


def pair(shape=(6, 10), cls=PRO, **kwargs):
    """A trained optimizer over ("fine", "odd"), of which only the second depends on the arguments."""
    weights = [torch.nn.Parameter(normal(*s, seed=i)) for i, s in enumerate(((4, 6), shape))]
    optimizer = cls([("fine", weights[0]), ("odd", weights[1])], **kwargs)
    train(optimizer, range(3))
    return optimizer


def train(optimizer, calls):
    for call in calls:
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            p.grad = normal(*p.shape, seed=10 * call + i)
        optimizer.step()


def edited(change):
    """The right state dict but for one change to it."""
    state = copy.deepcopy(pair(rank=4).state_dict())
    change(state)
    return state


def without(key):
    return edited(lambda s: s["state"][1].pop(key))


def adamw_state():
    weights = [torch.nn.Parameter(normal(*s)) for s in ((4, 6), (6, 10))]
    optimizer = torch.optim.AdamW(weights)
    train(optimizer, range(2))
    return optimizer.state_dict()


# What is loaded into pair(rank=4), and what the message must name; "fine" where the first weight is wrong already.
WRONG = {
    "another shape": (lambda: pair((6, 12), rank=4).state_dict(), "odd"),
    "more dimensions": (lambda: pair((1, 6, 10), rank=4).state_dict(), "odd"),
    "another rank": (lambda: edited(lambda s: s["param_groups"][0].update(rank=5)), "odd|fine"),
    "another start value": (lambda: edited(lambda s: s["param_groups"][0].update(init_eigenvalue=0.1)), "odd|fine"),
    "of KLShampoo": (lambda: pair(cls=KL).state_dict(), "odd|fine"),
    "of AdamW": (adamw_state, "odd|fine"),
    "no U": (lambda: without("U"), "odd"),
    "no step": (lambda: without("step"), "odd"),
    "no skipped": (lambda: without("skipped"), "odd"),
    "no lambda_0": (lambda: without("lambda_0"), "odd"),
    "no clock and no momentum": (lambda: edited(lambda s: [s["state"][1].pop(k) for k in ("step", "M")]), "odd"),
    "NaN in a factor": (lambda: edited(lambda s: s["state"][1]["L"][0, 0].fill_(math.nan)), "odd has L .* damaged"),
    "infinite momentum": (lambda: edited(lambda s: s["state"][1]["M"][0, 0].fill_(math.inf)), "odd has M .* damaged"),
    "negative eigenvalue": (
        lambda: edited(lambda s: s["state"][1]["inv_sqrt_mu"].neg_()),
        "odd has inv_sqrt_mu",
    ),
    "no unit": (lambda: edited(lambda s: s["state"][1]["lambda_0"].zero_()), "odd has lambda_0 .*not positive"),
    "a learning rate below 0": (lambda: edited(lambda s: s["param_groups"][0].update(lr=-1.0)), "Group 0 .*lr=-1.0"),
    "a rank of nothing": (lambda: edited(lambda s: s["param_groups"][0].update(rank=None)), "Group 0 .*rank=None"),
    "clock of a stack": (lambda: edited(lambda s: s["state"][1].update(step=[1, 2])), "odd"),
    "one weight less": (lambda: edited(lambda s: s["param_groups"][0]["params"].pop()), "size|parameter"),
    "one group more": (lambda: edited(lambda s: s["param_groups"].append(s["param_groups"][0])), "parameter groups"),
}


def assert_refused(optimizer, twin, state, message):
    """Loading raises ValueError, nothing has changed, and training goes on as if it had not been tried."""
    groups, hooks = repr(optimizer), len(optimizer._optimizer_load_state_dict_pre_hooks)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert repr(optimizer) == groups
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == hooks
    train(optimizer, range(3, 6))
    train(twin, range(3, 6))
    for p, q in zip(*([p for g in o.param_groups for p in g["params"]] for o in (optimizer, twin)), strict=True):
        assert same_bits(p, q)
        a, b = optimizer.state[p], twin.state[q]
        assert changed(a, b) == set()


@pytest.mark.parametrize("state, name", WRONG.values(), ids=WRONG)
def test_a_wrong_checkpoint_is_refused_by_the_weights_name_and_changes_nothing(state, name):
    assert_refused(pair(rank=4), pair(rank=4), state(), rf"\b({name})")


@pytest.mark.parametrize("cls", [PRO, KL])
def test_a_checkpoint_of_a_model_of_another_width_is_refused_in_two_sentences(cls):
    def narrow(width):
        shapes = {"same": (5, 9), "first": (width, 6), "stack": (2, 6, width), "last": (4, width)}
        optimizer = cls([(name, torch.nn.Parameter(normal(*shape))) for name, shape in shapes.items()])
        train(optimizer, range(2))
        return optimizer

    says = (
        rf"^The loaded state of first \(weight \(8, 6\)\) has M of shape \(6, 12\) where {cls.__name__} needs \(6, 8\)"
        r"; 2 more differ\. Load a state dict of the same optimizer, model, rank, init_eigenvalue and split\.$"
    )
    assert_refused(narrow(8), narrow(8), narrow(12).state_dict(), says)


def test_a_checkpoint_of_proklshampoo_is_refused_by_klshampoo():
    assert_refused(pair(cls=KL), pair(cls=KL), pair().state_dict(), r"\b(odd|fine)\b")


@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("shapes", [((4, 6), (5,)), ((4, 6), (6, 4))], ids=["bias", "matrices"])
def test_a_checkpoint_whose_groups_have_other_algorithms_is_refused(shapes, calls):
    def build(order):
        groups = [
            {"params": [("w", torch.nn.Parameter(normal(*shapes[0])))]},
            {"params": [("b", torch.nn.Parameter(normal(*shapes[1])))], "algorithm": "adamw", "lr": 0.01},
        ]
        optimizer = PRO([groups[i] for i in order], rank=2)
        train(optimizer, range(calls))
        return optimizer

    assert_refused(build((0, 1)), build((0, 1)), build((1, 0)).state_dict(), "algorithm|w|b")


@pytest.mark.parametrize("cls", [PRO, KL])
def test_a_state_dict_of_the_same_weights_in_another_order_is_refused_and_changes_nothing(cls):
    """By their places they would take each other's state without a word."""

    def named(*names):
        return cls([{"params": [(name, torch.nn.Parameter(normal(4, 6, seed=i))) for i, name in enumerate(names)]}])

    source, target = named("up", "down", "gate"), named("up", "gate", "down")
    for optimizer in (source, target):
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            p.grad = normal(4, 6, seed=10 + i)
        optimizer.step()
    weights = target.param_groups[0]["params"]
    before = [frozen(target, p) for p in weights]
    with pytest.raises(ValueError, match=r"weight 1 is 'down' there and 'gate' here"):
        target.load_state_dict(source.state_dict())
    assert not any(changed(old, frozen(target, p)) for old, p in zip(before, weights, strict=True))
    named("m.up", "m.down", "m.gate").load_state_dict(source.state_dict())  # other names go by place, as torch's do
    nameless = source.state_dict()
    del nameless["param_groups"][0]["param_names"]
    target.load_state_dict(nameless)


def test_a_loaded_state_dict_stays_as_it_is_when_the_optimizer_goes_on():
    """Of both kinds of groups: who rolls back to it twice finds it whole."""
    matrix, vector = torch.nn.Parameter(normal(4, 6)), torch.nn.Parameter(normal(5))
    optimizer = PRO([{"params": [matrix]}, {"params": [vector], "algorithm": "adamw", "lr": 0.1}])

    def steps(count):
        for i in range(count):
            matrix.grad, vector.grad = normal(4, 6, seed=i), normal(5, seed=i)
            optimizer.step()

    steps(3)
    best = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(best["state"])
    optimizer.load_state_dict(best)
    steps(2)
    for i, own in kept.items():
        assert not changed(own, best["state"][i])


def test_groups_of_one_size_in_another_order_are_refused():
    def named(*names):
        return PRO([{"params": [(name, torch.nn.Parameter(normal(4, 6)))]} for name in names])

    with pytest.raises(ValueError, match=r"weight 0 is 'up' there and 'down' here"):
        named("down", "up").load_state_dict(named("up", "down").state_dict())


@pytest.mark.parametrize("cls, other, missing", [(PRO, KL, "U"), (KL, PRO, "R")])
def test_the_state_of_another_method_is_told_by_what_only_it_has(cls, other, missing):
    optimizers = [made([torch.nn.Parameter(normal(4, 6))]) for made in (cls, other)]
    for optimizer in optimizers:
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = normal(4, 6)
        optimizer.step()
    own = {"U": "U, S, Q_S", "R": "R, Q_R"}["R" if missing == "U" else "U"]
    with pytest.raises(ValueError, match=rf"has {own}.* and no tensor {missing} where"):
        optimizers[0].load_state_dict(optimizers[1].state_dict())
