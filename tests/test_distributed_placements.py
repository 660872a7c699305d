"""However weights lie on the ranks, they are stepped as in one process; what cannot be stepped is refused."""

import numpy as np
import pytest

import prokl
from prokl import KLShampoo, ProKLShampoo
from tests.distributed import placements
from tests.distributed.pool import pools  # noqa: F401  (a fixture)

EXACT = 1e-9  # of weights about 1 in float64: batches and sums of other orders cost about 1e-13 in twelve steps


@pytest.fixture(scope="module")
def expected():
    return {cls: placements.alone(cls) for cls in (ProKLShampoo, KLShampoo)}


def assert_close(found, expected):
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= EXACT, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cls", "how", "divided"),
    [
        (2, ProKLShampoo, "rows", False),
        (4, ProKLShampoo, "rows", False),
        (4, KLShampoo, "rows", False),
        (4, ProKLShampoo, "columns", False),
        (4, ProKLShampoo, "replicas", False),
        (4, ProKLShampoo, "plain", True),
        (2, ProKLShampoo, "mixed", False),
        (4, ProKLShampoo, "mixed", True),
        (4, ProKLShampoo, "hsdp", False),
        (4, ProKLShampoo, "rows and columns", False),
        (4, ProKLShampoo, "rows of rows", False),
    ],
)
def test_weights_placed_in_any_way_are_stepped_as_in_one_process(world, cls, how, divided, pools, expected):  # noqa: F811
    found = pools[world].run(placements.on_ranks, cls, how, divided)
    for weights, received in found:
        assert_close(weights, expected[cls])
        assert received > 0
        for name, value in weights.items():  # ranks agree to the bit
            assert np.array_equal(value, found[0][0][name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("how", "divided"), [("plain", True), ("rows", False)])
def test_ranks_have_state_of_their_own_and_together_all_of_it_once(how, divided, pools):  # noqa: F811
    whole = placements.state_of_ranks("plain", False)
    found = pools[4].run(placements.state_of_ranks, how, divided)
    for key, elements in whole.items():
        # AdamW's weight without a dimension is stepped by all four.
        extra = 3 if key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") else 0
        assert sum(own.get(key, 0) for own in found) == elements + extra, key
    sizes = [sum(own.values()) for own in found]
    assert max(sizes) <= 0.4 * sum(whole.values())  # a quarter, but for matrices of which there are few


@pytest.mark.slow
def test_without_a_group_plain_weights_are_every_ranks_own_and_nothing_is_sent(pools, expected):  # noqa: F811
    for weights, received in pools[2].run(placements.on_ranks, ProKLShampoo, "plain"):
        assert received == 0
        for name, value in weights.items():
            assert np.array_equal(value, expected[ProKLShampoo][name])


def test_a_gradient_that_is_placed_otherwise_than_its_weight_is_placed_as_it(pools, expected):  # noqa: F811
    for weights in pools[2].run(placements.of_gradients_placed_otherwise):
        assert_close(weights, expected[ProKLShampoo])


def test_experts_that_lie_on_their_ranks_are_owned_there_and_nothing_is_sent(pools):  # noqa: F811
    found = pools[2].run(placements.experts_at_home)
    assert [(received, shape) for received, shape, _ in found] == [(0, (3, 8, 10))] * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_weights_may_be_frozen_released_and_added_while_training(how, pools):  # noqa: F811
    expected = placements.frozen_and_released("alone")
    for weights in pools[4].run(placements.frozen_and_released, how):
        assert_close(weights, expected)


@pytest.mark.parametrize("split", [None, 2], ids=["whole", "split"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_all_owners_of_a_stack_skip_a_gradient_that_is_not_finite_or_none(how, split, pools):  # noqa: F811
    expected, counts = placements.not_finite("alone", split)
    assert counts == {"experts": 3}
    for weights, skipped in pools[2].run(placements.not_finite, how, split):
        assert np.abs(weights - expected).max() <= EXACT
        assert skipped == counts


def test_one_rank_may_be_asked_alone(pools):  # noqa: F811
    first, second = pools[2].run(placements.asked_of_one_rank)
    entries, skipped, clipped, scalars = first
    assert second is None
    assert entries == len(placements.MATRICES) + len(placements.VECTORS)
    assert skipped and not any(skipped.values()) and clipped.keys() == skipped.keys()
    assert scalars and all(np.isfinite(value) for value in scalars.values())


def test_plain_weights_in_a_sharded_model_are_stepped_by_all_or_divided(pools):  # noqa: F811
    found = pools[2].run(placements.sharded_model_with_ignored)
    assert found[0] == found[1]
    every, divided = (np.array(weights) for weights in found[0])
    assert np.abs(every - divided).max() <= EXACT


def test_what_cannot_be_divided_is_refused_with_the_remedy(pools):  # noqa: F811
    for said in pools[2].run(placements.refusals):
        kind, text = said["partial"]
        assert kind == "ValueError" and "placement Partial(sum)" in text and "redistribute" in text
        kind, text = said["group"]
        assert kind == "TypeError" and "got int" in text and "torch.distributed.group.WORLD" in text
        for how in ("copy", "pickle"):
            assert said[how][0] == "RuntimeError" and "state_dict()" in said[how][1]
        kind, text = said["weights"]
        assert kind == "RuntimeError" and "Ranks 0 and 1" in text and "must be the same on all ranks" in text
        assert said["moved by ZeRO"] == [True, True]
        kind, text = said["ZeRO"]
        assert kind == "RuntimeError" and "ZeroRedundancyOptimizer" in text and "without process_group=" in text
        kind, text = said["FSDP1"]
        assert kind == "ValueError" and "fully_shard" in text


def test_a_process_group_is_asked_for_its_kind_without_any_rank():
    with pytest.raises(TypeError, match="process_group must be .* got str 'dp': pass torch.distributed.group.WORLD"):
        prokl.KLShampoo([], process_group="dp")
