"""The benchmark's text: order, split, refusal of unusable data, and batches that depend on (seed, step) alone."""

import pytest
import torch

from bench.errors import UsageError
from bench.training import corpus


def _folder(path, texts):
    for name, text in texts.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
    return path


def _bytes(tensor):
    return bytes(tensor.tolist())


def test_folder_is_read_in_name_order_and_every_tenth_file_is_held_out(tmp_path):
    names = [f"{i:02d}.txt" for i in range(20)]
    folder = _folder(tmp_path / "a", {name: f"{name[:2]}-".encode() for name in reversed(names)})
    text = corpus.load(folder, context=4)
    assert _bytes(text.validation) == b"09-19-"
    assert _bytes(text.train) == b"".join(f"{i:02d}-".encode() for i in range(20) if i % 10 != 9)


def test_single_file_holds_out_its_last_tenth(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(1, 201)))
    text = corpus.load(file, context=8)
    assert _bytes(text.train) == bytes(range(1, 181))
    assert _bytes(text.validation) == bytes(range(181, 201))


def test_hash_names_content_and_split(tmp_path):
    one = corpus.load(_folder(tmp_path / "one", {"x": b"a" * 50}), context=2)
    same = corpus.load(_folder(tmp_path / "two", {"renamed": b"a" * 50}), context=2)
    longer = corpus.load(_folder(tmp_path / "three", {"x": b"a" * 51}), context=2)
    assert one.sha256 == same.sha256 != longer.sha256


def test_binary_hidden_and_empty_files_are_left_out(tmp_path):
    files = {"a.txt": b"x" * 60, "b.bin": b"\0" * 60, ".git/c": b"y" * 60, "d.txt": b""}
    text = corpus.load(_folder(tmp_path, files), context=2)
    assert set(_bytes(text.train) + _bytes(text.validation)) == {ord("x")}


def test_reading_stops_at_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CAP", 100)
    text = corpus.load(_folder(tmp_path, {"a": b"a" * 70, "b": b"b" * 70, "c": b"c" * 70}), context=2)
    assert _bytes(text.train) + _bytes(text.validation) == b"a" * 70 + b"b" * 30
    assert text.source.startswith("folder ") and text.source.endswith(", its first 9.54e-05 MiB")
    assert "first" not in corpus.load(_folder(tmp_path / "small", {"a": b"a" * 70}), context=2).source


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ({}, "without files"),
        ({"empty.txt": b""}, "only empty or binary files; give text"),
        ({"only.bin": b"x" * 500 + b"\0"}, "only empty or binary files; give text"),
        ({"short.txt": b"x" * 90}, "9 bytes for validation.*smaller --context"),
    ],
)
def test_unusable_data_is_refused_with_the_remedy(tmp_path, files, remedy):
    with pytest.raises(UsageError, match=remedy):
        corpus.load(_folder(tmp_path, files), context=8)


def test_missing_data_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere does not exist; give a text file or a folder"):
        corpus.load(tmp_path / "nowhere", context=8)


def test_default_is_the_standard_library_without_tests_and_installed_packages():
    text = corpus.load(None, context=128)
    train = _bytes(text.train)
    assert "standard library of Python" in text.source
    assert b"class OrderedDict" in train + _bytes(text.validation)
    assert b"class TestCase(object):" in train  # unittest itself belongs to the library
    assert b"import pytest" not in train
    assert 0.05 < len(text.validation) / len(text.train) < 0.2


@pytest.fixture
def counting():
    """Texts in which each byte is its own position, so that a window shows where it was cut."""
    train, validation = (torch.arange(n, dtype=torch.uint8) for n in (200, 50))
    return corpus.Corpus(train, validation, "counting", "")


def test_targets_are_the_inputs_one_byte_later(counting):
    for inputs, targets in [
        corpus.training_batch(counting, seed=0, step=3, batch=5, context=8),
        *corpus.validation_batches(counting, windows=7, batch=3, context=8),
    ]:
        assert torch.equal(inputs + 1, targets)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_batch_depends_on_seed_and_step_alone(counting):
    def batch(seed, step):
        return corpus.training_batch(counting, seed, step, batch=4, context=8)[0]

    first = batch(0, 5)
    torch.manual_seed(1)  # the global generator has no say
    assert torch.equal(first, batch(0, 5))
    assert not torch.equal(first, batch(0, 6))
    assert not torch.equal(first, batch(1, 5))


def test_batches_reach_both_ends_of_the_text(counting):
    inputs, targets = corpus.training_batch(counting, seed=0, step=0, batch=5000, context=8)
    assert inputs.min() == 0
    assert targets.max() == 199


def test_validation_covers_the_held_out_text_evenly(counting):
    batches = corpus.validation_batches(counting, windows=8, batch=3, context=8)
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert [len(inputs) for inputs, _ in batches] == [3, 3, 2]
    assert starts[0] == 0
    assert batches[-1][1].max() == 49
    assert starts.diff().min() >= starts.diff().max() - 1


def test_validation_never_repeats_a_window(counting):
    batches = corpus.validation_batches(counting, windows=1000, batch=64, context=8)
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert starts.tolist() == list(range(50 - 8))
