"""Weights by attention's heads, where ranks have parts of heads: the same steps, and the same checkpoints."""

import pytest
from torch import nn

from prokl import param_groups
from tests.distributed.checkpoints import refuse, resume, save_and_go_on
from tests.distributed.placements import assert_close, assert_same, trained
from tests.inputs import KL, PRO
from tests.routing import RATES

SHAPES = {"q_proj": (12, 8), "k_proj": (8, 8), "v_proj": (8, 8), "in_proj": (24, 8), "experts": (4, 12, 8)}
SIZES = {"num_heads": 3, "num_kv_heads": 2, "head_dim": 4}  # 4 ranks have 3 rows of each q, 2 of k
DIVIDED = {"q_proj": 3, "k_proj": 2, "v_proj": None, "in_proj": (4, 4, 4, 4, 8), "experts": 3}


def by_heads(weights, **options):
    """Groups of these weights as those of an attention, one of torch's in it, and a stack of queries."""
    model = nn.Module()
    model.attn = nn.MultiheadAttention(8, 2, bias=False)
    del model.attn.out_proj
    model.attn.in_proj_weight = weights["in_proj"]
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(model, name, weights[name])
    for name, size in SIZES.items():
        setattr(model, name, size)
    model.wq = weights["experts"]
    groups = param_groups(model, **RATES, **options)
    assert not options or [g.get("split") for g in groups] == [None]
    names = {p: name for name, p in weights.items()}
    (group,) = groups
    assert options or dict(zip((names[p] for _, p in group["params"]), group["split"], strict=True)) == DIVIDED
    return [{**group, "params": [(names[p], p) for _, p in group["params"]]}]


def whole(weights):
    return by_heads(weights, heads=False, split_fused=False)


GIVEN = {"shapes": SHAPES, "groups": by_heads}


@pytest.mark.parametrize(
    ("world", "cls", "how"),
    [(2, PRO, "ddp"), (4, PRO, "fsdp"), (4, KL, "fsdp"), (4, PRO, "columns"), (4, PRO, "rows and columns")],
)
def test_heads_cut_by_ranks_are_stepped_as_in_one_process(world, cls, how, pools):
    """Rows and columns of tensor parallelism are shards of one dimension or the other."""
    expected = trained("alone", cls=cls, **GIVEN)
    found = pools[world].run(trained, how, cls=cls, **GIVEN)
    for weights in found:
        assert_close(weights, expected)
        assert_same(weights, found[0])
    differ = trained("alone", cls=cls, shapes=SHAPES, groups=whole)
    assert all(abs(differ[name] - expected[name]).max() > 1e-3 for name in ("q_proj", "k_proj", "experts"))


@pytest.mark.slow
def test_a_checkpoint_of_heads_goes_on_on_fewer_ranks(pools, tmp_path):
    saved = pools[4].run(save_and_go_on, tmp_path, ("nested", "full"), "fsdp", **GIVEN)
    for route in ("nested", "full"):
        for outcome, _ in pools[2].run(resume, tmp_path, route, "fsdp", **GIVEN):
            assert_close(outcome[0], saved[0][0][0])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorchs_checkpoint_of_whole_weights_is_refused(tmp_path):
    save_and_go_on(tmp_path, ("nested",), "alone", shapes=SHAPES, groups=whole)
    kind, message, differs = refuse(tmp_path, "nested", "alone", **GIVEN)
    assert kind == "CheckpointException" and "Missing key" in message and differs == []
    resume(tmp_path, "nested", "alone", shapes=SHAPES, groups=whole)
