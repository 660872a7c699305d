"""One file per seed, written atomically, read only under the settings it was written with."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from bench.errors import UsageError

FORMAT = 2


def path_for(folder: Path, seed: int) -> Path:
    """Where a seed's checkpoint lies."""
    return folder / f"seed-{seed}.pt"


def save(path: Path, fingerprint: dict[str, Any], state: dict[str, Any]) -> None:
    """Writes beside ``path`` and renames, so that a crash never leaves half a checkpoint."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as stream:
        torch.save({"format": FORMAT, "fingerprint": fingerprint, "state": state}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, path)


def load(path: Path, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The state saved at ``path``.

    Raises:
        UsageError: If the file is no checkpoint, or its fingerprint is another one, naming what differs.
    """
    content = read(path)
    saved = content["fingerprint"]
    differing = [
        f"{key} (checkpoint {saved.get(key)!r}, now {fingerprint.get(key)!r})"
        for key in dict.fromkeys([*fingerprint, *saved])
        if saved.get(key) != fingerprint.get(key)
    ]
    if differing:
        raise UsageError(
            f"cannot resume {path} with other settings: {'; '.join(differing)}; "
            "repeat the first run's options, or choose another --out"
        )
    return content["state"]


def read(path: Path) -> dict[str, Any]:
    """The whole content of a checkpoint.

    Raises:
        UsageError: If the file cannot be read as one.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        name = error.__class__.__name__
        raise UsageError(f"{path} is not a readable checkpoint ({name}); remove it, or use --overwrite") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path} is not a checkpoint of this version; remove it, or use --overwrite")
    return content
