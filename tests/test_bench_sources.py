"""Sources read or refuse text and shards, in an order that (seed, step) decide alone; C4 is made into shards."""

import lzma
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import c4
from bench.command import UsageError
from bench.training import corpus, shards
from bench.training.shards import open_shard, write_shard
from bench.training.sources import Source, open_source

CONTEXT = 4
WINDOWS = {*range(0, 24, 4), *range(100, 120, 4)}  # of the training shards below, by their first token


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


def firsts(source, steps, batch, seed=0):
    """First tokens of the windows of these steps, in order."""
    batches = [source.training_batch(seed, step, batch, CONTEXT) for step in steps]
    return [int(token) for inputs, _ in batches for token in inputs[:, 0]]


def test_windows_are_successive_tokens_and_targets_the_next_ones(folder):
    inputs, targets = open_source(folder, CONTEXT).training_batch(0, 0, 11, CONTEXT)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (11, CONTEXT)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(CONTEXT)) and torch.equal(targets, inputs + 1)


def test_an_epoch_of_shards_has_every_window_once_reordered(folder):
    source = open_source(folder, CONTEXT)
    epochs = [firsts(source, range(11 * i, 11 * (i + 1)), batch=1) for i in range(3)]
    assert [set(epoch) for epoch in epochs] == [WINDOWS] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert firsts(source, range(11), 1, seed=1) not in epochs
    # The order does not depend on how steps cut it, across an epoch's end included, nor on what was read before.
    assert firsts(open_source(folder, CONTEXT), range(8), batch=4) == sum(epochs, [])[:32]


def test_text_is_drawn_from_all_of_it_by_seed_and_step_alone(text):
    source = open_source(text, CONTEXT)
    first = firsts(source, [5], batch=4)
    torch.manual_seed(1)  # the global generator has no say
    assert first == firsts(source, [5], 4) != firsts(source, [6], 4) and first != firsts(source, [5], 4, seed=1)
    positions = Source("", "", 256, [np.arange(200, dtype=np.uint8)], [], epochs=False)
    inputs, targets = positions.training_batch(0, 0, 5000, 8)
    assert inputs.min() == 0 and targets.max() == 199


def test_validation_covers_the_held_out_part_evenly_and_once(folder):
    source = open_source(folder, CONTEXT)
    batches = source.validation_batches(4, 3, CONTEXT)
    assert [len(inputs) for inputs, _ in batches] == [3, 1]
    assert [int(token) for inputs, _ in batches for token in inputs[:, 0]] == [200, 212, 224, 236]
    assert sum(len(inputs) for inputs, _ in source.validation_batches(99, 3, CONTEXT)) == 10  # all there are, once
    positions = Source("", "", 256, [], [np.arange(50, dtype=np.uint8)], epochs=False)
    starts = [int(i) for inputs, _ in positions.validation_batches(1000, 64, 8) for i in inputs[:, 0]]
    assert starts == list(range(50 - 8))


# Shards, byte by byte.


def written(path, tokens, magic=20240520, version=1, count=None):
    """A shard as llm.c writes it: int32 header, uint16 tokens, little-endian."""
    count = len(tokens) if count is None else count
    header = struct.pack("<3i", magic, version, count).ljust(1024, b"\0")
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    return path


def test_shards_are_read_and_written_as_llm_c_does(tmp_path):
    tokens = [0, 1, 50256, 65535]
    shard = shards.open_shard(written(tmp_path / "theirs.bin", tokens))
    assert shard.tolist() == tokens
    assert isinstance(shard, np.memmap)  # a shard of a hundred million tokens is not read into memory
    write_shard(tmp_path / "ours.bin", np.array(tokens))
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()
    write_shard(tmp_path / "empty.bin", np.array([], dtype=np.int64))
    assert len(shards.open_shard(tmp_path / "empty.bin")) == 0


def test_packed_shards_have_the_same_data(folder, tmp_path):
    plain = open_source(folder, CONTEXT)
    packed = tmp_path / "packed"
    packed.mkdir()
    for shard in folder.glob("*.bin"):
        (packed / f"{shard.name}.xz").write_bytes(lzma.compress(shard.read_bytes()))
    source = open_source(packed, CONTEXT)
    assert source.sha256 == plain.sha256 and firsts(source, range(8), 4) == firsts(plain, range(8), 4)
    for shard in folder.glob("*.bin"):
        shard.rename(packed / shard.name)
    assert [file.suffix for file in shards.find(packed)] == [".bin"] * 3
    assert shards.find(packed / "x_val_0.bin.xz") == [packed / "x_val_0.bin.xz"]


def unpacked(path, content):
    """Return what opening a packed shard of these bytes gives."""
    path.write_bytes(content)
    return shards.open_shard(path)


def cut(path, size):
    """The first bytes of a shard's header."""
    path.write_bytes(written(path, []).read_bytes()[:size])
    return path


