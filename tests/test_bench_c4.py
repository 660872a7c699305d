"""C4 as shards, with stand-ins for the hub's packages: what is asked of them, what is written, what is refused."""

import sys
from types import SimpleNamespace

import pytest

from bench import c4
from bench.training.shards import open_shard
from bench.training.sources import open_source

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

    monkeypatch.setattr(c4, "VALIDATION", 10)
    monkeypatch.setattr(c4, "VOCABULARY", 126)
    monkeypatch.setattr(c4, "SHARD", 500)
    loaders = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=loaders))
    return asked


def letters(*documents):
    return [token for document in documents if "~" not in document for token in (*map(ord, document), END)]


def run(out, *more):
    return c4.main(["--out", str(out), *more])


def test_documents_become_shards_that_a_run_can_read(hub, tmp_path, capsys, monkeypatch):
    every = letters(*DOCUMENTS["train"])
    assert run(tmp_path / "all", "--tokens", "1000") == 0
    assert open_shard(tmp_path / "all" / "c4_train_000000.bin").tolist() == every
    assert f"train: {len(every)} tokens of 1,000 in 1 shards" in capsys.readouterr().out
    monkeypatch.setattr(c4, "SHARD", 20)
    hub.clear()
    assert run(tmp_path, "--tokens", "50") == 0
    names = "google-t5/t5-base", ("allenai/c4", "en", "validation", True), ("allenai/c4", "en", "train", True)
    assert hub == list(names)
    train = [open_shard(tmp_path / f"c4_train_{i:06d}.bin").tolist() for i in range(3)]
    assert [len(part) for part in train] == [20, 20, 10]
    assert sum(train, []) == every[:50]
    assert open_shard(tmp_path / "c4_val_000000.bin").tolist() == letters("xyz", "xyz", "xyz")[:10]
    assert open_source(tmp_path, 4, vocabulary=126).train_tokens == 50
    assert run(tmp_path, "--tokens", "5") == 2
    assert "has shards already; choose another folder" in capsys.readouterr().err
