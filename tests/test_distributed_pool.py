"""The pool that the tests of divided work run in tells who failed, and goes on after it."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import (
    Ranks,
    RanksFailed,
    pools,  # noqa: F401  (a fixture)
)


def summed(value):
    total = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(total)
    return total.item(), os.getpid()


def raising_on(*ranks):
    if dist.get_rank() in ranks:
        raise ValueError(f"of rank {dist.get_rank()}")
    dist.barrier()


def dying_on(rank):
    if dist.get_rank() == rank:
        os._exit(1)
    time.sleep(0.1)
    return "lives"


def test_ranks_share_one_group_and_outlive_a_call(pools):  # noqa: F811
    first, second = pools[2].run(summed, 1), pools[2].run(summed, 2)
    assert [value for value, _ in first] == [3.0, 3.0] and [value for value, _ in second] == [5.0, 5.0]
    assert {pid for _, pid in first} == {pid for _, pid in second} and os.getpid() not in dict(map(reversed, first))


@pytest.mark.slow
def test_a_failure_shows_the_ranks_that_raised_and_the_next_call_has_new_ones():
    ranks = Ranks(2)
    try:
        with pytest.raises(RanksFailed, match="--- rank 1 ---") as caught:
            ranks.run(raising_on, 1, grace=0.5)
        assert isinstance(caught.value.errors[1], ValueError) and "in raising_on" in str(caught.value)
        assert isinstance(caught.value.errors[0], TimeoutError)
        assert [value for value, _ in ranks.run(summed, 1)] == [3.0, 3.0]
        values, errors = ranks.attempt(dying_on, 0)
        assert values == {1: "lives"} and errors.keys() == {0}
        with pytest.raises(RanksFailed, match="the time was up"):
            ranks.run(time.sleep, 60, timeout=0.5)
        assert [value for value, _ in ranks.run(summed, 1)] == [3.0, 3.0]
    finally:
        ranks.kill()
