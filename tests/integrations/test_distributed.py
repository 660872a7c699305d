"""The example with Accelerate, run as it stands: what FSDP2 swaps is trained, resumed exactly."""

from functools import partial

import pytest
import torch

from tests.commands import ROOT
from tests.distributed_examples import assert_same, checkpoint, scripts, torchrun

TINY = "--epochs 2 --width 32"


def assert_routes_survived(state, steps):
    matrices = {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("gate_up", "down")}
    assert {name for name, own in state.items() if "exp_avg" not in own} == matrices
    for name in matrices:
        pieces = (".0", ".1") if "gate_up" in name else ("",)
        assert {key for key in state[name] if key.startswith("M")} == {"M" + piece for piece in pieces}
        assert [int(state[name]["step" + piece]) for piece in pieces] == [steps - 1] * len(pieces)
        assert state[name]["M" + pieces[0]].shape == ((32, 128))


def trained(folder, *runs):
    printed = torchrun(
        folder,
        *((ranks, "train_accelerate.py", f"{TINY} --folder {rest}") for ranks, rest in runs),
        accelerate_on_cpu=True,
    )
    assert all(line.startswith("epoch ") and line.endswith(", skipped nothing") for line in printed)
    return printed


def test_accelerate_resumes_exactly_and_on_one_process(tmp_path):
    pytest.importorskip("accelerate")
    assert "train_accelerate.py" in scripts(tmp_path)
    printed = trained(tmp_path, (2, "a"), (2, "b --resume a/1"), (1, "c --resume a/1"))
    assert len(printed) == 4 and printed[1] == printed[2]
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        whole, resumed, reshaped = (checkpoint(tmp_path / run / "2" / part) for run in "abc")
        if "optimizer" in whole:
            whole, resumed, reshaped = (found["optimizer"]["state"] for found in (whole, resumed, reshaped))
            assert_routes_survived(whole, steps=16)
            assert_routes_survived(reshaped, steps=8 + 16)  # batches are smaller altogether
        assert_same(whole, resumed)


def test_accelerate_resumes_exactly_from_whole_state_dicts(tmp_path):
    pytest.importorskip("accelerate")
    scripts(tmp_path)
    script = tmp_path / "train_accelerate.py"
    script.write_text(
        script.read_text(encoding="utf-8").replace("SHARDED_STATE_DICT", "FULL_STATE_DICT"), encoding="utf-8"
    )
    printed = trained(tmp_path, (2, "a"), (2, "b --resume a/1"))
    assert len(printed) == 3 and printed[1] == printed[2]
    for part in ("pytorch_model_fsdp.bin", "optimizer.bin"):
        read = partial(torch.load, weights_only=True)
        whole, resumed = (read(tmp_path / run / "2" / part) for run in "ab")
        if "state" in whole:
            whole, resumed = whole["state"], resumed["state"]
            assert_routes_survived(whole, steps=16)
        assert_same(whole, resumed)


def test_the_trainer_shards_by_fsdp2_and_resumes_exactly(tmp_path):
    pytest.importorskip("transformers")
    script = str(ROOT / "tests" / "integrations" / "trainer_run.py")
    printed = torchrun(tmp_path, (2, script, ""), accelerate_on_cpu=True)
    assert "".join(printed).count("exact") == 2  # of both ranks, which may share a line
