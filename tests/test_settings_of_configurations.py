"""Settings as configuration systems and NumPy give them: told apart from what was meant, and kept in plain types."""

import enum
import inspect
import typing
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.inputs import KL, PRO, both, weight
from tests.problems import made
from tests.routing import holding
from tests.training import OTHERS, differences, named, reloaded, silent, told_once, train


class Listed(Sequence):
    """A list of a configuration, as omegaconf's: a Sequence, and neither list nor tuple."""

    def __init__(self, *values):
        self.values = values

    def __getitem__(self, i):
        return self.values[i]

    def __len__(self):
        return len(self.values)


class Name(str, enum.Enum):
    SMOK_HOP = "smok-hop"


def is_plain(value):
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return type(value) in (bool, int, float, str, type(None), torch.dtype, torch.Tensor)


def as_array(*values):
    return np.array(values, dtype=None if all(type(v) is float for v in values) else object)


LISTS = {"Listed": Listed, "list": lambda *values: [*values], "array": as_array}
listed_in_any_way = pytest.mark.parametrize("listed", LISTS.values(), ids=LISTS)
KINDS = {bool: np.bool_, int: np.int16, float: np.float16, str: np.str_}
SETTINGS = {
    key: KINDS[type(value)](value) for key, value in OTHERS.items() if type(value) in KINDS and key != "precision"
}
"""As NumPy gives them, but for a precision, which the other backend does not take."""


def by_hand(cls, given):
    optimizer = cls(named((4, 6)))
    optimizer.param_groups[0].update(given)
    return optimizer


WAYS = {
    "constructor": lambda cls, given: made(cls, named((4, 6)), **given),
    "group": lambda cls, given: cls([{"params": named((4, 6)), **given}]),
    "by hand": by_hand,
}


@both
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_settings_of_other_types_are_kept_as_pythons_own(cls, way):
    """Set by hand once they are saved."""
    given = {key: value for key, value in SETTINGS.items() if key in cls([weight(4, 6)]).defaults}
    meant = {key: value.item() for key, value in given.items()}
    given |= {"variant": Name.SMOK_HOP} if cls is PRO else {}
    optimizer, plain = way(cls, given), way(cls, meant)
    group = optimizer.param_groups[0]
    assert way is by_hand or all(type(group[key]) is type(v) and group[key] == v for key, v in meant.items())
    assert differences(train(optimizer, range(3)), train(plain, range(3))) == set()
    state = reloaded(optimizer.state_dict())
    assert all(is_plain(value) for value in state["param_groups"][0].values())
    assert reloaded(plain.state_dict())["param_groups"] == state["param_groups"]
    again = cls(named((4, 6)))
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == cls([weight(4, 6)], lr=np.array(meant["lr"])).param_groups[0]["lr"]
    group["of_the_users"] = own = ["a list"]
    assert optimizer.state_dict()["param_groups"][0]["of_the_users"] is own
    group["a_count_of_the_users"], group["eps"] = count, _ = np.int64(1), 1e-9  # all is looked at anew
    train(optimizer, range(3, 4))
    assert group["a_count_of_the_users"] is count


@listed_in_any_way
def test_settings_of_several_values_may_be_any_sequence(listed):
    """Coefficients and betas, also by hand, and what is one a weight."""
    coefficients, betas = listed(3.0, -4.0, 2.0), listed(0.5, 0.75)
    assert made(PRO, [weight(4, 6)], ns_coefficients=coefficients).defaults["ns_coefficients"] == (3.0, -4.0, 2.0)
    matrices = {"params": named((6, 8), (6, 8)), "split": listed(None, np.int64(2)), "ns_coefficients": coefficients}
    matrices["transposed"] = listed(np.bool_(False), True)
    adamw = {"algorithm": "adamw", "lr": np.float64(0.5), "betas": betas, "amsgrad": np.bool_(1)}
    optimizer = PRO([matrices, {"params": named((6,), first=2), **adamw}])
    one, other = optimizer.param_groups
    assert (one["split"], one["transposed"], one["ns_coefficients"]) == ([None, 2], [False, True], (3.0, -4.0, 2.0))
    assert (other["lr"], other["betas"], other["amsgrad"]) == (0.5, (0.5, 0.75), True)
    assert all(is_plain(value) for group in (one, other) for key, value in group.items() if key != "params")
    one["ns_coefficients"], other["betas"] = coefficients, betas
    state = reloaded(train(optimizer, range(3)).state_dict())["param_groups"]
    assert tuple(state[0]["ns_coefficients"]) == (3.0, -4.0, 2.0) and tuple(state[1]["betas"]) == (0.5, 0.75)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    groups = param_groups(model, lr=np.float64(0.5), adamw_lr=np.float32(0.5), adamw_betas=betas, rank=np.int64(2))
    assert groups[-1]["betas"] == (0.5, 0.75) and is_plain(groups[-1]["betas"]) and type(groups[0]["rank"]) is int
    assert {type(g["lr"]) for g in groups} == {float} and "  2  " in str(groups)


