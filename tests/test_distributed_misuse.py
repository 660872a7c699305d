"""A divided optimizer does with unusual use what one process does; what ranks disagree on is told to all of them."""

import numpy as np
import pytest
import torch

from tests.distributed import misuse
from tests.distributed.pool import pools  # noqa: F401  (a fixture)

HOWS = pytest.mark.parametrize("how", ["ddp", "fsdp"])


def assert_as_alone(found, alone):
    for own in found:
        for one, other in zip(own, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@HOWS
@pytest.mark.parametrize(
    "function, args", [(misuse.frozen, (g,)) for g in ("kept", "zero", "none")] + [(misuse.state_taken_out, ())]
)
def test_weights_that_are_frozen_and_those_whose_state_is_taken_out_move_as_in_one_process(function, args, how, pools):  # noqa: F811
    assert_as_alone(pools[2].run(function, how, *args), function("alone", *args))


@HOWS
def test_a_weight_that_is_unfrozen_later_trains_as_in_one_process_and_takes_no_memory_before(how, pools):  # noqa: F811
    alone, memory, _ = misuse.unfrozen("alone")
    assert memory[3] == 0 < memory[4]
    for found, memory, owners in pools[2].run(misuse.unfrozen, how):
        assert_as_alone([found], alone)
        assert memory[3] == 0 < memory[4]
        assert set(owners[:2]) == set(owners[2:]) == {0, 1}  # work is even before and after


@HOWS
def test_masters_are_given_up_by_weights_that_became_float32(how, pools):  # noqa: F811
    alone, kept = misuse.widened("alone")
    assert not kept
    # Arithmetic is in float32, of another batch; of shards the weight counts, which was the master's rounding.
    rounding = 2**-8 if how == "fsdp" else 1e-5
    for found, kept in pools[2].run(misuse.widened, how):
        assert not kept
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("what", ["loading a fresh state", "a cast", "freezing and loading"])
def test_all_ranks_have_the_same_to_gather_after(what, pools):  # noqa: F811
    first, second = pools[2].run(misuse.gathered_after, what)
    keys = {key for _, key in first}
    assert second == [] and {i for i, _ in first} == {0, 1} and {"M", "L", "U", "step"} <= keys
    assert ("master" in keys) == (what == "a cast")


@pytest.mark.parametrize("what", ["split", "groups"])
def test_what_one_rank_alone_cannot_take_is_told_to_the_others(what, pools):  # noqa: F811
    first, second = pools[2].run(misuse.ranks_that_differ, what)
    assert second[0] == "ValueError" and "rank 1 could not: ValueError" in first[1] and second[1] in first[1]


def test_the_first_weight_that_ranks_have_not_alike_is_named(pools):  # noqa: F811
    for kind, text in pools[2].run(misuse.ranks_that_differ, "shape"):
        assert kind == "RuntimeError" and "parameter 0 of group 1 (8, 12)" in text and "(8, 13)" in text


@pytest.mark.parametrize("what", ["shape", "name", "frozen"])
def test_the_weight_that_differs_is_named_where_owners_of_others_differ_for_it(what, pools):  # noqa: F811
    said = {
        "shape": ("d (8, 12)", "d (8, 40)"),
        "name": ("d (8, 12)", "other (8, 12)"),
        "frozen": ("d (8, 12)", "frozen"),
    }
    for kind, text in pools[2].run(misuse.last_weight_differs, what):
        assert kind == "RuntimeError" and all(word in text for word in said[what]), text
        assert "of rank" not in text and " a (8, 12)" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), [("rank", 3), ("state_dtype", torch.bfloat16), ("split", 2)])
def test_a_setting_that_state_depends_on_is_refused_by_ranks_that_own_nothing_too(key, value, pools):  # noqa: F811
    found = pools[4].run(misuse.changed_after_the_start, key, value)
    assert all(error is not None and error[0] == "ValueError" and key in error[1] for error in found), found
    assert len(set(found)) == 1


@HOWS
@pytest.mark.parametrize("alone", [False, True], ids=["", "adamw alone"])
def test_anothers_part_is_refused_by_ranks_that_own_no_matrix_too(how, alone, pools):  # noqa: F811
    found = pools[2].run(misuse.file_of_the_first_rank, how, alone)
    assert all(error[0] == "ValueError" and "gather_state_dict" in error[1] for error in found), found


@pytest.mark.slow
def test_a_part_of_another_number_of_ranks_is_refused_in_a_sentence(pools, tmp_path):  # noqa: F811
    pools[4].run(misuse.save_part, tmp_path)
    found = pools[2].run(misuse.load_part, tmp_path)
    assert all(error[0] == "ValueError" and "another number of ranks" in error[1] for error in found), found


def test_a_sum_is_refused_for_adamw_too(pools):  # noqa: F811
    assert all(error[0] == "ValueError" and "Partial" in error[1] for error in pools[2].run(misuse.a_sum_for_adamw))


def test_gradients_are_the_callers(pools):  # noqa: F811
    assert pools[2].run(misuse.gradients_stay, "ddp") == [True, True]
