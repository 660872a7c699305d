"""The files of docs/examples, run as a user runs them after ``pip install .``: by an environment with nothing more."""

import ast
import math
import os
import re
import runpy
import subprocess
import sys
import venv
from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement

from tests.commands import ROOT

EXAMPLES = ROOT / "docs" / "examples"
EXTRA = 'pip install ".[integrations]"'
NEED_IT = {"train_accelerate.py": "accelerate", "train_hf.py": "transformers"}
"""Needs of each example beside the plain install, all of them in EXTRA."""


def run(folder, script, *arguments, python=sys.executable, **variables):
    """Run an example in a folder; return what it prints."""
    ended = attempt(folder, EXAMPLES / script, *arguments, python=python, PYTHONPATH=str(ROOT), **variables)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def attempt(folder, *command, python, **variables):
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run([python, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def names(requirements):
    """Return the distributions that requirements name, extras aside."""
    wanted = map(Requirement, requirements)
    return {it.name for it in wanted if it.marker is None or it.marker.evaluate({"extra": ""})}


def of_prokl(key):
    """Return the distributions that a list of pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return names(ast.literal_eval(re.search(rf"^{key} = (\[.*?\])", text, re.MULTILINE | re.DOTALL)[1]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The Python of an environment that has prokl and all that it requires, by links to what is installed here."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "prokl").symlink_to(ROOT / "prokl")
    found, wanted = set(), of_prokl("dependencies")
    while wanted:
        found |= wanted
        wanted = {name for own in wanted for name in names(metadata.requires(own) or ())} - found
    for distribution in map(metadata.distribution, found):
        for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (packages / name).exists():  # folders such as nvidia are of several distributions
                (packages / name).symlink_to(distribution.locate_file(name))
    python = folder / "bin" / "python"
    for other in ("pytest", "matplotlib", "bench"):
        assert f"No module named '{other}'" in attempt(folder, "-c", f"import {other}", python=python).stderr
    return python


@pytest.mark.slow
def test_the_gpt_example_resumes_bit_for_bit(plain, tmp_path, monkeypatch):
    tiny = ("--width", "32", "--steps", "12", "--save-every", "5", "--accumulate", "2")
    ended = attempt(tmp_path, EXAMPLES / "train_gpt.py", *tiny, "--folder", "whole", python=plain)
    assert ended.returncode == 0, ended.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *tiny, "--folder", "parts", "--resume", "whole/10.pt"])
    runpy.run_path(str(EXAMPLES / "train_gpt.py"), run_name="__main__")  # here, which imports nothing anew
    whole, parts = (torch.load(tmp_path / name / "12.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["losses"] == parts["losses"] and len(whole["losses"]) == 12
    assert whole["losses"][-1] < whole["losses"][0] - 0.3
    said = re.findall(r"step (\d+): loss ([\d.]+) nats a byte, mean of 10 steps", ended.stdout)
    assert "lm_head.weight" in ended.stdout and [int(step) for step, _ in said] == [10, 12]
    assert float(said[-1][1]) == pytest.approx(sum(whole["losses"][-10:]) / 10, abs=1e-3)
    for name, weight in whole["model"].items():
        assert torch.equal(weight, parts["model"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp2.py"])
def test_on_two_ranks_the_loss_leaves_that_of_a_guess(script, plain, tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    tiny = ("--width", "32", "--steps", "30", "--folder", "saved", "--save-every", "30")
    ended = attempt(tmp_path, *torchrun, EXAMPLES / script, *tiny, python=plain)
    # gloo may abort a rank after its last line: 2 of 100 runs (https://github.com/pytorch/pytorch/issues/190489).
    assert ended.returncode == 0 or "terminate called without an active exception" in ended.stderr, ended.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) nats a byte", ended.stdout)]
    assert len(losses) == 3 and 1.5 < losses[-1] < math.log(256) - 1.5  # measured: 2.87 and 3.19
    assert (tmp_path / "saved" / "30" / ".metadata").exists()


LACKS = dict.fromkeys(("train_ddp.py", "train_fsdp2.py"), (2, "torchrun --nproc-per-node 2 {script}\n"))
LACKS |= {script: (1, f"ModuleNotFoundError: No module named {need!r}\n") for script, need in NEED_IT.items()}


@pytest.mark.slow
@pytest.mark.parametrize("script", LACKS)
def test_without_torchrun_or_the_extra_it_says_what_is_missing(script, plain, tmp_path):
    status, says = LACKS[script]
    ended = attempt(tmp_path, EXAMPLES / script, python=plain)
    assert ended.returncode == status and ended.stderr.endswith(says.format(script=script))
    assert NEED_IT.get(script, "transformers") in of_prokl("integrations")


def test_an_example_that_needs_an_extra_names_it_and_so_does_the_link():
    linked = 0
    for script in EXAMPLES.glob("*.py"):
        assert (EXTRA in ast.get_docstring(ast.parse(script.read_text("utf-8")))) is (script.name in NEED_IT)
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
            for paragraph in re.split(r"\n(?=\n|\|)", page.read_text("utf-8")):
                if script.name in NEED_IT and f"examples/{script.name}" in paragraph:
                    assert EXTRA in paragraph.replace("\n", " "), (page.name, paragraph)
                    linked += 1
    assert linked >= len(NEED_IT)
