"""The example of Transformers' Trainer, run as a user runs it."""

import re

import pytest
from torch.testing import assert_close

from tests.test_examples import run

pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file


@pytest.mark.slow
def test_the_trainer_trains_and_a_resumed_run_ends_with_the_same_bits(tmp_path):
    tiny = ("--width", "32", "--steps", "20", "--save-every", "10")
    said = run(tmp_path, "train_hf.py", *tiny, "--folder", "whole")
    first, last = map(float, re.search(r"loss ([\d.]+) at first, ([\d.]+) at last", said).groups())
    assert last < first - 0.3 and "transformer.h.{0..3}.attn.c_attn.weight" in said and "split into 3" in said
    run(tmp_path, "train_hf.py", *tiny, "--folder", "parts", "--resume", "whole/checkpoint-10")
    whole, parts = (load_file(tmp_path / name / "checkpoint-20" / "model.safetensors") for name in ("whole", "parts"))
    for name, weight in whole.items():
        assert_close(weight, parts[name], rtol=0, atol=0, msg=name)
