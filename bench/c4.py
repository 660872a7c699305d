"""``python -m bench.c4 --out DIR --tokens N`` writes C4 as token shards, which ``--data DIR`` of the benchmarks reads.

It needs the packages ``datasets`` and ``tokenizers``, and streams "allenai/c4", "en", from the Hugging Face hub, in the
order in which it is stored. GaLore, whose convention the paper follows on C4, takes T5's tokenizer ("t5-base" in its
torchrun_main.py): 32000 tokens, among them an end-of-text after each document, and 100 sentinels above them that no
model with 32000 tokens knows. A document that spells out such a sentinel is left out. GaLore cuts or pads every
document to one sequence; here documents follow each other, and windows run across them.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.errors import UsageError, command
from bench.models import LLAMA_VOCABULARY
from bench.training.shards import open_shard, write_shard

DATASET, SUBSET = "allenai/c4", "en"
TOKENIZER = "google-t5/t5-base"
SHARD = 100_000_000  # tokens, as FineWeb-10B's shards have
VALIDATION = 10_485_760  # tokens, as modded-nanogpt validates on
_DOCUMENTS = 1000  # that the tokenizer gets at once, to use all cores

Encode = Callable[[list[str]], list[list[int]]]
"""Documents -> their tokens."""


@dataclass
class Tokens:
    """Documents' tokens as arrays, and how many documents had tokens outside the vocabulary."""

    documents: Iterable[str]
    encode: Encode
    vocabulary: int
    left_out: int = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        stream = iter(self.documents)
        while batch := list(islice(stream, _DOCUMENTS)):
            for document in self.encode(batch):
                if document and max(document) >= self.vocabulary:
                    self.left_out += 1
                elif document:
                    yield np.asarray(document, np.uint16)


def write_shards(tokens: Iterable[np.ndarray], limit: int, per_shard: int, name: Callable[[int], Path]) -> list[Path]:
    """Writes the first ``limit`` tokens as shards of ``per_shard``, the last one shorter.

    Args:
        tokens: one-dimensional arrays.
        name: of the shard with this number, from 0.

    Returns:
        The files; together they hold fewer tokens than ``limit`` where there were no more.
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
            while held >= per_shard:
                flush(per_shard)
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


def _documents(split: str) -> Iterator[str]:
    """C4's documents, streamed."""
    try:
        for row in _module("datasets").load_dataset(DATASET, SUBSET, split=split, streaming=True):
            yield row["text"]
    except OSError as error:  # what the hub's client raises without a network is one, too
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"cannot read {DATASET} from the hub: {reason}; check the network, then try again") from None


def _encoder(name: str) -> Encode:
    """The tokenizer of a tokenizer.json file, or of a name on the hub."""
    tokenizers = _module("tokenizers")
    try:
        file = Path(name)
        tokenizer = (
            tokenizers.Tokenizer.from_file(name) if file.is_file() else tokenizers.Tokenizer.from_pretrained(name)
        )
    except Exception as error:  # the package raises nothing more specific
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"--tokenizer {name} cannot be loaded: {reason}; give a tokenizer.json file, or check the network"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda documents: [encoding.ids for encoding in tokenizer.encode_batch(documents)]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1; give a number of tokens")
    return value


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.c4", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the shards")
    parser.add_argument("--tokens", type=_count, required=True, metavar="N", help="to train on, such as 5000000000")
    parser.add_argument(
        "--validation-tokens",
        type=_count,
        default=VALIDATION,
        metavar="N",
        help="of C4's validation split (%(default)s)",
    )
    parser.add_argument(
        "--tokenizer", default=TOKENIZER, metavar="NAME", help="on the hub, or a tokenizer.json file (%(default)s)"
    )
    parser.add_argument(
        "--vocabulary", type=_count, default=LLAMA_VOCABULARY, metavar="V", help="tokens of the model (%(default)s)"
    )
    parser.add_argument("--shard-tokens", type=_count, default=SHARD, metavar="N", help="per file (%(default)s)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Writes the validation shard, then the training shards."""
    if args.vocabulary > 2**16:
        raise UsageError(
            f"--vocabulary {args.vocabulary} is above 65536, all that a shard's uint16 tokens can tell apart"
        )
    if args.shard_tokens >= 2**31:
        raise UsageError(
            f"--shard-tokens {args.shard_tokens} is above 2147483647, the most that a shard's header can say"
        )
    encode = _encoder(args.tokenizer)
    _module("datasets")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {args.out} cannot be made a folder: {error.strerror}; choose another") from None
    if any(args.out.glob("*.bin")):
        raise UsageError(f"--out {args.out} has shards already; choose another folder, or delete them")
    for split, limit, stem in (("validation", args.validation_tokens, "val"), ("train", args.tokens, "train")):
        tokens = Tokens(_documents(split), encode, args.vocabulary)
        files = write_shards(tokens, limit, args.shard_tokens, lambda i, stem=stem: args.out / f"c4_{stem}_{i:06d}.bin")
        written = sum(len(open_shard(file).tokens) for file in files)
        print(f"{split}: {written:,} tokens in {len(files)} shards; {tokens.left_out} documents left out", flush=True)
        if written < limit:
            print(f"{split}: {DATASET} has no more than these, {limit:,} were asked for", file=sys.stderr)
    return 0


@command
def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code: 0, 2 for wrong input, 130 after Ctrl-C."""
    return run(_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