TOKENS = [1, 2, 3, 4, 5]
NO_SHARD = r"a\.bin is no whole shard of uint16 tokens: its header says .*; keep"
REFUSED = [
    # llm.c's for Llama 3: tokens of four bytes each.
    (NO_SHARD, lambda folder: shards.open_shard(written(folder / "a.bin", TOKENS, magic=20240801, version=7))),
    (NO_SHARD, lambda folder: shards.open_shard(written(folder / "a.bin", TOKENS, version=2))),
    (NO_SHARD, lambda folder: shards.open_shard(written(folder / "a.bin", TOKENS, count=6))),
    (NO_SHARD, lambda folder: shards.open_shard(cut(folder / "a.bin", 0))),
    (NO_SHARD, lambda folder: shards.open_shard(cut(folder / "a.bin", 1000))),
    (r"a\.bin\.xz is no whole shard", lambda folder: unpacked(folder / "a.bin.xz", lzma.compress(b"1" * 2000))),
    (r"cannot unpack .*a\.bin\.xz: .*; pack", lambda folder: unpacked(folder / "a.bin.xz", b"no xz")),
    (r"cannot unpack .*a\.bin\.xz: ", lambda folder: unpacked(folder / "a.bin.xz", lzma.compress(b"1" * 99)[:-9])),
    ("cannot read", lambda folder: shards.open_shard(folder / "none.bin")),
    ("has token 240 at 40, but the vocabulary ends at 239", lambda folder: open_source(folder, CONTEXT, 240)),
    ("leaves 27 tokens in one piece for training, but .* 27 needs 28", lambda folder: open_source(folder, 27)),
    ("No such file or directory; give a text file", lambda folder: open_source(folder / "nothing.txt", CONTEXT)),
    ("Is a directory; give a text file or token shards", lambda folder: open_source(folder.parent, CONTEXT)),
    ("it is empty or binary; give a text file", lambda folder: open_source(cut(folder / "a.txt", 1000), 2)),
]


@pytest.mark.parametrize("message, opened", REFUSED)
def test_what_cannot_be_trained_on_is_refused(message, opened, folder):
    with pytest.raises(UsageError, match=message):
        opened(folder)


# Text.


def test_the_last_tenth_of_a_file_is_held_out(text):
    whole = text.read_bytes()
    assert corpus.read(text) == ("file text.txt", whole[:900], whole[900:])


def test_the_default_text_is_the_standard_library():
    name, train, validation = corpus.read(None)
    assert "standard library of Python" in name
    assert b"class OrderedDict" in train + validation
    assert b"class TestCase(object):" in train  # unittest itself belongs to the library
    assert b"import pytest" not in train
    assert 0.05 < len(validation) / len(train) < 0.2


# C4 as shards, with stand-ins for the hub's packages


END = 1  # the stand-in tokenizer's end of text
DOCUMENTS = {"train": ["abc", "defg", "", "hi", "c~d"] * 20, "validation": ["xyz"] * 9}


class Tokenizer:
    """One token per letter, an end of text; ~ is a sentinel outside the vocabulary. Cuts until asked not to."""

    cut = 1

    def no_truncation(self):
        self.cut = None

    def no_padding(self):
        pass

    def encode_batch(self, documents):
        return [SimpleNamespace(ids=[*(ord(letter) for letter in d[: self.cut]), END]) for d in documents]


class Stream(list):
    """Rows in batches of 7, as far as ``datasets`` is asked for it."""

    def select_columns(self, name):
        return Stream({name: row[name]} for row in self)

    def map(self, function, batched, remove_columns):
        assert batched and remove_columns == "text"
        for i in range(0, len(self), 7):
            (name, column), *_ = function({"text": [row["text"] for row in self[i : i + 7]]}).items()
            yield from ({name: value} for value in column)


@pytest.fixture
def hub(monkeypatch):
    """Stands in for ``datasets`` and ``tokenizers``; records what they were asked for."""
    asked = []

    def load_dataset(*names, split, streaming):
        asked.append((*names, split, streaming))
        return Stream({"text": text, "url": "-"} for text in DOCUMENTS[split])

    def from_pretrained(name):
        asked.append(name)
        return Tokenizer()

    monkeypatch.setattr(c4, "VALIDATION", 30)
    monkeypatch.setattr(c4, "VOCABULARY", 126)
    monkeypatch.setattr(c4, "SHARD", 20)
    loaders = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=loaders))
    return asked


def letters(*documents):
    return [token for document in documents if "~" not in document for token in (*map(ord, document), END)]


def test_documents_become_shards_that_a_run_can_read(hub, tmp_path, capsys):
    every, arguments = letters(*DOCUMENTS["train"]), ["--out", str(tmp_path), "--tokens", "1000"]
    assert c4.main(arguments) == 0
    assert f"train: {len(every)} tokens of 1,000 in {-(-len(every) // 20)} shards" in capsys.readouterr().out
    splits = ("allenai/c4", "en", "validation", True), ("allenai/c4", "en", "train", True)
    assert hub == ["google-t5/t5-base", splits[0], "google-t5/t5-base", splits[1]]
    train = [open_shard(path).tolist() for path in sorted(tmp_path.glob("c4_train_*.bin"))]
    assert sum(train, []) == every and {len(part) for part in train[:-1]} == {20}
    held_out = [open_shard(tmp_path / f"c4_val_{i:06d}.bin").tolist() for i in range(2)]
    assert sum(held_out, []) == letters(*DOCUMENTS["validation"])[:30] and len(held_out[1]) == 10  # as many as asked
    assert sum(map(len, open_source(tmp_path, 4, vocabulary=126).train)) == len(every)
    assert c4.main(arguments) == 2
    assert "has shards already; choose another folder" in capsys.readouterr().err
