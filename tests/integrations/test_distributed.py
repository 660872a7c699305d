"""The example with Accelerate, run as it stands: what FSDP2 swaps is trained, resumed exactly."""

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
        assert {key for key in state[name] if key.startswith("M_Q")} == {"M_Q" + piece for piece in pieces}
        assert [int(state[name]["step" + piece]) for piece in pieces] == [steps - 1] * len(pieces)
        assert state[name]["M_Q" + pieces[0]].shape == ((32, 128))


def saved(folder, kind):
    """Return a checkpoint's weights, and the optimizer's state by their names."""
    if kind == "FULL_STATE_DICT":
        found = (torch.load(folder / f"{part}.bin", weights_only=True) for part in ("pytorch_model_fsdp", "optimizer"))
        weights, optimizer = found
        return weights, optimizer["state"]
    weights, optimizer = (checkpoint(folder / f"{part}_0") for part in ("pytorch_model_fsdp", "optimizer"))
    return weights, optimizer["optimizer"]["state"]


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerate_resumes_exactly_and_on_one_process(kind, tmp_path):
    pytest.importorskip("accelerate")
    assert "train_accelerate.py" in scripts(tmp_path)
    script = tmp_path / "train_accelerate.py"
    script.write_text(script.read_text(encoding="utf-8").replace("SHARDED_STATE_DICT", kind), encoding="utf-8")
    runs = [(2, "a"), (2, "b --resume a/1"), (1, "c --resume a/1")]
    given = ((ranks, script.name, f"{TINY} --folder {rest}") for ranks, rest in runs)
    printed = torchrun(tmp_path, *given, accelerate_on_cpu=True)
    assert all(line.startswith("epoch ") and line.endswith(", skipped nothing") for line in printed)
    assert len(printed) == 4 and printed[1] == printed[2]
    whole, resumed, reshaped = (saved(tmp_path / run / "2", kind) for run in "abc")
    assert_same(whole, resumed)
    assert_routes_survived(whole[1], steps=64)
    assert_routes_survived(reshaped[1], steps=32 + 64)  # batches are smaller altogether


def test_the_trainer_shards_by_fsdp2_and_resumes_exactly(tmp_path):
    pytest.importorskip("transformers")
    script = str(ROOT / "tests" / "integrations" / "trainer_run.py")
    printed = torchrun(tmp_path, (2, script, ""), accelerate_on_cpu=True)
    assert "".join(printed).count("exact") == 2  # of both ranks, which may share a line
