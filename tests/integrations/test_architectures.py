"""Weights of real architectures go where tests/data/architectures.csv says, and why; each line was read by eye."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import prokl

for package in ("transformers", "peft", "diffusers"):
    pytest.importorskip(package)

import transformers  # noqa: E402

from prokl.routing.layout import FUSED, GATE_THEN_UP  # noqa: E402
from tests.integrations.architectures import ARCHITECTURES, TIMM, build_timm, lines, recorded  # noqa: E402
from tests.training import silent  # noqa: E402

RECORDED = recorded()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_weights_of_an_architecture_go_where_the_table_says(name):
    model = ARCHITECTURES[name]()
    with silent():  # no weight of them is suspected to be several
        assert lines(name, model) == RECORDED[name]


def test_every_qkv_of_transformers_makes_q_then_k_then_v():
    """Every class with such a layer has its outputs as (3, heads, ...), but for those that have rules of their own."""
    count = 0
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        for cls in ast.parse(text).body if "self.qkv = nn.Linear(" in text else ():
            source = ast.get_source_segment(text, cls)
            if isinstance(cls, ast.ClassDef) and "self.qkv = nn.Linear(" in source:
                apart = re.search(r"\.reshape\([^()]*\b3, self\.(num_heads|num_attention_heads|groups),", source)
                assert apart or (cls.name, "qkv") in FUSED, cls.name
                count += 1
    assert count > 30


def source(cls):
    """Return the source of a class of transformers, or of one that is named with its module."""
    module, _, name = cls.rpartition(".")
    if module:
        return inspect.getsource(getattr(importlib.import_module(module), name))
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        if f"\nclass {cls}(" in text:
            return next(ast.get_source_segment(text, c) for c in ast.parse(text).body if getattr(c, "name", "") == cls)


HALVES = [(cls, layer) for (cls, layer), pieces in FUSED.items() if pieces == 2]


@pytest.mark.parametrize("cls, layer", [*HALVES, *((cls, "gate_up_proj") for cls in sorted(GATE_THEN_UP))])
def test_outputs_that_divide_into_two_are_halves(cls, layer):
    found = source(cls)
    assert re.search(rf"self\.{layer}\b", found, re.IGNORECASE) and re.search(r"chunk\(2, dim=-1\)", found)


@pytest.mark.parametrize("name", TIMM)
def test_weights_of_timm_go_where_the_table_says(name, timm):
    assert lines(name, build_timm(timm, name)) == RECORDED[name]


def test_the_table_holds_these_architectures_and_no_others():
    assert list(RECORDED) == [*ARCHITECTURES, *TIMM]


# Those of text that compute in float64. DeBERTa v2 has relative positions; GPT-J's and GPT-NeoX's turn other pairs.
TURNED = ["gpt2", "gpt2-cross-attention", "bloom", "opt", "llama", "phi3", "mistral", "qwen3", "gemma3"]
TURNED += ["bert-pretraining", "roberta-masked", "electra-masked", "albert-pretraining", "distilbert-answers"]
TURNED += ["modernbert", "t5", "bart-labels", "deberta", "bark"]


def outputs(model):
    given = {"input_ids": torch.tensor([[5, 3, 8, 4, 2]])}  # the last one ends a text, which BART's labels want
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"]
    if getattr(model.config, "add_cross_attention", False):
        given["encoder_hidden_states"] = torch.linspace(-1, 1, 5 * 32, dtype=torch.float64).reshape(1, 5, 32)
    with torch.no_grad():
        return model(**given)[0]


def turn(model, times):
    """Turn the rows of every head, or of several together, by one rotation of the pairs that positions turn."""
    weights = dict(model.named_parameters())
    for route in prokl.param_groups(model, lr=0.02, adamw_lr=1e-3).routes:
        if "by heads" not in route.reason:
            continue
        rows = weights[route.names[0]].data
        rows = rows.mT if route.transposed else rows
        sizes = route.split if isinstance(route.split, tuple) else [len(rows) // route.split] * route.split
        size, end = sizes[0] * times, len(rows) - (sizes[-1] if isinstance(route.split, tuple) else 0)  # of values
        angles = torch.linspace(0.3, 1.2, size // 2, dtype=rows.dtype)
        cos, sin = angles.cos().diag(), angles.sin().diag()
        rotation = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
        for start in range(0, end, size):
            if "q, k and v by heads" not in route.reason or start // size % 3 < 2:  # the third is of values
                rows[start : start + size] = rotation @ rows[start : start + size]


@pytest.mark.parametrize("name", TURNED)
def test_rotations_of_heads_leave_what_a_model_computes(name):
    """Scores are products of a head's queries and keys: a rotation of both leaves them if it is of heads."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().double().eval()
    for part, p in model.named_parameters():
        # Larger than they start, so that attention is not even; biases would have to turn, too.
        p.data.mul_(0.0 if part.endswith("bias") else 8.0 if p.ndim > 1 else 1.0)
    before = outputs(model)
    turn(model, 1)
    after = outputs(model)
    turn(model, 2)
    far = (outputs(model) - before).abs().max()
    assert (after - before).abs().max() <= 1e-5 * far and far > 0.01  # 1.2e-6 at most, where norms are in float32
