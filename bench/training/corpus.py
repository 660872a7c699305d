"""Text as bytes: where it comes from, what is held out, and which bytes make up batch i."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.errors import UsageError

CAP = 16 * 2**20  # bytes read at most, so that a large folder does not fill memory
HELD_OUT = 10  # every tenth file, or the last tenth of a single one, is for validation
# Third-party code, tests, and tables that a generator wrote (charmaps, help topics) rather than a person.
_SKIPPED_STDLIB = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes, one-dimensional uint8, and what identifies them."""

    train: Tensor
    validation: Tensor
    source: str
    sha256: str


def load(path: Path | None, context: int) -> Corpus:
    """Reads a text file, every text file of a folder, or (``None``) the running Python's standard library.

    Files come in the order of their names, so that the same files give the same corpus everywhere; what is beyond
    CAP bytes is left out, and ``source`` says so. Folders
    hold out every tenth file; a single file, or a folder of too few, holds out its last tenth.

    Raises:
        UsageError: If the data is missing, unreadable, empty or shorter than one context on either side.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if _is_library_source(f.relative_to(root))]
        source = f"standard library of Python {sysconfig.get_python_version()}"
        if not files:
            raise UsageError(f"no Python source under {root}; give a text file or folder with --data")
    elif path.is_dir():
        root, source = path, f"folder {path.name or path}"
        files = [f for f in path.rglob("*") if f.is_file() and not _is_hidden(f.relative_to(path))]
        if not files:
            raise UsageError(f"--data {path} is a folder without files; give a folder with text files in it")
    elif path.exists():
        root, files, source = path.parent, [path], f"file {path.name}"
    else:
        raise UsageError(f"--data {path} does not exist; give a text file or a folder")
    texts, whole = _read(sorted(files, key=lambda f: f.relative_to(root).as_posix()))
    source += "" if whole else f", its first {CAP / 2**20:.3g} MiB"
    if not texts:
        raise UsageError(f"{source} holds no text, only empty or binary files; give text with --data")
    train, validation = _split(texts)
    for name, part in (("training", train), ("validation", validation)):
        if len(part) < context + 2:
            raise UsageError(
                f"{source} leaves {len(part)} bytes for {name}, but a context of {context} needs {context + 2}; "
                "give more text with --data, or bench.pretrain a smaller --context"
            )
    digest = hashlib.sha256(len(train).to_bytes(8, "little") + train + validation).hexdigest()
    return Corpus(_tensor(train), _tensor(validation), source, digest)


def _is_library_source(relative: Path) -> bool:
    # _sysconfigdata is a dump of how this interpreter was compiled.
    return not _SKIPPED_STDLIB.intersection(relative.parts) and not relative.name.startswith("_sysconfigdata")


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _read(files: list[Path]) -> tuple[list[bytes], bool]:
    """The files' contents up to CAP bytes, without binary files (with a zero byte) and empty ones; if it is all."""
    texts, room = [], CAP
    for file in files:
        try:
            with file.open("rb") as stream:
                text = stream.read(room)
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}; check its permissions or leave it out") from None
        if text and b"\0" not in text:
            texts.append(text)
            room -= len(text)
        if not room:
            break
    return texts, room > 0


def _split(texts: list[bytes]) -> tuple[bytes, bytes]:
    if len(texts) >= HELD_OUT:
        held_out = texts[HELD_OUT - 1 :: HELD_OUT]
        return b"".join(t for i, t in enumerate(texts, 1) if i % HELD_OUT), b"".join(held_out)
    text = b"".join(texts)
    cut = len(text) - len(text) // HELD_OUT
    return text[:cut], text[cut:]


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def generator(seed: int, count: int) -> torch.Generator:
    """torch's generator, started by a hash of both numbers, so that neighbours have nothing in common."""
    key = hashlib.sha256(f"{seed}/{count}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


def training_batch(corpus: Corpus, seed: int, step: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, (batch, context) int64 each.

    They depend on (seed, step) alone: all contenders see the same, and a resumed run needs no sampler state.
    """
    starts = torch.randint(len(corpus.train) - context, (batch,), generator=generator(seed, step))
    return _windows(corpus.train, starts, context)


def validation_batches(corpus: Corpus, windows: int, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """Evenly spaced contexts of the held-out text, the same for every seed, step and contender."""
    last = len(corpus.validation) - context - 1
    starts = torch.linspace(0, last, min(windows, last + 1), dtype=torch.float64).long().unique()
    return [_windows(corpus.validation, part, context) for part in starts.split(batch)]
