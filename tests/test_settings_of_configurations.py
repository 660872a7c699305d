"""Settings as configuration systems and NumPy give them: told apart from what was meant, and kept in plain types."""

import enum
import io
import typing
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.inputs import KL, PRO, normal, weight
from tests.problems import made
from tests.routing import holding

both = pytest.mark.parametrize("cls", [PRO, KL])


class Listed(Sequence):
    """A list of a configuration, as omegaconf's: a Sequence, and neither list nor tuple."""

    def __init__(self, *values):
        self.values = values

    def __getitem__(self, i):
        return self.values[i]

    def __len__(self):
        return len(self.values)


class Name(str, enum.Enum):
    COMPLEMENT = "complement-only"


def is_plain(value):
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return type(value) in (bool, int, float, str, type(None), torch.dtype, torch.Tensor)


def reloaded(optimizer):
    """The state dict through a file that holds nothing but tensors and Python's own types."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(optimizer, weights):
    for call in range(3):
        for i, p in enumerate(weights):
            p.grad = normal(*p.shape, seed=10 * call + i)
        optimizer.step()


SETTINGS = {
    "lr": (np.float32(0.5), 0.5),
    "weight_decay": (np.float64(0.25), 0.25),
    "momentum": (np.float32(0.5), 0.5),
    "beta2": (np.float16(0.5), 0.5),
    "rank": (np.int64(3), 3),
    "precondition_frequency": (np.int32(2), 2),
    "ns_steps": (np.uint8(4), 4),
    "maximize": (np.bool_(True), True),
    "cuda_graphs": (np.bool_(False), False),
    "variant": (Name.COMPLEMENT, "complement-only"),
    "backend": (np.str_("torch"), "torch"),
    "clip_threshold": (np.float32(4.0), 4.0),
    "init_eigenvalue": (np.float64(0.5), 0.5),
    "alpha_kl": (np.float32(0.5), 0.5),
}
COEFFICIENTS = [Listed(3.0, -4.0, 2.0), np.array([3.0, -4.0, 2.0]), [3.0, -4.0, 2.0], Listed(*np.array([3, -4, 2]))]


@both
@pytest.mark.parametrize("where", ["constructor", "group", "by hand"])
def test_settings_of_other_types_are_kept_as_pythons_own(cls, where):
    known = cls([weight(4, 6)]).defaults.keys()
    given = {k: v for k, (v, _) in SETTINGS.items() if k in known}
    meant = {k: v for k, (_, v) in SETTINGS.items() if k in known}
    p, q = weight(4, 6), weight(4, 6)
    if where == "constructor":
        optimizer = made(cls, [p], **given)
        assert all(type(optimizer.defaults[k]) is type(v) and optimizer.defaults[k] == v for k, v in meant.items())
    elif where == "group":
        optimizer = cls([{"params": [p], **given}])
    else:
        optimizer = cls([p])
        optimizer.param_groups[0].update(given)
    if where != "by hand":
        group = optimizer.param_groups[0]
        assert all(type(group[k]) is type(v) and group[k] == v for k, v in meant.items())
    plain = made(cls, [q], **meant)
    run(optimizer, [p])
    run(plain, [q])
    assert torch.equal(p, q)
    optimizer.param_groups[0]["of_the_users"] = kept = ["a list"]
    assert optimizer.state_dict()["param_groups"][0]["of_the_users"] is kept
    del optimizer.param_groups[0]["of_the_users"]
    state = reloaded(optimizer)
    assert all(is_plain(value) for group in state["param_groups"] for value in group.values())
    assert reloaded(plain)["param_groups"] == state["param_groups"]
    again = cls([p])
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=lambda c: type(c).__name__)
def test_coefficients_may_be_any_sequence(coefficients):
    group = made(PRO, [weight(4, 6)], ns_coefficients=coefficients).param_groups[0]
    assert group["ns_coefficients"] == (3.0, -4.0, 2.0) and is_plain(group["ns_coefficients"])
    optimizer = PRO([weight(4, 6)])
    optimizer.param_groups[0]["ns_coefficients"] = coefficients
    run(optimizer, optimizer.param_groups[0]["params"])
    assert reloaded(optimizer)["param_groups"][0]["ns_coefficients"] in ((3.0, -4.0, 2.0), [3.0, -4.0, 2.0])


@pytest.mark.parametrize(
    "betas",
    [Listed(0.5, 0.75), np.array([0.5, 0.75]), [0.5, 0.75], (np.float32(0.5), 0.75)],
    ids=lambda betas: type(betas).__name__,
)
def test_betas_may_be_any_sequence(betas):
    group = {"params": [weight(6)], "algorithm": "adamw", "lr": np.float64(0.5), "betas": betas, "amsgrad": np.bool_(1)}
    optimizer = PRO([{"params": [weight(4, 6)]}, group])
    found = optimizer.param_groups[1]
    assert (found["lr"], found["betas"], found["amsgrad"]) == (0.5, (0.5, 0.75), True)
    assert all(map(is_plain, (found["lr"], found["betas"], found["amsgrad"])))
    optimizer.param_groups[1]["betas"] = betas
    run(optimizer, [p for g in optimizer.param_groups for p in g["params"]])
    reloaded(optimizer)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    groups = param_groups(model, lr=np.float64(0.5), adamw_lr=np.float32(0.5), adamw_betas=betas, rank=np.int64(2))
    assert groups[-1]["betas"] == (0.5, 0.75) and is_plain(groups[-1]["betas"]) and type(groups[0]["rank"]) is int
    assert {type(g["lr"]) for g in groups} == {float} and "  2  " in str(groups)


@pytest.mark.parametrize(
    "listed", [Listed, lambda *v: [*v], lambda *v: np.array(v, dtype=object)], ids=["Listed", "list", "array"]
)
def test_readings_may_be_any_sequence_with_one_a_weight(listed):
    named = [("a", weight(6, 8)), ("b", weight(6, 8))]
    group = {"params": named, "split": listed(None, np.int64(2)), "transposed": listed(np.bool_(False), True)}
    optimizer = PRO([group])
    found = optimizer.param_groups[0]
    assert (found["split"], found["transposed"]) == ([None, 2], [False, True])
    assert is_plain(found["split"]) and is_plain(found["transposed"])
    run(optimizer, [p for _, p in named])
    reloaded(optimizer)


def test_sizes_of_pieces_may_be_numbers_of_numpy_and_any_sequence():
    optimizer = PRO([{"params": [weight(6, 8)], "split": (np.int64(2), np.int64(4))}])
    assert optimizer.param_groups[0]["split"] == (2, 4) and is_plain(optimizer.param_groups[0]["split"])
    model = holding(qkv=nn.Linear(8, 6, bias=False), w=nn.Linear(6, 8, bias=False))
    for sizes in (Listed(2, 4), np.array([2, 4])):
        assert param_groups(model, lr=0.1, adamw_lr=0.1, split={"qkv.*": sizes})[0]["split"][0] == (2, 4)
    found = param_groups(model, lr=0.1, adamw_lr=0.1, split={"qkv.*": np.int64(2)}, transposed=Listed("w.*"))
    assert found[0]["split"] == [2, None] and found[0]["transposed"] == [False, True]


@both
def test_a_tensor_lr_stays_a_tensor(cls):
    assert cls([weight(4, 6)], lr=np.array(0.5)).param_groups[0]["lr"] == 0.5
    optimizer = cls([weight(4, 6)], lr=torch.tensor(0.5))
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert isinstance(reloaded(optimizer)["param_groups"][0]["lr"], torch.Tensor)


@both
@pytest.mark.parametrize("hinted", ["__init__", "step", "param_groups"])
def test_type_hints_resolve(cls, hinted):
    target = param_groups if hinted == "param_groups" else getattr(cls, hinted)
    hints = typing.get_type_hints(target)
    if hinted == "__init__":
        assert hints["lr"] == float | torch.Tensor and torch.distributed.ProcessGroup in typing.get_args(
            hints["process_group"]
        )


@both
def test_a_preset_beside_explicit_defaults_says_what_it_does_not_set(cls):
    """LightningCLI and hydra pass every default explicitly."""
    import inspect

    defaults = {k: p.default for k, p in inspect.signature(cls).parameters.items() if p.default is not p.empty}
    defaults["advanced"] = {"clip_threshold": 5.0}
    said = (
        r"^preset='paper' leaves .*clip_threshold=5\.0.* as given.*the preset's are .*clip_threshold=None.*leave .* out"
    )
    with pytest.warns(UserWarning, match=said) as caught:
        group = cls([weight(4, 6)], **{**defaults, "preset": "paper"}).param_groups[0]
    assert len(caught) == 1 and caught[0].filename == __file__
    assert group["clip_threshold"] == 5.0 and group["init_eigenvalue"] == 0.1
    with pytest.warns(UserWarning, match="leaves clip_threshold=5.0 as given"):
        made(cls, [weight(4, 6)], clip_threshold=5.0, preset="paper")


@both
def test_a_preset_is_silent_where_other_values_than_the_defaults_are_given_or_its_own(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = made(cls, [weight(4, 6)], clip_threshold=4.0, init_eigenvalue=0.1, preset="paper").param_groups[0]
        assert (group["clip_threshold"], group["init_eigenvalue"]) == (4.0, 0.1)
        cls([weight(4, 6)], preset="paper", lr=0.1)
        made(cls, [weight(4, 6)], clip_threshold=5.0, preset=None)


@both
def test_an_advanced_setting_is_given_in_its_mapping_or_by_its_old_keyword_with_one_warning(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = cls([weight(4, 6)], advanced={"eps": 1e-4, "clip_threshold": None})
    with pytest.warns(
        FutureWarning, match=r"^eps=0\.0001, clip_threshold=None of .*advanced=\{'eps': 0\.0001, "
    ) as said:
        old = cls([weight(4, 6)], eps=1e-4, clip_threshold=None)
    assert len(said) == 1 and said[0].filename == __file__
    assert new.param_groups[0]["eps"] == 1e-4 and new.param_groups[0]["clip_threshold"] is None
    for a, b in ((new.defaults, old.defaults), *zip(new.param_groups, old.param_groups, strict=True)):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}


@both
def test_a_group_may_have_advanced_settings_in_their_mapping_or_beside_the_others(cls):
    groups = [{"params": [weight(4, 6)], "advanced": {"eps": 1e-4}}, {"params": [weight(4, 6)], "eps": 1e-4}]
    optimizer = cls([*groups, {"params": [weight(4, 6)]}], advanced={"cuda_graphs": False})
    assert [g["eps"] for g in optimizer.param_groups] == [1e-4, 1e-4, 1e-8]
    assert not any(g["cuda_graphs"] for g in optimizer.param_groups)
    assert all("advanced" not in g for g in [*optimizer.param_groups, *optimizer.state_dict()["param_groups"]])


@both
@pytest.mark.parametrize(
    "advanced, says",
    [
        ({"ns_step": 3}, r"advanced=\{'ns_step': .*no advanced setting has that name"),
        ({"lr": 1e-3}, r"advanced=\{'lr': .*no advanced setting has that name; there are eps, init_eigenvalue, "),
        ("eps", r"Invalid advanced='eps' of .*must be a dict of eps, "),
    ],
)
def test_what_is_no_advanced_setting_is_told(cls, advanced, says):
    with pytest.raises(TypeError, match=says):
        cls([weight(4, 6)], advanced=advanced)
    optimizer = cls([weight(4, 6)])
    with pytest.raises(TypeError, match=says.replace("of .*must", "of a new group: must")):
        optimizer.add_param_group({"params": [weight(4, 6)], "advanced": advanced})
    assert len(optimizer.param_groups) == 1


def test_kl_shampoo_has_no_newton_schulz_to_set():
    with pytest.raises(TypeError, match=r"advanced=\{'ns_steps': .* of KLShampoo: no advanced setting has that name"):
        KL([weight(4, 6)], advanced={"ns_steps": 3})
