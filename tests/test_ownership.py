"""Owners of matrices: balanced, the same whoever asks, stable when weights come later."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from prokl.distributed.ownership import Home, Part, divide
from prokl.distributed.state import own_state
from prokl.distributed.team import Team
from prokl.engine.weights import weights_of
from tests.inputs import KL


def anywhere(count, cost, world):
    """A weight of ``count`` matrices, of which every rank has a copy."""
    return cost, (Home(0, count, tuple(range(world))),)


def loads_of(weights, parts, world):
    loads = [0.0] * world
    for (cost, _), own in zip(weights, parts, strict=True):
        for part in own:
            loads[part.owner] += cost * (part.stop - part.start)
    return loads


def test_small_cases_by_hand():
    assert divide([anywhere(1, c, 2) for c in (5.0, 3.0, 3.0, 2.0)], [0.0, 0.0]) == [
        (Part(0, 1, 0),),
        (Part(0, 1, 1),),
        (Part(0, 1, 1),),
        (Part(0, 1, 0),),
    ]
    assert divide([anywhere(5, 1.0, 2)], [0.0, 0.0]) == [(Part(0, 2, 1), Part(2, 5, 0))]  # the longer run first
    assert divide([anywhere(2, 1.0, 3)], [4.0, 0.0, 0.0]) == [(Part(0, 1, 1), Part(1, 2, 2))]
    assert divide([], [1.0]) == []


@pytest.mark.parametrize("seed", range(40))
def test_matrices_are_dealt_out_within_grahams_bound(seed):
    rng = random.Random(seed)
    world, largest = rng.randint(1, 9), rng.choice([1, 20])
    drawn = [(rng.randint(1, largest), rng.choice([1.0, 2.5, 7.0, 11.0])) for _ in range(rng.randint(1, 40))]
    weights = [anywhere(count, cost, world) for count, cost in drawn]
    loads = [0.0] * world
    parts = divide(weights, loads)
    assert loads == pytest.approx(loads_of(weights, parts, world))
    for (count, _), own in zip(drawn, parts, strict=True):
        assert [part.start for part in own] == [0, *(part.stop for part in own[:-1])] and own[-1].stop == count
        assert len(own) == min(count, world) == len({part.owner for part in own})
        sizes = [part.stop - part.start for part in own]
        assert max(sizes) - min(sizes) <= 1
    # Two lower bounds of the best largest load: the mean, and the longest job.
    best = max(sum(loads) / world, max(cost for _, cost in drawn))
    # Graham (1969): (4/3 - 1/(3 world)) of the best, which may be up to a job beyond these lower bounds.
    assert largest > 1 or max(loads) <= best + max(cost for _, cost in drawn) * (1 - 1 / world)


def test_equal_shapes_are_dealt_evenly():
    parts = divide([anywhere(1, 3.0, 4)] * 10 + [anywhere(1, 1.0, 4)] * 6, [0.0] * 4)
    owners = Counter(own[0].owner for own in parts[:10])
    assert sorted(owners.values()) == [2, 2, 3, 3]
    assert len({own[0].owner for own in parts[10:]}) >= 2


def test_small_stacks_are_spread_over_the_ranks():
    loads = [0.0] * 16
    divide([anywhere(4, 1.0, 16)] * 8, loads)
    assert loads == [2.0] * 16


def test_what_lies_whole_somewhere_is_owned_there():
    homes = (Home(0, 3, (0, 2)), Home(3, 6, (1, 3)))
    weights = [(1.0, homes)] * 4
    parts = divide(weights, [0.0] * 4)
    assert all({part.owner for part in own} == {0, 1, 2, 3} for own in parts)
    assert all(part.owner in ((0, 2), (1, 3))[part.start >= 3] for own in parts for part in own)
    assert loads_of(weights, parts, 4) == [6.0] * 4


def test_a_few_ranks_that_hold_everything_get_help():
    """An example is 128 experts in shards of 1,024 ranks, where the first 128 have one each of every stack."""
    homes = tuple(Home(i, i + 1, (i,)) for i in range(4))
    loads = [0.0] * 16
    parts = divide([(1.0, homes)] * 12, loads)
    assert max(loads) <= 4 / 3 * sum(loads) / 16 and min(loads) > 0
    at_home = [part for own in parts for part in own if part.owner == part.start]
    assert len(at_home) == 4 * 4  # as many as fit
    assert all(len({part.owner for part in own}) == 4 for own in parts)
    # Where nobody has more than a fair share, nothing moves: five experts on four ranks.
    uneven = (Home(0, 2, (0,)), Home(2, 4, (1,)), Home(4, 5, (2,)))
    assert divide([(1.0, uneven)], [0.0] * 4) == [(Part(0, 2, 0), Part(2, 4, 1), Part(4, 5, 2))]


def test_weights_that_come_later_change_no_owner():
    first = [anywhere(1, float(c), 3) for c in (4, 2, 2, 1, 1)]
    loads = [0.0] * 3
    before = divide(first, loads)
    again = [0.0] * 3
    assert divide(first, again) == before
    later = divide([anywhere(1, 3.0, 3)], loads)
    assert later[0][0].owner == min(range(3), key=lambda rank: again[rank])


@pytest.mark.parametrize("given", [[3, 5, 4], (3, 5, 4), torch.tensor([3, 5, 4])])
def test_a_rank_takes_its_own_of_what_is_loaded_for_a_stack(given):
    optimizer = KL([torch.nn.Parameter(torch.zeros(3, 2, 4))])
    (one,), parts = weights_of(optimizer.param_groups), (Part(0, 1, 1), Part(1, 3, 0))
    weight = SimpleNamespace(stacked=True, mine=parts[1], parts=parts)
    loaded = {"step": given, "L_Q": torch.arange(12.0).view(3, 2, 2), "skipped": 7}
    owned = own_state(one, weight, loaded, KL.method)
    assert list(owned["step"]) == [5, 4] and owned["skipped"] == 7
    assert torch.equal(owned["L_Q"], loaded["L_Q"][1:])


def test_copies_of_a_block_make_a_group_without_the_other_ranks(monkeypatch):
    """All ranks of a job would have to make it otherwise, those without a copy too."""
    mesh, made = SimpleNamespace(ndim=3, get_group=lambda dim: f"dim {dim}"), []
    ranks = {"whole": range(8), "dim 0": (0, 4), "dim 1": (0, 2), "dim 2": (0, 1), "new": (0, 1, 4, 5)}
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: list(ranks[group]))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *given, **how: made.append((given, how)) or "new")
    team = Team("whole")
    assert team.copies([0, 1], mesh).group == "dim 2" and not made
    assert team.copies([0, 1, 4, 5], mesh) is team.copies([0, 1, 4, 5], mesh)
    assert made == [(([0, 1, 4, 5],), {"use_local_synchronization": True})]
