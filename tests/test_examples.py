"""The files of docs/examples, run as a user runs them."""

import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

from tests.commands import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def run(folder, script, *arguments):
    """Run an example in a folder; return what it prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_gpt_example_resumes_bit_for_bit(tmp_path, monkeypatch):
    tiny = ("--width", "32", "--steps", "12", "--save-every", "5", "--accumulate", "2")
    output = run(tmp_path, "train_gpt.py", *tiny, "--folder", "whole")
    assert "lm_head.weight" in output and (tmp_path / "whole" / "loss.png").stat().st_size > 1000
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *tiny, "--folder", "parts", "--resume", "whole/10.pt"])
    runpy.run_path(str(EXAMPLES / "train_gpt.py"), run_name="__main__")  # here, which imports nothing anew
    whole, parts = (torch.load(tmp_path / name / "12.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["losses"] == parts["losses"] and len(whole["losses"]) == 12
    assert whole["losses"][-1] < whole["losses"][0] - 0.3
    assert float(re.search(r"loss ([\d.]+) over the last 10", output)[1]) == pytest.approx(
        sum(whole["losses"][-10:]) / 10, abs=1e-4
    )
    for name, weight in whole["model"].items():
        assert torch.equal(weight, parts["model"][name]), name