def test_sizes_of_pieces_may_be_numbers_of_numpy_and_any_sequence():
    optimizer = PRO([{"params": [weight(6, 8)], "split": (np.int64(2), np.int64(4))}])
    assert optimizer.param_groups[0]["split"] == (2, 4) and is_plain(optimizer.param_groups[0]["split"])
    model = holding(qkv=nn.Linear(8, 6, bias=False), w=nn.Linear(6, 8, bias=False))
    for sizes in (Listed(2, 4), np.array([2, 4])):
        assert param_groups(model, lr=0.1, adamw_lr=0.1, split={"qkv.*": sizes})[0]["split"][0] == (2, 4)
    found = param_groups(model, lr=0.1, adamw_lr=0.1, split={"qkv.*": np.int64(2)}, transposed=Listed("w.*"))
    assert found[0]["split"] == [2, None] and found[0]["transposed"] == [False, True]


@both
def test_type_hints_resolve(cls):
    for hinted in (cls.__init__, cls.step, param_groups):
        assert typing.get_type_hints(hinted)
    hints = typing.get_type_hints(cls.__init__)
    assert hints["lr"] == float | torch.Tensor
    assert torch.distributed.ProcessGroup in typing.get_args(hints["process_group"])


@both
def test_a_preset_beside_explicit_defaults_says_what_it_does_not_set(cls):
    """LightningCLI and hydra pass every default explicitly; other values than the defaults, and its own, are meant."""
    defaults = {k: p.default for k, p in inspect.signature(cls).parameters.items() if p.default is not p.empty}
    defaults["advanced"] = {"clip_threshold": 5.0}
    said = (
        r"^preset='paper' leaves .*clip_threshold=5\.0.* as given.*the preset's are .*clip_threshold=None.*leave .* out"
    )
    with told_once(said, __file__):
        group = cls([weight(4, 6)], **{**defaults, "preset": "paper"}).param_groups[0]
    assert group["clip_threshold"] == 5.0 and group["init_eigenvalue"] == 0.1
    with silent():
        group = made(cls, [weight(4, 6)], clip_threshold=4.0, init_eigenvalue=0.1, preset="paper").param_groups[0]
        assert (group["clip_threshold"], group["init_eigenvalue"]) == (4.0, 0.1)
        cls([weight(4, 6)], preset="paper", lr=0.1)
        made(cls, [weight(4, 6)], clip_threshold=5.0, preset=None)


@both
def test_an_advanced_setting_is_given_in_its_mapping_or_by_its_old_keyword_with_one_warning(cls):
    with silent():
        new = cls([weight(4, 6)], advanced={"eps": 1e-4, "clip_threshold": None})
    said = r"^eps=0\.0001, clip_threshold=None of .*advanced=\{'eps': 0\.0001, "
    with told_once(said, __file__, FutureWarning):
        old = cls([weight(4, 6)], eps=1e-4, clip_threshold=None)
    assert new.defaults == old.defaults and (new.defaults["eps"], new.defaults["clip_threshold"]) == (1e-4, None)
    assert repr(new) == repr(old)


@both
def test_a_group_may_have_advanced_settings_in_their_mapping_or_beside_the_others(cls):
    groups = [{"params": [weight(4, 6)], "advanced": {"eps": 1e-4}}, {"params": [weight(4, 6)], "eps": 1e-4}]
    optimizer = cls([*groups, {"params": [weight(4, 6)]}], advanced={"cuda_graphs": False})
    assert [g["eps"] for g in optimizer.param_groups] == [1e-4, 1e-4, 1e-8]
    assert not any(g["cuda_graphs"] for g in optimizer.param_groups)
    assert all("advanced" not in g for g in [*optimizer.param_groups, *optimizer.state_dict()["param_groups"]])


@pytest.mark.parametrize(
    "cls, advanced, says",
    [
        (PRO, {"ns_step": 3}, r"advanced=\{'ns_step': .*no advanced setting has that name; the nearest is 'ns_steps'"),
        (KL, {"epsilon": 3}, r"advanced=\{'epsilon': .*no advanced setting has that name; the nearest is 'eps'"),
        (KL, {"ns_steps": 3}, r"advanced=\{'ns_steps': .* of KLShampoo: no advanced setting has that name"),
        (KL, {"lr": 1e-3}, r"advanced=\{'lr': .*no advanced setting has that name; there are eps, init_eigenvalue, "),
        (PRO, "eps", r"Invalid advanced='eps' of .*must be a dict of eps, "),
    ],
)
def test_what_is_no_advanced_setting_is_told(cls, advanced, says):
    with pytest.raises(TypeError, match=says):
        cls([weight(4, 6)], advanced=advanced)
    optimizer = cls([weight(4, 6)])
    if says.startswith("Invalid") or "lr" in advanced:
        with pytest.raises(TypeError, match=says.replace("of .*must", "of a new group: must")):
            optimizer.add_param_group({"params": [weight(4, 6)], "advanced": advanced})
    assert len(optimizer.param_groups) == 1
