"""Settings as configuration systems and NumPy give them: told apart from what was meant, and kept in plain types."""

import ast
import copy
import enum
import inspect
import re
import typing
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import typing_extensions
from torch import nn
from torch.testing import assert_close

from prokl import param_groups
from prokl.algorithm.polynomials import MUON
from prokl.algorithm.settings import KL_ADVANCED, PRO_ADVANCED, Advanced
from tests.inputs import KL, PRO, both, weight
from tests.routing import holding
from tests.training import OTHERS, differences, fine_and_odd, named, refused, reloaded, silent, train, weights_of


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
"""Settings as NumPy gives them, without the precision, which the other backend does not take."""


def by_hand(cls, given):
    optimizer = cls(named((4, 6)))
    optimizer.param_groups[0].update(given)
    return optimizer


WAYS = {
    "constructor": lambda cls, given: cls(named((4, 6)), **given),
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


@both
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numpys_rates_and_decays_set_between_steps_are_taken(cls, kind):
    """A schedule computes them so, by np.cos or np.linspace; what is not finite is refused by name."""
    optimizer, plain = fine_and_odd(cls), fine_and_odd(cls)
    for call in range(3, 6):
        for group, meant in zip(optimizer.param_groups, plain.param_groups, strict=True):
            group["lr"], group["weight_decay"] = kind(call / 64), kind(0.5)
            meant["lr"], meant["weight_decay"] = float(kind(call / 64)), float(kind(0.5))
        with silent():
            train(optimizer, [call])
        assert_close(weights_of(optimizer), weights_of(train(plain, [call])))  # AdamW computes in NumPy's precision
    for place, name in product(range(2), ("lr", "weight_decay")):
        for bad in map(kind, (-1, "inf", "nan")):
            group = optimizer.param_groups[place]
            good, group[name] = group[name], bad
            with refused(optimizer, f"Invalid {name}=.*: must be a finite number of at least 0"):
                train(optimizer, [6])
            group[name] = good


@listed_in_any_way
def test_settings_of_several_values_may_be_any_sequence(listed):
    """Coefficients and betas, also by hand, and what is one a weight."""
    coefficients, betas = listed(3.0, -4.0, 2.0), listed(0.5, 0.75)
    assert PRO([weight(4, 6)], ns_coefficients=coefficients).defaults["ns_coefficients"] == (3.0, -4.0, 2.0)
    matrices = {"params": named((6, 8), (6, 8)), "split": listed(None, np.int64(2)), "ns_coefficients": coefficients}
    matrices["transposed"] = listed(np.bool_(False), True)
    adamw = {"algorithm": "adamw", "lr": np.float64(0.5), "betas": betas, "amsgrad": np.bool_(1)}
    optimizer = PRO([matrices, {"params": named((6,), first=2), **adamw}])
    one, other = optimizer.param_groups
    assert (one["split"], one["transposed"], one["ns_coefficients"]) == ([None, 2], [False, True], (3.0, -4.0, 2.0))
    assert (other["lr"], other["betas"], other["amsgrad"]) == (0.5, (0.5, 0.75), True)
    assert all(is_plain(value) for group in (one, other) for key, value in group.items() if key != "params")
    one["ns_coefficients"], other["betas"] = coefficients, betas
    one["ns_coefficients"], one["ns_steps"] = listed(coefficients, listed(2.0, -1.5, 0.5)), 2
    train(optimizer, range(3))
    one["ns_coefficients"], one["ns_steps"] = coefficients, 5
    state = reloaded(train(optimizer, range(3, 4)).state_dict())["param_groups"]
    assert tuple(state[0]["ns_coefficients"]) == (3.0, -4.0, 2.0) and tuple(state[1]["betas"]) == (0.5, 0.75)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    groups = param_groups(model, lr=np.float64(0.5), adamw_lr=np.float32(0.5), adamw_betas=betas, rank=np.int64(2))
    assert groups[-1]["betas"] == (0.5, 0.75) and is_plain(groups[-1]["betas"]) and type(groups[0]["rank"]) is int
    assert {type(g["lr"]) for g in groups} == {float} and "  2  " in str(groups)


def test_sizes_of_pieces_may_be_numpys_in_any_sequence():
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
def test_advanced_settings_are_keywords_and_keys_of_groups(cls):
    groups = [{"params": [weight(4, 6)], "eps": 1e-3}, {"params": [weight(4, 6)]}]
    with silent():
        optimizer = cls(groups, eps=1e-4, clip_threshold=None, cuda_graphs=False)
    found = [(g["eps"], g["clip_threshold"], g["cuda_graphs"]) for g in optimizer.param_groups]
    assert found == [(1e-3, None, False), (1e-4, None, False)]


def test_each_argument_has_the_default_that_the_page_gives_it():
    page = (Path(__file__).parent.parent / "docs" / "settings.md").read_text().partition("## Groups")[0]
    given = {name: default.strip() for name, default in re.findall(r"^\| `(\w+)` \| ([^|]+)\|", page, re.MULTILINE)}
    wanted = {name: MUON if default == "as Muon" else ast.literal_eval(default) for name, default in given.items()}
    for cls, advanced in ((PRO, PRO_ADVANCED), (KL, KL_ADVANCED)):
        parameters = inspect.signature(cls).parameters
        found = {name: p.default for name, p in parameters.items() if p.default is not p.empty} | advanced
        if cls is KL:  # as the page's first lines say
            for name in {"rank", "alpha_kl", "variant", *PRO_ADVANCED.keys() - KL_ADVANCED.keys()}:
                del wanted[name]
            wanted |= {"lr": 0.002, "momentum": 0.95, "beta2": 0.95}
        assert found == wanted


@both
@pytest.mark.parametrize("name", ["bfloat16", "float32", "float", "float64", "double"])
def test_a_dtype_goes_by_the_names_that_torch_has(cls, name):
    """Keys of somebody else stay as they are."""
    dtype, keys = getattr(torch, name), ("state_dtype", "ns_dtype")[: 1 + (cls is PRO)]
    by_name, by_hand = cls([weight(4, 6)], **dict.fromkeys(keys, name)), cls([weight(4, 6)])
    by_hand.param_groups[0].update(dict.fromkeys(keys, name))
    for optimizer in (by_name, train(by_hand, [0])):
        group = optimizer.param_groups[0]
        group["theirs"] = torch.float16
        saved = optimizer.state_dict()["param_groups"][0]
        assert [saved[key] for key in keys] == [str(dtype).removeprefix("torch.")] * len(keys)
        group.update({key: value for key, value in saved.items() if key != "params"})
        assert cls([{"params": [weight(4, 6)], **{k: saved[k] for k in keys}}]).param_groups[0][keys[0]] is dtype
        train(optimizer, [1])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (group,) = optimizer.param_groups
        assert all(group[key] is dtype for key in keys) and saved["theirs"] is group["theirs"] is torch.float16


def test_each_advanced_keyword_has_a_default_and_a_type():
    assert PRO_ADVANCED.keys() == typing.get_type_hints(Advanced).keys() > KL_ADVANCED.keys()
    for cls, known in ((PRO, PRO_ADVANCED), (KL, KL_ADVANCED)):
        assert cls([weight(4, 6)]).defaults.items() >= known.items()
        assert typing.get_type_hints(cls.__init__)["advanced"] == typing_extensions.Unpack[Advanced]
    listed = re.search(r"(eps=1e-8.*?)\.\n\n", PRO.__doc__, re.DOTALL)[1]
    assert eval(f"dict({listed})") == PRO_ADVANCED


def test_arguments_of_a_subclass_that_are_no_settings_stay_its_own():
    class Mine(PRO):
        def __init__(self, params, lr=0.01, verbose=False, **more):
            super().__init__(params, lr=lr, **more)

    optimizer = Mine([weight(4, 6)])
    optimizer.load_state_dict(optimizer.state_dict())
    for found in (optimizer, copy.deepcopy(optimizer)):
        assert "verbose" not in found.defaults | found.param_groups[0]
