"""Text as bytes: where it comes from, and what is held out."""

import sysconfig
from pathlib import Path

from bench.command import UsageError

CAP = 16 * 2**20  # bytes read at most
HELD_OUT = 10  # every tenth file, or the last tenth of a single one, is for validation
# Third-party code, tests, and tables that a generator wrote (charmaps, help topics) rather than a person.
_SKIPPED = set("site-packages dist-packages __pycache__ test tests idle_test encodings pydoc_data".split())


def read(path: Path | None) -> tuple[str, bytes, bytes]:
    """Read a text file, or (``None``) the running Python's standard library, in the order of its files' names.

    Returns:
        A name for a reader, bytes to train on, and bytes to validate with: every tenth file of the library, the last
        tenth of a single one.
    """
    if path is None:
        return _library()
    try:
        with path.open("rb") as stream:
            text = stream.read(CAP)
    except OSError as error:
        raise UsageError(f"cannot read --data {path}: {error.strerror}; give a text file or token shards") from None
    if not text or b"\0" in text:  # which a binary file has
        raise UsageError(f"--data {path} holds no text, it is empty or binary; give a text file")
    cut = len(text) - len(text) // HELD_OUT
    return f"file {path.name}", text[:cut], text[cut:]


def _library() -> tuple[str, bytes, bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    texts, room = [], CAP
    for name in sorted(files):
        # _sysconfigdata is a dump of how this interpreter was compiled.
        if _SKIPPED.intersection(name.split("/")) or files[name].name.startswith("_sysconfigdata"):
            continue
        text = files[name].read_bytes()[:room]
        if text and b"\0" not in text:
            texts.append(text)
            room -= len(text)
    train = b"".join(text for i, text in enumerate(texts, 1) if i % HELD_OUT)
    validation = b"".join(texts[HELD_OUT - 1 :: HELD_OUT])
    return f"standard library of Python {sysconfig.get_python_version()}", train, validation
