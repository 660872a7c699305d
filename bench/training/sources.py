"""Where a run's tokens come from: bytes of text, or shards of tokens, behind one interface.

What a step sees depends on (seed, step, rank) alone: all contenders see the same, and a resumed run needs no
sampler's state. With several ranks, rank i has rows i * batch to (i + 1) * batch of what one process would see
with a batch of ranks * batch.
"""

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bench.errors import UsageError
from bench.models import BYTES, GPT2_VOCABULARY
from bench.training import corpus, shards

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, (batch, context) int64 each; targets are the inputs' successors."""


class Source(Protocol):
    """Tokens to train on and to validate with.

    Attributes:
        name: for a reader.
        sha256: of all tokens and of how they are split, so that two runs can be known to have the same.
        vocabulary: every token is below it.
        train_tokens: tokens to train on.
    """

    name: str
    sha256: str
    vocabulary: int
    train_tokens: int

    def training_batch(
        self, seed: int, step: int, batch: int, context: int, rank: int = 0, ranks: int = 1
    ) -> tuple[Tensor, Tensor]:
        """One rank's inputs and targets of one step, (batch, context) int64 each."""

    def validation_batches(self, windows: int, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
        """Evenly spaced windows of held-out tokens, at most ``windows``; the same for every seed, step and rank."""


class ByteSource:
    """Bytes of text; every window of a batch starts at random, with replacement."""

    vocabulary = BYTES

    def __init__(self, text: corpus.Corpus) -> None:
        self.text = text
        self.name = text.source
        self.sha256 = text.sha256
        self.train_tokens = len(text.train)

    def training_batch(self, seed: int, step: int, batch: int, context: int, rank: int = 0, ranks: int = 1) -> Batch:
        """See :class:`Source`."""
        inputs, targets = corpus.training_batch(self.text, seed, step, ranks * batch, context)
        rows = slice(rank * batch, (rank + 1) * batch)
        return inputs[rows], targets[rows]

    def validation_batches(self, windows: int, batch: int, context: int) -> list[Batch]:
        """See :class:`Source`."""
        return corpus.validation_batches(self.text, windows, batch, context)


class Windows:
    """The windows of ``context`` inputs that shards divide into; a rest at a shard's end is in none.

    A window's last target is the first input of the next one, so no token is an input twice.
    """

    def __init__(self, parts: list[shards.Shard], context: int) -> None:
        self.parts = parts
        self.context = context
        # Window i lies in the last part whose first window is at most i.
        counts = [max(0, len(part.tokens) - 1) // context for part in parts]
        self.first = np.cumsum([0, *counts])[:-1]
        self.count = sum(counts)

    def batch(self, indices: Tensor) -> Batch:
        """(B,) window numbers -> inputs and targets."""
        rows = np.stack([self._window(int(index)) for index in indices]).astype(np.int64)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:]

    def _window(self, index: int) -> np.ndarray:
        part = int(np.searchsorted(self.first, index, side="right")) - 1
        start = (index - int(self.first[part])) * self.context
        return self.parts[part].tokens[start : start + self.context + 1]


@lru_cache(maxsize=2)  # the epochs on both sides of a batch; 80 MB each for FineWeb-10B in windows of 1024
def permutation(seed: int, epoch: int, count: int) -> Tensor:
    """The order of one epoch's windows, (count,) int64."""
    return torch.randperm(count, generator=corpus.generator(seed, epoch))


class ShardSource:
    """Token shards; every epoch sees every window of each shard once, in an order of its own.

    Files with "val" in their name are held out; without one, the last tenth of the last file is.
    """

    def __init__(self, files: list[Path], name: str, context: int, vocabulary: int) -> None:
        self.name = name
        self.vocabulary = vocabulary
        opened = [shards.open_shard(file) for file in files]
        self.train, self.validation = _hold_out(opened)
        self.train_tokens = sum(len(part.tokens) for part in self.train)
        for split, parts in (("training", self.train), ("validation", self.validation)):
            if not Windows(parts, context).count:
                longest = max((len(part.tokens) for part in parts), default=0)
                raise UsageError(
                    f"{name} leaves {longest} tokens in one piece for {split}, but a context of {context} needs "
                    f"{context + 1}; give more or longer shards, or a smaller context"
                )
        both = shards.check(self.train, vocabulary) + shards.check(self.validation, vocabulary)
        self.sha256 = hashlib.sha256(both.encode()).hexdigest()

    def training_batch(self, seed: int, step: int, batch: int, context: int, rank: int = 0, ranks: int = 1) -> Batch:
        """See :class:`Source`."""
        windows = Windows(self.train, context)
        numbers = range((step * ranks + rank) * batch, (step * ranks + rank + 1) * batch)  # of all runs' windows
        order = [permutation(seed, n // windows.count, windows.count)[n % windows.count] for n in numbers]
        return windows.batch(torch.stack(order))

    def validation_batches(self, windows: int, batch: int, context: int) -> list[Batch]:
        """See :class:`Source`."""
        held_out = Windows(self.validation, context)
        spread = torch.linspace(0, held_out.count - 1, min(windows, held_out.count), dtype=torch.float64).long()
        return [held_out.batch(part) for part in spread.unique().split(batch)]


def _is_validation(file: Path) -> bool:
    """Whether one of the words in a file's name is val, valid or validation."""
    return not {"val", "valid", "validation"}.isdisjoint(re.split("[^a-z]+", file.stem.lower()))


def _hold_out(opened: list[shards.Shard]) -> tuple[list[shards.Shard], list[shards.Shard]]:
    """Training and validation shards."""
    named = [shard for shard in opened if _is_validation(shard.path)]
    rest = [shard for shard in opened if not _is_validation(shard.path)]
    if named or not rest:
        return rest, named
    *whole, last = rest
    cut = len(last.tokens) - len(last.tokens) // corpus.HELD_OUT
    train = [*whole, shards.Shard(last.path, last.tokens[:cut])]
    return train, [shards.Shard(last.path, last.tokens[cut:])]


def open_source(path: Path | None, context: int, vocabulary: int | None = None) -> Source:
    """Opens what ``--data`` names, and checks all of it.

    Args:
        path: None is the standard library's source, as bytes. A .bin file, or a folder with .bin files directly in
            it, is token shards. Any other file or folder is text, as bytes.
        context: longest window that will be asked for; training and validation must each have room for one.
        vocabulary: of shards, which do not name it themselves: every token has to be below it. Give the model's; None
            is GPT-2's, padded. Bytes have their own.

    Raises:
        UsageError: If the data is missing, unreadable, too short, or a shard's header or a token is wrong.
    """
    if path is not None and path.exists():
        files = shards.find(path)
        if files:
            kind = "folder" if path.is_dir() else "file"
            return ShardSource(files, f"shards of {kind} {path.name or path}", context, vocabulary or GPT2_VOCABULARY)
    return ByteSource(corpus.load(path, context))
