"""When a rank dies the others are told, nothing is left half done unseen, and the last checkpoint goes on."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.failures import DIED, END, GOOD, restart, save_without, step_without
from tests.distributed.pool import (
    Ranks,
    pools,  # noqa: F401  (a fixture)
)
from tests.distributed.problem import Plan, trained

EXACT = 1e-9  # as in test_distributed_equal
DEAD = 2


@pytest.fixture
def ranks():
    """Four processes of this test's own, which wait five seconds for each other."""
    own = Ranks(4, timeout=5)
    yield own
    own.kill()


@pytest.fixture(scope="module")
def losses():
    """Those of a run that nothing interrupts."""
    return trained(Plan(), END).losses


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_rank_dies_before_a_step_which_ends_with_an_error_and_the_checkpoint_goes_on(
    how,
    ranks,
    pools,  # noqa: F811
    losses,
    tmp_path,
):
    old, new = trained(Plan(), DIED).weights, trained(Plan(), DIED + 1).weights
    values, errors = ranks.attempt(step_without, Plan(how), tmp_path, DEAD, grace=30)
    assert errors.keys() == {DEAD}  # the others came back, within torch's own timeout
    for rank, (before, after, (stepping, saving, again)) in values.items():
        assert stepping is not None and stepping[0] and "broke off" not in stepping[1], stepping
        for refused in (saving, again):
            assert refused is not None and refused[0] and "broke off" in refused[1], refused
            assert "Load the last checkpoint" in refused[1]
        moved = []
        for name, value in after.items():
            if value.size == 0:
                continue
            whole = new[name] if how == "ddp" else rows(new[name], rank)
            scale = np.abs(new[name]).max()
            is_new = np.abs(value - whole).max() < EXACT * scale
            assert is_new or value.tobytes() == before[name].tobytes(), f"{name} is half old and half new"
            moved.append(is_new and not np.abs(old[name] - new[name]).max() < EXACT * scale)
        assert not all(moved)  # something of the dead rank's did not come
    two = pools[2].run(restart, Plan(how), tmp_path)
    assert two[0] == two[1]
    np.testing.assert_allclose(two[0], losses[GOOD:], rtol=EXACT)


def rows(value, rank):
    """The rows of a weight that FSDP2 gives a rank of four."""
    parts = torch.from_numpy(value).chunk(4)
    return parts[rank].numpy() if rank < len(parts) else value[:0]


@pytest.mark.slow
def test_a_rank_dies_during_a_checkpoint_which_cannot_be_mistaken_for_a_good_one(
    ranks,
    pools,  # noqa: F811
    losses,
    tmp_path,
):
    values, errors = ranks.attempt(save_without, Plan("fsdp"), tmp_path, DEAD, grace=30)
    assert errors.keys() == {DEAD}
    for kind, same in values.values():
        assert kind is not None and same  # an error, and an optimizer that could go on
    with pytest.raises(Exception, match="metadata"):
        dcp.FileSystemReader(tmp_path / "bad").read_metadata()
    np.testing.assert_allclose(pools[2].run(restart, Plan("fsdp"), tmp_path)[0], losses[GOOD:], rtol=EXACT)
