"""The table of groups: one line for what is repeated alike, names as they are written, hints where a layout is open."""

import torch
from torch import nn

from prokl import param_groups
from tests.routing import HINT, RATES, holding, linear


def block(width=8):
    attention = holding(q_proj=linear(width, width), o_proj=linear(width, width))
    attention.num_heads = 2
    return holding(attn=attention, norm=nn.LayerNorm(width))


def names(model, **options):
    """First cells of the table's lines, title and counts left out."""
    lines = str(param_groups(model, **RATES, **options)).splitlines()[1:-2]
    return [line.split("  ")[0] for line in lines]


def test_repeated_blocks_are_one_line_a_weight_with_their_number():
    model = holding(layers=nn.ModuleList(block() for _ in range(24)), lm_head=linear(8, 31))
    groups = param_groups(model, **RATES)
    assert str(groups).splitlines()[1:] == [
        "layers.{0..23}.attn.q_proj.weight ×24  8x8    matrix     1             linear layer; by heads: 2 × 4",
        "layers.{0..23}.attn.o_proj.weight ×24  8x8    matrix     1             linear layer",
        "layers.{0..23}.norm.weight ×24         8      adamw      -             1-D, weight of LayerNorm",
        "layers.{0..23}.norm.bias ×24           8      adamw      -             1-D, bias of LayerNorm",
        "lm_head.weight                         31x8   adamw      -             named as output head",
        "matrix: 48 tensors, 3,072 elements; adamw: 49 tensors, 632 elements",
        "output head: lm_head.weight (named as output head)",
    ]
    assert len(groups.routes) == 97


def test_equal_ranks_of_many_heads_are_one_number():
    groups = param_groups(holding(attn=nn.MultiheadAttention(48, 12)), **RATES)
    assert groups.routes[0].rank == (1,) * 24 + (8,)
    assert "in_proj_weight   144x48  matrix     24 × 1,8      q, k and v" in str(groups)


def test_what_differs_has_a_line_of_its_own_and_gaps_are_shown():
    model = holding(layers=nn.ModuleList(holding(up=linear(8, 9 if i == 3 else 12)) for i in range(7)))
    model.layers[5].up.requires_grad_(False)
    assert names(model) == ["layers.{0..2,4,6}.up.weight ×5", "layers.3.up.weight", "layers.5.up.weight"]


def test_experts_of_blocks_and_numbered_names_collapse_too():
    inner = nn.ModuleList(holding(experts=nn.ModuleList(holding(w=linear(8, 12)) for _ in range(4))) for _ in range(3))
    assert names(holding(h=inner)) == ["h.{0..2}.experts.{0..3}.w.weight ×12"]
    ragged = nn.ModuleList(nn.ModuleList(linear(8, 12) for _ in range(n)) for n in (3, 2, 3))
    assert names(holding(down=ragged)) == ["down.{0,2}.{0..2}.weight ×6", "down.1.{0,1}.weight ×2"]
    numbered = holding(
        **{f"encoder_layer_{i}": linear(8, 12) for i in range(4)}, fc1=linear(12, 12), fc2=linear(12, 12)
    )
    assert names(numbered) == ["encoder_layer_{0..3}.weight ×4", "fc1.weight", "fc2.weight"]


def test_tied_weights_keep_their_lines():
    shared = block()
    model = holding(layers=nn.ModuleList([shared, shared, block(), block()]))
    assert names(model)[:4] == ["layers.0.attn.q_proj.weight", "", "layers.0.attn.o_proj.weight", ""]
    assert "layers.{2,3}.attn.q_proj.weight ×2" in names(model)


def test_the_table_shows_every_parameters_place_and_reason():
    model = holding(
        tok=nn.Embedding(48, 16),
        norm=nn.LayerNorm(16, bias=False),
        conv=nn.Conv2d(3, 8, 3, bias=False),
        old=linear(16, 16),
        experts=torch.zeros(4, 16, 32),
        square=linear(16, 16),
        scale=torch.tensor(1.0),
        lm_head=linear(16, 48),
    )
    model.lm_head.weight = model.tok.weight
    model.old.weight.requires_grad_(False)
    model.norm.requires_grad_(False)
    groups = param_groups(model, **RATES, rank=128)
    expected = f"""\
parameter           shape    algorithm  rank  reason
experts             4x16x32  matrix     16    stack of 4, experts of Module{HINT}
scale               scalar   adamw      -     0-D, scale of Module
tok.weight          48x16    adamw      -     lm_head.weight tied to embedding tok.weight
  = lm_head.weight
norm.weight         16       adamw      -     1-D, weight of LayerNorm; frozen now
conv.weight         8x3x3x3  matrix     8     convolution, flattened to 8x27
old.weight          16x16    matrix     15    linear layer; frozen now
square.weight       16x16    matrix     15    linear layer
matrix: 4 tensors, 2,776 elements, 1 of them frozen now; adamw: 3 tensors, 785 elements, 1 of them frozen now
output head: tok.weight (lm_head.weight tied to embedding tok.weight)"""
    assert str(groups) == repr(groups) == expected
    assert "  rank if auto  " in str(param_groups(model, **RATES)).splitlines()[0]  # the optimizer may be told another
    assert "  rank  " in str(param_groups(model, **RATES, rank="auto")).splitlines()[0]
