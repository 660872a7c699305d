"""The benchmark of a divided optimizer: what its ranks have and send is what ownership says, and collectives' bytes."""

import pytest
import torch
import torch.distributed as dist

from bench import rows
from bench.timing import __main__ as timing
from bench.timing import divided, tables
from bench.timing.traffic import Traffic
from tests.distributed.pool import (
    pools,  # noqa: F401  (a fixture)
)

WEIGHTS = 2 * 4096 * 24 + 5 * 24 + 8 * 24 * 24 + 6 * 24 * 64  # elements of two layers of width 24
STEPS = ("step", "step without refresh", "refresh step")
TIMES = (*STEPS, *(f"CPU time of a {step}" for step in STEPS))


def moved():
    """Return what every collective moves, as counted on this rank."""
    found = []
    for collective in (
        lambda: dist.all_gather_into_tensor(torch.empty(6), torch.zeros(3)),
        lambda: dist.broadcast(torch.zeros(5), 1),
        # Rank 0 keeps 1 row and gives 2; rank 1 gives 3 and keeps 4.
        lambda: dist.all_to_all_single(
            *((torch.empty(4), torch.zeros(3), [1, 3], [1, 2]), (torch.empty(6), torch.zeros(7), [2, 4], [3, 4]))[
                dist.get_rank()
            ]
        ),
    ):
        with Traffic(2, dist.get_rank()) as traffic:
            collective()
        found.append((traffic.sent, traffic.received))
    with pytest.raises(NotImplementedError, match="allreduce_ is not counted"), Traffic(2, dist.get_rank()):
        dist.all_reduce(torch.zeros(1))
    return found


@pytest.mark.slow
def test_the_bytes_of_collectives_are_those_that_go_to_other_ranks(pools):  # noqa: F811
    assert pools[2].run(moved) == [[(12, 12), (0, 20), (8, 12)], [(12, 12), (20, 0), (12, 8)]]


@pytest.mark.slow
def test_ranks_have_the_state_once_together_and_get_what_they_do_not_own(tmp_path, capsys):
    out = tmp_path / "divided.csv"
    options = ["--layers", "2", "--width", "24", "--periods", "1", "--out", str(out)]
    assert timing.main(["divided", *options, "--ranks", "2"]) == 0
    figures = {}
    for row in rows.read(out):
        key = row["case"], int(row["ranks"]), row["metric"]
        figures.setdefault(key, {})[row["place"]] = row
        assert row["threads"] == "1" and row["cores"] and row["commit"] and row["unit"]
    assert len(capsys.readouterr().out.splitlines()) == sum(map(len, figures.values())) == 2 * (2 * 3 + 3 * 14)

    def of(name, ranks, metric):
        return [float(row["median"]) for _, row in sorted(figures[name, ranks, metric].items())]

    for name in divided.LAUNCHERS:
        for metric in ("work", "state", "matrix state", "AdamW state"):
            (whole,) = of(name, 1, metric)
            assert sum(of(name, 2, metric)) == pytest.approx(whole, rel=0 if "state" in metric else 1e-6)  # 7 digits
            assert [float(row["ratio"]) for row in figures[name, 2, metric].values()] == pytest.approx([0.5] * 2, 0.01)
        assert of(name, 2, "largest state over mean") == [1]
        assert of(name, 2, "all-reduce of the gradients") == [4 * WEIGHTS]  # 2 (k - 1) / k of their bytes
        assert sum(of(name, 2, "sent")) == sum(of(name, 2, "received")) > 0
        assert of(name, 1, "sent") == of(name, 1, "received") == of(name, 1, "room for these") == [0]
        assert all(0 < figure for metric in TIMES for figure in of(name, 2, metric))
    owned = of("ddp", 2, "owned weights")
    assert sum(owned) == 4 * WEIGHTS
    assert of("ddp", 2, "received") == [4 * WEIGHTS - own for own in owned]  # each weight once, minus its own
    assert of("ddp", 2, "sent") == owned
    # Half of a matrix lies elsewhere: its gradient and weight come, the stepped weight goes back. Of AdamW's nothing.
    matrices = of("fsdp2", 2, "owned weights")
    assert sum(matrices) == 4 * (8 * 24 * 24 + 6 * 24 * 64) and of("fsdp2", 2, "room for these") == matrices
    assert sum(of("fsdp2", 2, "received")) == 3 * sum(matrices) / 2
    lines = tables.divided(rows.frame(out)).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines]
    assert [name for name, _ in cells] == ["DDP, 1 rank", "DDP, 2 ranks", "FSDP2, 1 rank", "FSDP2, 2 ranks"]
    assert [state.split()[1] for _, state in cells] == ["(1.00)", "(0.50)"] * 2
