"""``python -m bench.c4 --out DIR --tokens N`` writes C4 as token shards, which ``--data DIR`` of the benchmarks reads.

It needs the packages ``datasets`` and ``tokenizers``, and streams "allenai/c4", "en", from the Hugging Face hub, in the
order in which it is stored. GaLore, whose convention the paper follows on C4, takes T5's tokenizer ("t5-base" in its
torchrun_main.py): 32000 tokens, among them an end-of-text after each document, and 100 sentinels above them that no
model with 32000 tokens knows. A document that spells out such a sentinel is left out. GaLore cuts or pads every
document to one sequence; here documents follow each other, and windows run across them.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.command import UsageError, at_least, command, make_folder, options
from bench.models import LLAMA_VOCABULARY
from bench.rivals import package
from bench.training.shards import write_shard

DATASET, SUBSET = "allenai/c4", "en"
TOKENIZER = "google-t5/t5-base"
SHARD = 100_000_000  # tokens, as FineWeb-10B's shards have
VALIDATION = 10_485_760  # tokens of C4's validation split, as modded-nanogpt validates on
VOCABULARY = LLAMA_VOCABULARY  # tokens that the model knows


@dataclass(frozen=True)
class Options:
    """Write C4 as token shards, which --data of the benchmarks reads."""

    out: Path  # Folder for the shards
    tokens: int  # To train on, such as 5000000000


def documents(split: str) -> Iterator[np.ndarray]:
    """Yield the tokens of a split's documents, as they are streamed, but for those with tokens that no model knows."""
    tokenizer = package("tokenizers", "tokenizers").Tokenizer.from_pretrained(TOKENIZER)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def known(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = (encoding.ids for encoding in tokenizer.encode_batch(batch["text"]))
        return {"tokens": [tokens for tokens in encoded if max(tokens, default=VOCABULARY) < VOCABULARY]}

    stream = package("datasets", "datasets").load_dataset(DATASET, SUBSET, split=split, streaming=True)
    encoded = stream.select_columns("text").map(known, batched=True, remove_columns="text")
    yield from (np.asarray(row["tokens"], np.uint16) for row in encoded)


def write_shards(tokens: Iterable[np.ndarray], limit: int, stem: Path) -> str:
    """Write the first ``limit`` tokens, or all there are, as shards of SHARD, the last one shorter; say how many."""
    shard, held, written, shards = np.empty(min(SHARD, limit), np.uint16), 0, 0, 0

    def flush() -> None:
        nonlocal held, written, shards
        write_shard(stem.with_name(f"{stem.name}_{shards:06d}.bin"), shard[:held])
        held, written, shards = 0, written + held, shards + 1

    with tqdm(desc="tokens", total=limit, unit_scale=True, disable=None) as bar:
        for part in tokens:
            part = part[: limit - written - held]
            bar.update(len(part))
            while len(part):
                taken, part = part[: len(shard) - held], part[len(shard) - held :]
                shard[held : held + len(taken)] = taken
                held += len(taken)
                if held == len(shard):
                    flush()
            if written + held == limit:
                break
    if held:
        flush()
    return f"{written:,} tokens of {limit:,} in {shards} shards"


@command
def main(argv: Sequence[str]) -> int:
    """Write the validation shard, then the training shards; return the exit status."""
    o = options(Options, argv, "bench.c4")
    at_least(1, tokens=o.tokens)
    make_folder(o.out)
    if any(o.out.glob("*.bin")):
        raise UsageError(f"--out {o.out} has shards already; choose another folder, or delete them")
    for split, limit, stem in (("validation", VALIDATION, "val"), ("train", o.tokens, "train")):
        print(f"{split}: {write_shards(documents(split), limit, o.out / f'c4_{stem}')}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
