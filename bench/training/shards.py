"""Token shards in llm.c's format, as modded-nanogpt ships FineWeb-10B: checked, memory-mapped, written.

A shard is 256 int32 values of header (20240520, 1, number of tokens, zeros) and then the tokens as uint16, all
little-endian (https://github.com/karpathy/llm.c, dev/data/data_common.py). The header does not name the tokenizer.
A shard may be packed by xz, under the name ``*.bin.xz``: it is unpacked into memory, at some 50 MB a second.
"""

import hashlib
import lzma
from pathlib import Path

import numpy as np

from bench.command import UsageError

MAGIC, VERSION = 20240520, 1
HEADER = 256  # int32 values
TOKEN, INT = np.dtype("<u2"), np.dtype("<i4")
PACKED = ".bin.xz"


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write one-dimensional integer tokens from 0 to 65535."""
    assert not len(tokens) or 0 <= tokens.min() <= tokens.max() < 2**16
    header = np.zeros(HEADER, INT)
    header[:3] = MAGIC, VERSION, len(tokens)
    with path.open("wb") as stream:
        stream.write(header.tobytes())
        stream.write(tokens.astype(TOKEN).tobytes())


def open_shard(path: Path) -> np.ndarray:
    """Return the tokens of a shard whose header agrees with the file, one-dimensional uint16: mapped, or unpacked."""
    try:
        if path.name.endswith(PACKED):
            held = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
        else:
            held = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; check its permissions or leave it out") from None
    except lzma.LZMAError as error:
        raise UsageError(f"cannot unpack {path}: {error}; pack the shard again with xz") from None
    head, tokens = held[: HEADER * INT.itemsize], held[HEADER * INT.itemsize :]
    whole = len(head) == HEADER * INT.itemsize
    magic, version, count = head.view(INT)[:3].tolist() if whole else (0, 0, 0)
    if (magic, version) != (MAGIC, VERSION) or len(tokens) != count * TOKEN.itemsize:
        raise UsageError(
            f"{path} is no whole shard of uint16 tokens: its header says magic number {magic}, version {version} and "
            f"{count} tokens, and {len(tokens)} bytes follow it, but {MAGIC} and {VERSION} are expected, and "
            f"{TOKEN.itemsize} bytes a token; keep only such .bin files there, give text under other names, or write "
            "it again"
        )
    return tokens.view(TOKEN)


def check(shards: dict[Path, np.ndarray], vocabulary: int) -> str:
    """Check that every token is below ``vocabulary``; return the SHA-256 of all of them and of where shards end."""
    digest = hashlib.sha256()
    for path, tokens in shards.items():
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(tokens))
        if len(tokens) and (largest := int(tokens.max())) >= vocabulary:
            raise UsageError(
                f"{path} has token {largest} at {tokens.argmax()}, but the vocabulary ends at "
                f"{vocabulary - 1}; give shards of the model's tokenizer, or a model with a larger vocabulary"
            )
    return digest.hexdigest()


def find(path: Path) -> list[Path]:
    """Return the .bin and .bin.xz files that ``path`` is or holds itself, by name; none where it is text.

    Of a shard that is there in both forms the packed one is left out.
    """
    files = {file for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()}
    plain = {file for file in files if file.suffix == ".bin"}
    packed = {file for file in files if file.name.endswith(PACKED)}
    return sorted(plain | {file for file in packed if file.with_suffix("") not in plain})
