"""The scripts of docs/examples, run as they stand by torchrun: resumed runs are exact, reshaped ones go on."""

import pytest

from tests.commands import ROOT
from tests.distributed_examples import apart, assert_same, checkpoint, flat, scripts, torchrun

TINY = "--steps 8 --save-every 4 --width 32"


def assert_resumed_exactly_and_reshaped(folder, matrices):
    """Compare a whole run in ``a``, one of ``b`` resumed after step 4, and one of ``c`` resumed in another shape."""
    (before, whole, resumed, reshaped) = (checkpoint(folder / at)["training"] for at in ("a/4", "a/8", "b/8", "c/8"))
    assert_same(whole, resumed)
    # Measured: 0.041 under DDP, 0.024 under FSDP2: gradients are summed in another order, and whitened. At 1 a run has
    # gone as far elsewhere.
    assert apart(whole["model"], reshaped["model"], before["model"]) < 0.1
    assert flat(reshaped).keys() == flat(whole).keys()
    (group,) = (group for group in whole["optimizer"]["param_groups"] if group["algorithm"] == "matrix")
    assert len(group["param_names"]) == matrices
    for name in group["param_names"]:
        for state in (whole["optimizer"]["state"][name], reshaped["optimizer"]["state"][name]):
            assert {int(value) for key, value in state.items() if key.startswith("step")} == {7}
    assert reshaped["scheduler"]["last_epoch"] == 8


@pytest.mark.slow
def test_ddp_resumes_exactly_and_on_one_process(tmp_path):
    assert "train_ddp.py" in scripts(tmp_path)
    runs = [(2, "a"), (2, "b --resume a/4"), (1, "c --resume a/4")]
    printed = torchrun(tmp_path, *((ranks, "train_ddp.py", f"{TINY} --folder {rest}") for ranks, rest in runs))
    assert len(printed) == 3 and printed[0] == printed[1]
    assert all(line.startswith("step 8: loss ") and line.endswith(", skipped nothing") for line in printed)
    assert_resumed_exactly_and_reshaped(tmp_path, matrices=8)


@pytest.mark.slow
def test_fsdp2_resumes_exactly_and_in_hsdp_and_so_does_what_torchtitan_saves(tmp_path):
    assert "train_fsdp2.py" in scripts(tmp_path)
    runs = [(2, "a"), (2, "b --resume a/4"), (2, "c --resume a/4 --replicate 2")]
    titan = (2, str(ROOT / "tests" / "titan_run.py"), "")
    printed = torchrun(tmp_path, *((ranks, "train_fsdp2.py", f"{TINY} --folder {rest}") for ranks, rest in runs), titan)
    assert len(printed) == 4 and printed[0] == printed[1] and printed[3] == "exact"
    assert all(line.startswith("step 8: loss ") for line in printed[:3])
    assert_resumed_exactly_and_reshaped(tmp_path, matrices=8)
