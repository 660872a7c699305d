"""What a run is fed: an order that (seed, step, rank) decide alone, every window once an epoch, nothing twice."""

import numpy as np
import pytest
import torch

from bench.command import UsageError
from bench.training import corpus
from bench.training.shards import write_shard
from bench.training.sources import open_source

CONTEXT = 4


@pytest.fixture
def folder(tmp_path):
    """Two training shards of 6 and 5 windows with a rest, one for validation; every token is a different number."""
    for name, first, count in (("x_train_1", 0, 6 * 4 + 3), ("x_train_2", 100, 5 * 4 + 1), ("x_val_0", 200, 41)):
        write_shard(tmp_path / f"{name}.bin", np.arange(first, first + count))
    return tmp_path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(1, 251)) * 4)
    return path


WINDOWS = {*range(0, 24, 4), *range(100, 120, 4)}  # of the training shards, by their first token


def firsts(source, steps, batch, seed=0, rank=0, ranks=1):
    """First tokens of the windows of these steps, in order."""
    batches = [source.training_batch(seed, step, batch, CONTEXT, rank, ranks) for step in steps]
    return [int(token) for inputs, _ in batches for token in inputs[:, 0]]


def test_windows_are_successive_tokens_and_targets_the_next_ones(folder):
    inputs, targets = open_source(folder, CONTEXT).training_batch(0, 0, 11, CONTEXT)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (11, CONTEXT)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(CONTEXT))
    assert torch.equal(targets, inputs + 1)


def test_an_epoch_sees_every_window_once_and_the_next_one_in_another_order(folder):
    source = open_source(folder, CONTEXT)
    epochs = [firsts(source, range(11 * i, 11 * (i + 1)), batch=1) for i in range(3)]
    assert [set(epoch) for epoch in epochs] == [WINDOWS] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert firsts(source, range(11), 1, seed=1) not in epochs
    # The order does not depend on how steps cut it, across an epoch's end included.
    assert firsts(source, range(8), batch=4) == sum(epochs, [])[:32]


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(folder):
    whole = open_source(folder, CONTEXT)
    firsts(whole, range(9), batch=3)
    assert firsts(whole, range(9, 12), batch=3) == firsts(open_source(folder, CONTEXT), range(9, 12), batch=3)


@pytest.mark.parametrize("kind", ["folder", "text"])
def test_ranks_share_what_one_process_would_see(kind, request):
    source = open_source(request.getfixturevalue(kind), CONTEXT)
    for step in range(5):
        whole = source.training_batch(3, step, 6, CONTEXT)
        parts = [source.training_batch(3, step, 2, CONTEXT, rank, 3) for rank in range(3)]
        for one, several in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(several))


def test_ranks_have_no_window_in_common_within_an_epoch(folder):
    source = open_source(folder, CONTEXT)
    seen = [firsts(source, range(2), batch=2, rank=rank, ranks=2) for rank in range(2)]
    assert len(set(seen[0] + seen[1])) == 8


def test_validation_windows_are_spread_over_the_files_named_val(folder):
    source = open_source(folder, CONTEXT)
    batches = source.validation_batches(4, 3, CONTEXT)
    assert [len(inputs) for inputs, _ in batches] == [3, 1]
    assert [int(token) for inputs, _ in batches for token in inputs[:, 0]] == [200, 212, 224, 236]
    assert sum(len(inputs) for inputs, _ in source.validation_batches(99, 3, CONTEXT)) == 10  # all there are, once
    assert source.train_tokens == 27 + 21


@pytest.mark.parametrize("name", ["valley_train.bin", "interval.bin"])
def test_without_a_file_named_val_the_last_tenth_of_the_last_one_is_held_out(tmp_path, name):
    write_shard(tmp_path / "a.bin", np.arange(100))
    write_shard(tmp_path / name, np.arange(100, 200))
    source = open_source(tmp_path, CONTEXT)
    seen = source.training_batch(0, 0, 24 + 22, CONTEXT)  # (100 - 1) // 4 and (90 - 1) // 4 windows: one epoch
    held_out = source.validation_batches(99, 99, CONTEXT)[0]
    assert source.train_tokens == 190
    assert max(part.max() for part in seen) < 190 <= min(part.min() for part in held_out)


def test_text_is_read_as_the_corpus_is(text):
    source, expected = open_source(text, CONTEXT), corpus.load(text, CONTEXT)
    assert (source.name, source.sha256, source.vocabulary) == (expected.source, expected.sha256, 256)
    assert source.train_tokens == len(expected.train)
    for ours, theirs in zip(
        source.training_batch(5, 7, 3, CONTEXT), corpus.training_batch(expected, 5, 7, 3, CONTEXT), strict=True
    ):
        assert torch.equal(ours, theirs)
    ours, theirs = source.validation_batches(9, 4, CONTEXT), corpus.validation_batches(expected, 9, 4, CONTEXT)
    assert [a[0].tolist() for a in ours] == [b[0].tolist() for b in theirs]


@pytest.mark.slow
def test_without_a_path_the_embedded_text_is_read():
    source = open_source(None, CONTEXT)
    assert "standard library" in source.name
    assert source.training_batch(0, 0, 2, CONTEXT)[0].max() < source.vocabulary == 256


def test_hash_names_tokens_and_split(folder):
    before = open_source(folder, CONTEXT).sha256
    assert open_source(folder, 8).sha256 == before
    (folder / "x_train_2.bin").rename(folder / "w_val_2.bin")  # the same tokens in the same order, split otherwise
    assert open_source(folder, CONTEXT).sha256 != before


def test_vocabulary_is_gpt2s_unless_a_models_is_given(folder):
    assert open_source(folder, CONTEXT).vocabulary == 50304
    assert open_source(folder, CONTEXT, 241).vocabulary == 241
    with pytest.raises(UsageError, match=r"x_val_0\.bin has token 240 at 40, but the vocabulary ends at 239"):
        open_source(folder, CONTEXT, 240)


def test_too_few_tokens_are_refused(folder, tmp_path):
    with pytest.raises(UsageError, match="leaves 27 tokens in one piece for training, but a context of 27 needs 28"):
        open_source(folder, 27)
    for file in folder.glob("*train*"):
        file.unlink()
    with pytest.raises(UsageError, match="leaves 0 tokens in one piece for training.*give more"):
        open_source(folder, CONTEXT)


def test_a_single_shard_is_a_source_and_a_bad_one_an_error(folder):
    assert open_source(folder / "x_train_1.bin", 1).train_tokens == 27 - 27 // 10
    (folder / "broken.bin").write_bytes(b"text")
    with pytest.raises(UsageError, match=r"broken\.bin has 4 bytes"):
        open_source(folder, CONTEXT)


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        open_source(tmp_path / "nothing.bin", CONTEXT)
