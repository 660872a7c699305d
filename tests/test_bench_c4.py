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
