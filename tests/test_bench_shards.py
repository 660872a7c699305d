"""Token shards: the format, byte by byte, and the refusal of every header and token that is wrong."""

import struct

import numpy as np
import pytest

from bench.errors import UsageError
from bench.training import shards


def written(path, tokens, magic=20240520, version=1, count=None, header_bytes=1024):
    """A shard as llm.c writes it: int32 header, uint16 tokens, little-endian."""
    count = len(tokens) if count is None else count
    header = struct.pack("<3i", magic, version, count).ljust(header_bytes, b"\0")
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    return path


def test_shards_are_read_as_llm_c_writes_them(tmp_path):
    shard = shards.open_shard(written(tmp_path / "a.bin", [0, 1, 50256, 65535]))
    assert shard.tokens.tolist() == [0, 1, 50256, 65535]
    assert isinstance(shard.tokens, np.memmap)  # a shard of a hundred million tokens is not read into memory


def test_shards_are_written_as_llm_c_reads_them(tmp_path):
    tokens = [7, 0, 65535, 300]
    shards.write_shard(tmp_path / "ours.bin", np.array(tokens))
    assert (tmp_path / "ours.bin").read_bytes() == written(tmp_path / "theirs.bin", tokens).read_bytes()


def test_a_shard_without_tokens_is_a_shard(tmp_path):
    shards.write_shard(tmp_path / "a.bin", np.array([], dtype=np.int64))
    assert len(shards.open_shard(tmp_path / "a.bin").tokens) == 0


@pytest.mark.parametrize("token", [-1, 65536])
def test_tokens_that_do_not_fit_are_not_written(tmp_path, token):
    with pytest.raises(ValueError, match="do not fit into uint16, 0 to 65535; use a tokenizer"):
        shards.write_shard(tmp_path / "a.bin", np.array([5, token]))
    assert not (tmp_path / "a.bin").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        # What llm.c writes for Llama 3: tokens of four bytes each.
        ({"magic": 20240801, "version": 7}, "begins with magic number 20240801, not 20240520"),
        ({"version": 2}, "is of version 2, not 1"),
        ({"count": 6}, "says that it holds 6 tokens, which are 12 bytes, but 10 bytes follow its header"),
        ({"count": 4}, "says that it holds 4 tokens, which are 8 bytes, but 10 bytes follow its header"),
        ({"count": -5}, "says that it holds -5 tokens"),
        ({"tokens": [], "count": 0, "header_bytes": 1000}, "has 1000 bytes, but a shard's header alone has 1024"),
    ],
)
def test_wrong_headers_are_refused_with_what_was_found_and_expected(tmp_path, wrong, message):
    path = written(tmp_path / "a.bin", **{"tokens": [1, 2, 3, 4, 5], **wrong})
    with pytest.raises(UsageError) as error:
        shards.open_shard(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "; " in str(error.value)  # the remedy
    assert "\n" not in str(error.value)


def test_a_missing_shard_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read .*No such file"):
        shards.open_shard(tmp_path / "a.bin")


@pytest.mark.parametrize("chunk", [2, 3, 100])
def test_a_token_outside_the_vocabulary_is_found_wherever_it_is(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(shards, "_CHUNK", chunk)
    good = shards.open_shard(written(tmp_path / "a.bin", [1, 2, 3]))
    bad = shards.open_shard(written(tmp_path / "b.bin", [9, 9, 9, 9, 10, 9]))
    shards.check([good, bad], 11)
    with pytest.raises(UsageError, match=r"b\.bin has token 10 at 4, but the vocabulary ends at 9; give shards of"):
        shards.check([good, bad], 10)


def test_hash_names_tokens_and_where_shards_end(tmp_path, monkeypatch):
    def digest(*parts):
        files = [written(tmp_path / f"{i}.bin", part) for i, part in enumerate(parts)]
        return shards.check([shards.open_shard(file) for file in files], 100)

    whole = digest([1, 2, 3, 4])
    assert len({whole, digest([1, 2], [3, 4]), digest([1], [2, 3, 4]), digest([1, 2, 3, 5])}) == 4
    monkeypatch.setattr(shards, "_CHUNK", 3)
    assert digest([1, 2, 3, 4]) == whole


def test_only_bin_files_are_shards(tmp_path):
    for name in ("b.bin", "a.bin", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "c.bin").mkdir()
    assert shards.find(tmp_path) == [tmp_path / "a.bin", tmp_path / "b.bin"]
    assert shards.find(tmp_path / "b.bin") == [tmp_path / "b.bin"]
    assert shards.find(tmp_path / "notes.txt") == []
