"""``python -m bench.c4 --out DIR --tokens N`` writes C4 as token shards, which ``--data DIR`` of the benchmarks reads.

It needs the packages ``datasets`` and ``tokenizers``, and streams "allenai/c4", "en", from the Hugging Face hub, in the
order in which it is stored. GaLore, whose convention the paper follows on C4, takes T5's tokenizer ("t5-base" in its
torchrun_main.py): 32000 tokens, among them an end-of-text after each document, and 100 sentinels above them that no
model with 32000 tokens knows. A document that spells out such a sentinel is left out. GaLore cuts or pads every
document to one sequence; here documents follow each other, and windows run across them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.command import UsageError, at_least, command, make_folder, options
from bench.models import LLAMA_VOCABULARY
from bench.training.shards import open_shard, write_shard

DATASET, SUBSET = "allenai/c4", "en"
TOKENIZER = "google-t5/t5-base"
SHARD = 100_000_000  # tokens, as FineWeb-10B's shards have
VALIDATION = 10_485_760  # tokens of C4's validation split, as modded-nanogpt validates on
VOCABULARY = LLAMA_VOCABULARY  # tokens that the model knows

Encode = Callable[[list[str]], list[list[int]]]
"""Documents -> their tokens."""


@dataclass(frozen=True)
class Options:
    """Write C4 as token shards, which --data of the benchmarks reads."""

    out: Path  # Folder for the shards
    tokens: int  # To train on, such as 5000000000

    def __post_init__(self) -> None:
        at_least(1, tokens=self.tokens)


class Documents:
    """A split of C4, streamed and encoded; ``left_out`` counts those with tokens outside the vocabulary."""

    def __init__(self, split: str, encode: Encode) -> None:
        self.split, self.encode, self.left_out = split, encode, 0

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            stream = _module("datasets").load_dataset(DATASET, SUBSET, split=self.split, streaming=True)
            encoded = stream.select_columns("text").map(self._encode, batched=True, remove_columns="text")
            yield from (np.asarray(row["tokens"], np.uint16) for row in encoded)
        except OSError as error:  # what the hub's client raises without a network is one, too
            raise UsageError(
                f"cannot read {DATASET} from the hub: {_line(error)}; check the network, then try again"
            ) from None

    def _encode(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = [tokens for tokens in self.encode(batch["text"]) if tokens]
        known = [tokens for tokens in encoded if max(tokens) < VOCABULARY]
        self.left_out += len(encoded) - len(known)
        return {"tokens": known}


def write_shards(tokens: Iterable[np.ndarray], limit: int, name: Callable[[int], Path]) -> list[Path]:
    """Write the first ``limit`` tokens, or all there are, as shards of SHARD, the last one shorter.

    ``name`` gives the file of a shard by its number from 0.
    """
    files: list[Path] = []
    pending: list[np.ndarray] = []
    held = written = 0

    def flush(size: int) -> None:
        nonlocal pending, held, written
        joined = np.concatenate(pending)
        files.append(name(len(files)))
        write_shard(files[-1], joined[:size])
        pending, held, written = [joined[size:].copy()], held - size, written + size

    with tqdm(desc="tokens", total=limit, unit_scale=True, disable=None) as bar:
        for part in tokens:
            part = part[: limit - written - held]
            pending.append(part)
            held += len(part)
            bar.update(len(part))
            while held >= SHARD:
                flush(SHARD)
            if written + held == limit:
                break
    if held:
        flush(held)
    return files


def _module(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise UsageError(f"bench.c4 needs the package {name} ({error}); pip install datasets tokenizers") from None


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _encoder() -> Encode:
    """Return the tokenizer from the hub."""
    kind = _module("tokenizers").Tokenizer
    try:
        tokenizer = kind.from_pretrained(TOKENIZER)
    except Exception as error:  # the package raises nothing more specific
        raise UsageError(f"the hub's {TOKENIZER} cannot be loaded: {_line(error)}; check the network") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda documents: [encoding.ids for encoding in tokenizer.encode_batch(documents)]


@command
def main(argv: Sequence[str]) -> int:
    """Write the validation shard, then the training shards; return the exit status."""
    o = options(Options, argv, "bench.c4")
    encode = _encoder()
    _module("datasets")
    make_folder(o.out)
    if any(o.out.glob("*.bin")):
        raise UsageError(f"--out {o.out} has shards already; choose another folder, or delete them")
    for split, limit, stem in (("validation", VALIDATION, "val"), ("train", o.tokens, "train")):
        documents = Documents(split, encode)
        files = write_shards(documents, limit, lambda i, stem=stem: o.out / f"c4_{stem}_{i:06d}.bin")
        written = sum(len(open_shard(file).tokens) for file in files)
        print(
            f"{split}: {written:,} tokens in {len(files)} shards; {documents.left_out} documents left out", flush=True
        )
        if written < limit:
            print(f"{split}: {DATASET} has no more than these, {limit:,} were asked for", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
