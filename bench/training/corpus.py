"""Text as bytes: where it comes from, and what is held out."""

import sysconfig
from pathlib import Path

from bench.command import UsageError

CAP = 16 * 2**20  # bytes read at most, so that a large folder does not fill memory
HELD_OUT = 10  # every tenth file, or the last tenth of a single one, is for validation
# Third-party code, tests, and tables that a generator wrote (charmaps, help topics) rather than a person.
_SKIPPED = set("site-packages dist-packages __pycache__ test tests idle_test encodings pydoc_data".split())


def read(path: Path | None) -> tuple[str, bytes, bytes]:
    """Read a text file, every text file of a folder, or (``None``) the running Python's standard library.

    Files come in the order of their names, so that the same files give the same text everywhere; what is beyond
    CAP bytes is left out, and the name says so. Folders hold out every tenth file; a single file, or a folder of too
    few, holds out its last tenth.

    Returns:
        A name for a reader, bytes to train on, and bytes to validate with.

    Raises:
        UsageError: If the text is missing, unreadable or empty.
    """
    root, found, name = _files(path)
    texts, room = [], CAP
    for file in sorted(found, key=lambda f: f.relative_to(root).as_posix()):
        try:
            with file.open("rb") as stream:
                text = stream.read(room)
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}; check its permissions or leave it out") from None
        if text and b"\0" not in text:  # a binary file has zero bytes
            texts.append(text)
            room -= len(text)
        if not room:
            name += f", its first {CAP / 2**20:.3g} MiB"
            break
    if not texts:
        raise UsageError(f"{name} holds no text, only empty or binary files; give text with --data")
    if len(texts) >= HELD_OUT:
        validation = b"".join(texts[HELD_OUT - 1 :: HELD_OUT])
        return name, b"".join(text for i, text in enumerate(texts, 1) if i % HELD_OUT), validation
    whole = b"".join(texts)
    cut = len(whole) - len(whole) // HELD_OUT
    return name, whole[:cut], whole[cut:]


def _files(path: Path | None) -> tuple[Path, list[Path], str]:
    """Return a folder, the files in it to read, and a name for a reader."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        every = ((file, file.relative_to(root)) for file in root.rglob("*.py"))
        # _sysconfigdata is a dump of how this interpreter was compiled.
        files = [f for f, r in every if not _SKIPPED.intersection(r.parts) and not r.name.startswith("_sysconfigdata")]
        if not files:
            raise UsageError(f"no Python source under {root}; give a text file or folder with --data")
        return root, files, f"standard library of Python {sysconfig.get_python_version()}"
    if path.is_dir():
        files = [f for f in path.rglob("*") if f.is_file() and "/." not in f"/{f.relative_to(path).as_posix()}"]
        if not files:
            raise UsageError(f"--data {path} is a folder without files; give a folder with text files in it")
        return path, files, f"folder {path.name or path}"
    if not path.exists():
        raise UsageError(f"--data {path} does not exist; give a text file or a folder")
    return path.parent, [path], f"file {path.name}"
