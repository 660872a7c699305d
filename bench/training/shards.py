"""Token shards in llm.c's format, as modded-nanogpt ships FineWeb-10B: checked, memory-mapped, written.

A shard is 256 int32 values of header (20240520, 1, number of tokens, zeros) and then the tokens as uint16, all
little-endian (https://github.com/karpathy/llm.c, dev/data/data_common.py). The header does not name the tokenizer.
"""

import hashlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.command import UsageError

MAGIC, VERSION = 20240520, 1
HEADER = 256  # int32 values
TOKEN, INT = np.dtype("<u2"), np.dtype("<i4")


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write one-dimensional integer tokens from 0 to 65535.

    Raises:
        ValueError: If a token does not fit into uint16.
    """
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**16:
        raise ValueError(
            f"tokens from {tokens.min()} to {tokens.max()} do not fit into uint16, 0 to 65535; "
            "use a tokenizer with a smaller vocabulary"
        )
    header = np.zeros(HEADER, INT)
    header[:3] = MAGIC, VERSION, len(tokens)
    with path.open("wb") as stream:
        stream.write(header.tobytes())
        stream.write(tokens.astype(TOKEN).tobytes())


def open_shard(path: Path) -> np.ndarray:
    """Map the tokens of a shard whose header agrees with the file, one-dimensional uint16.

    Raises:
        UsageError: If the file cannot be read, or its magic, version, count or size is wrong.
    """
    try:
        held = path.stat().st_size - HEADER * INT.itemsize
        magic, version, count = (*np.fromfile(path, INT, 3).tolist(), 0, 0, 0)[:3]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; check its permissions or leave it out") from None
    if (magic, version) != (MAGIC, VERSION) or held != count * TOKEN.itemsize or held < 0:
        raise UsageError(
            f"{path} is no whole shard of uint16 tokens: its header says magic number {magic}, version {version} and "
            f"{count} tokens, and {held} bytes follow it, but {MAGIC} and {VERSION} are expected, and {TOKEN.itemsize} "
            "bytes a token; keep only such .bin files there, give text under other names, or write it again"
        )
    if not count:
        return np.zeros(0, TOKEN)  # an empty file part cannot be mapped
    return np.memmap(path, TOKEN, "r", offset=HEADER * INT.itemsize)


def check(shards: dict[Path, np.ndarray], vocabulary: int) -> str:
    """Read every token once, and return the SHA-256 of all of them and of where the shards end.

    Raises:
        UsageError: If a token is not below ``vocabulary``.
    """
    digest = hashlib.sha256()
    # Silent where there is no terminal, or nothing to wait for.
    for path, tokens in tqdm(shards.items(), desc="checking shards", leave=False, disable=None, delay=2):
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(tokens))
        if len(tokens) and (largest := int(tokens.max())) >= vocabulary:
            raise UsageError(
                f"{path} has token {largest} at {tokens.argmax()}, but the vocabulary ends at "
                f"{vocabulary - 1}; give shards of the model's tokenizer, or a model with a larger vocabulary"
            )
    return digest.hexdigest()


def find(path: Path) -> list[Path]:
    """Return the .bin files that ``path`` is or holds itself, by name; none where it is text."""
    if path.is_dir():
        return sorted(file for file in path.glob("*.bin") if file.is_file())
    return [path] if path.suffix == ".bin" else []
