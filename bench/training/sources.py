"""Read a run's tokens: bytes of text, or shards of tokens.

A step's tokens depend on (seed, step) alone: all optimizers see the same, and a resumed run needs no sampler's state.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.command import UsageError
from bench.models import BYTES, GPT2_VOCABULARY
from bench.training import corpus, shards

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, (batch, context) int64 each; targets are the inputs' successors."""


def generator(seed: int, count: int) -> torch.Generator:
    """Return torch's generator, started by a hash of both numbers, so that neighbours have nothing in common."""
    key = hashlib.sha256(f"{seed}/{count}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


@lru_cache(maxsize=2)  # the epochs on both sides of a batch; 80 MB each for FineWeb-10B in windows of 1024
def permutation(seed: int, epoch: int, count: int) -> Tensor:
    """Return the order of one epoch's windows, (count,) int64."""
    return torch.randperm(count, generator=generator(seed, epoch))


class Windows:
    """The windows of ``context`` inputs and a last target that begin every ``stride`` tokens, in no two parts."""

    def __init__(self, parts: Sequence[np.ndarray], context: int, stride: int) -> None:
        self.parts, self.context, self.stride = parts, context, stride
        # Window i lies in the last part whose first window is at most i.
        counts = [max(0, (len(part) - 1 - context) // stride + 1) for part in parts]
        self.first = np.cumsum([0, *counts])[:-1]
        self.count = sum(counts)

    def batch(self, indices: Tensor) -> Batch:
        """Return the windows of these numbers, (B,)."""
        rows = np.stack([self._window(int(index)) for index in indices]).astype(np.int64)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:]

    def _window(self, index: int) -> np.ndarray:
        part = int(np.searchsorted(self.first, index, side="right")) - 1
        start = (index - int(self.first[part])) * self.stride
        return self.parts[part][start : start + self.context + 1]


@dataclass(frozen=True)
class Source:
    """Tokens to train on and to validate with."""

    name: str  # for a reader
    sha256: str  # of all tokens and of how they are split, so that two runs can be known to have the same
    vocabulary: int  # every token is below it
    train: Sequence[np.ndarray]  # pieces of tokens, one-dimensional
    validation: Sequence[np.ndarray]  # likewise, held out
    # whether windows follow each other, the last target of one being the first input of the next, and every
    # epoch sees each once in an order of its own; otherwise they begin anywhere, drawn with replacement
    epochs: bool

    @property
    def row(self) -> dict[str, str]:
        """The values of rows about it."""
        return {"data": self.name, "data_sha256": self.sha256}

    def training_batch(self, seed: int, step: int, batch: int, context: int) -> Batch:
        """Return the inputs and targets of one step, (batch, context) int64 each."""
        windows = Windows(self.train, context, context if self.epochs else 1)
        if not self.epochs:
            return windows.batch(torch.randint(windows.count, (batch,), generator=generator(seed, step)))
        numbers = range(step * batch, (step + 1) * batch)  # of all epochs' windows
        order = [permutation(seed, n // windows.count, windows.count)[n % windows.count] for n in numbers]
        return windows.batch(torch.stack(order))

    def validation_batches(self, windows: int, batch: int, context: int) -> list[Batch]:
        """Return evenly spaced windows, at most ``windows``; the same for every seed and step."""
        held_out = Windows(self.validation, context, context if self.epochs else 1)
        spread = torch.linspace(0, held_out.count - 1, min(windows, held_out.count), dtype=torch.float64).long()
        return [held_out.batch(part) for part in spread.unique().split(batch)]


@cache
def open_source(path: Path | None, context: int, vocabulary: int | None = None) -> Source:
    """Open what ``--data`` names, and check all of it.

    None is the standard library's source, as bytes. A .bin or .bin.xz file, or a folder with such files directly in it,
    is token shards, whose tokens have to be below ``vocabulary``: None is GPT-2's, padded. Any other file is text, as
    bytes. Training and validation must each have room for a window of ``context``.

    Raises:
        UsageError: If the data is missing, unreadable, too short, or a shard's header or a token is wrong.
    """
    files = shards.find(path) if path is not None and path.exists() else []
    source = _shards(path, files, vocabulary or GPT2_VOCABULARY) if path is not None and files else _text(path)
    for split, parts in (("training", source.train), ("validation", source.validation)):
        if (longest := max(map(len, parts), default=0)) <= context:
            raise UsageError(
                f"{source.name} leaves {longest} tokens in one piece for {split}, but a context of {context} needs "
                f"{context + 1}; give more with --data, or a smaller context"
            )
    return source


def _text(path: Path | None) -> Source:
    name, train, validation = corpus.read(path)
    digest = hashlib.sha256(len(train).to_bytes(8, "little") + train + validation).hexdigest()
    parts = [[np.frombuffer(part, np.uint8)] for part in (train, validation)]
    return Source(name, digest, BYTES, *parts, epochs=False)


def _shards(path: Path, files: list[Path], vocabulary: int) -> Source:
    """Hold out the files with "val", "valid" or "validation" in their name; without one, the last file's last tenth."""
    train: dict[Path, np.ndarray] = {}
    validation: dict[Path, np.ndarray] = {}
    for file in files:
        words = re.split("[^a-z]+", file.stem.lower())
        (validation if {"val", "valid", "validation"}.intersection(words) else train)[file] = shards.open_shard(file)
    if train and not validation:
        last, tokens = train.popitem()
        cut = len(tokens) - len(tokens) // corpus.HELD_OUT
        train[last], validation[last] = tokens[:cut], tokens[cut:]
    both = shards.check(train, vocabulary) + shards.check(validation, vocabulary)
    name = f"shards of {'folder' if path.is_dir() else 'file'} {path.name or path}"
    digest = hashlib.sha256(both.encode()).hexdigest()
    return Source(name, digest, vocabulary, *(list(part.values()) for part in (train, validation)), epochs=True)
