"""Names of weights: told where they no longer fit, and the same whatever torch.compile, DDP, FSDP or others prefix."""

import copy

import pytest
import torch

import prokl
from tests.inputs import PRO, both, weight
from tests.training import differences, named, refused, silent, told_once, train, weights_of

BF16 = torch.bfloat16


@both
@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
@pytest.mark.parametrize("edited", ["params", "param_names"])
@pytest.mark.parametrize("edit", ["removed", "added"])
def test_names_that_no_longer_fit_are_told_and_nothing_moves(cls, algorithm, edited, edit):
    groups = [{"params": [("first", weight(4, 6))]}, {"params": named((4, 6), (4, 6), (4, 6))}]
    groups[1].update(algorithm=algorithm, lr=0.01)
    optimizer = train(cls(groups), range(2))
    group, weights = optimizer.param_groups[1], weights_of(optimizer)
    kept = list(group[edited])
    new = weight(4, 6, seed=3) if edited == "params" else "new"
    group[edited][:] = [kept[0], kept[2]] if edit == "removed" else [*kept, new]
    counts = f"{len(group['params'])} weights and {len(group['param_names'])} param_names"
    message = rf"^Group 1 has {counts} \('w0', .*\): .* in both lists at the same place"
    calls = [optimizer.clipped, optimizer.state_dict] + [optimizer.step] * (edited == "params")
    for call in calls + [lambda: prokl.diagnostics.scalars(optimizer)] * (algorithm == "matrix"):
        with refused(optimizer, message, weights=weights):
            call()
    group[edited][:] = kept
    train(optimizer, [2])


@both
def test_a_weight_removed_with_its_name_leaves_the_others_theirs(cls):
    optimizer = train(cls(named((4, 6), (4, 6), (4, 6))), [0])
    del optimizer.param_groups[0]["params"][1], optimizer.param_groups[0]["param_names"][1]
    assert train(optimizer, [1]).clipped().keys() == {"w0", "w2"}
    del optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"][1]  # no longer asked for
    assert train(optimizer, [2]).clipped().keys() == {"parameter 0 of group 0"}


WRAPPED = ["_orig_mod.{}", "module.{}", "module._orig_mod.{}", "_fsdp_wrapped_module.{}", "0._orig_mod.weight"]


@both
@pytest.mark.parametrize("split", [None, 2])
def test_wrappers_do_not_change_how_bfloat16_is_rounded(cls, split):
    def trained(name):
        groups = [{"params": [(name, weight(8, 12, dtype=BF16))], "split": split}]
        return train(cls(groups, lr=1e-3), range(3))

    plain = trained("0.weight")
    for wrapped in [*WRAPPED, "0._checkpoint_wrapped_module.weight", "0.module.weight"]:
        assert differences(trained(wrapped.format("0.weight")), plain) == set(), wrapped
    assert differences(trained("1.weight"), plain)  # the name itself counts


@pytest.mark.parametrize("wrapped", WRAPPED[:4])
def test_checkpoints_go_by_names_without_wrappers(wrapped):
    def build(*names):
        return train(PRO([(n, weight(4, 6, seed=i)) for i, n in enumerate(names)]), [0])

    there, (up, down) = build("up", "down"), map(wrapped.format, ("up", "down"))
    with pytest.raises(ValueError, match=r"weight 0 is 'up' there and '.*down' here"):
        build(down, up).load_state_dict(there.state_dict())
    here = build(up, down)
    here.load_state_dict(there.state_dict())
    for p, q in zip(weights_of(here), weights_of(there), strict=True):
        assert torch.equal(here.state[p]["M_Q"], there.state[q]["M_Q"])


def test_a_module_and_its_saved_copy_hide_no_other_order():
    """Peft's names of both are one without its wrappers."""
    both_copies = ["head.original_module.weight", "head.modules_to_save.default.weight"]

    def build(*names):
        params = [(name, weight(4, 6, seed=i)) for i, name in enumerate([*names, *both_copies])]
        return train(PRO(params), [0])

    here = build("b", "a")
    with refused(here, "weights in another order: weight 0 is 'a' there and 'b' here"):
        here.load_state_dict(build("a", "b").state_dict())
    with silent():
        build("a", "b").load_state_dict(build("a", "b").state_dict())


@pytest.mark.parametrize("apart", [False, True], ids=["", "groups"])
@both
def test_state_goes_to_no_weight_of_another_name_without_a_word(cls, apart):
    def build(*names):
        params = [(name, weight(4, 6, seed=i)) for i, name in enumerate(names)]
        return train(cls([{"params": [own]} for own in params] if apart else params), [0])

    there = build("a", "b", "c").state_dict()
    for names in (("b", "d", "a"), ("x", "a", "b"), ("a", "c", "b")):
        here = build(*names)
        with refused(here, "weights in another order: weight [01] is '[ab]' there and '[bcx]' here"):
            here.load_state_dict(there)
    for names, says in ((("a", "c"), "2: 'b' is there alone"), (("a", "b", "c", "new"), "4: 'new' is here alone")):
        here = build(*names)
        with refused(here, f"^The loaded state dict has 3 weights and this optimizer {says}"):
            here.load_state_dict(there)
    unnamed = copy.deepcopy(there)
    del unnamed["param_groups"][-1]["param_names"]  # which is no sign of fewer weights
    build("a", "b", "c").load_state_dict(unnamed)
    here = build("a", "new", "c")
    with told_once("other names for 1 of 3 weights: weight 1 is 'b' there and 'new' here", __file__):
        here.load_state_dict(there)
    nameless = copy.deepcopy(there)
    for group in nameless["param_groups"]:
        del group["param_names"]
    with silent():
        build("a", "b", "c").load_state_dict(there)
        build("a", "c", "b").load_state_dict(nameless)  # by place, as torch's do
