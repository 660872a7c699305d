"""What is asked of torch in the same words, and what would be silent or told without a remedy."""

import subprocess
import sys
import warnings

import pytest
import torch.distributed as dist

import prokl
from tests.inputs import KL, PRO, normal, weight

both = pytest.mark.parametrize("cls", [PRO, KL])


@pytest.mark.parametrize(
    "what", ["ops.explain(None, 'cpu')", "ops.explain_qr('cpu')", "cuda_qr.qr", "diagnostics.scalars"]
)
def test_importing_the_package_is_enough(what):
    code = f"import prokl, sys; prokl.{what}; assert 'triton' not in sys.modules and 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@both
def test_adjust_lr_fn_may_be_none_as_muons(cls):
    weights = [weight(8, 4), weight(8, 4)]
    one, other = cls(weights[:1], adjust_lr_fn=None), cls([{"params": weights[1:], "adjust_lr_fn": None}])
    assert {o.param_groups[0]["adjust_lr_fn"] for o in (one, other)} == {one.defaults["adjust_lr_fn"]} == {"original"}
    state = other.state_dict()
    state["param_groups"][0]["adjust_lr_fn"] = None
    one.load_state_dict(state)
    assert one.param_groups[0]["adjust_lr_fn"] == "original"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls([{"params": [weight(8, 4)], "adjust_lr_fn": None}], adjust_lr_fn=None)
    bracket = prokl.diagnostics.alpha_kl_bracket
    assert bracket(8, 4, 2, adjust_lr_fn=None) == bracket(8, 4, 2)
    for p in weights:
        p.grad = normal(8, 4)
    one.step()


@both
def test_world_before_init_process_group_is_told(cls, monkeypatch):
    """It is None then, as the default."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = r"^process_group=None was given: .*WORLD is None until init_process_group\(\).*WORLD_SIZE=4 every rank"
    with pytest.warns(UserWarning, match=said) as caught:
        cls([weight(4, 6)], process_group=dist.group.WORLD)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls([weight(4, 6)])  # nothing was asked for
        for alone in ("1", "many"):
            monkeypatch.setenv("WORLD_SIZE", alone)
            cls([weight(4, 6)], process_group=None)
        monkeypatch.delenv("WORLD_SIZE")
        cls([weight(4, 6)], process_group=None)
        monkeypatch.setenv("WORLD_SIZE", "4")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            cls([weight(4, 6)], process_group=None)  # meant, now that there is another
        finally:
            dist.destroy_process_group()


@both
def test_a_group_with_names_beside_others_without_is_refused_with_the_remedy(cls):
    named, bare = cls([("a", weight(4, 6))]), cls([weight(4, 6)])
    remedy = r"with/without names.*\(name, parameter\) pairs.*names=False"
    for optimizer, late in ((named, weight(4, 6)), (bare, ("late", weight(4, 6)))):
        with pytest.raises(ValueError, match=remedy):
            optimizer.add_param_group({"params": [late]})
        assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=remedy):
        cls([("a", weight(4, 6)), weight(4, 6)])
    with pytest.raises(ValueError, match=remedy):
        cls([{"params": [("a", weight(4, 6))]}, {"params": [weight(6)], "algorithm": "adamw", "lr": 0.1}])
