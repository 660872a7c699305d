"""Checkpoints and results: written atomically, continued only under the settings they were written with."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from bench.command import UsageError

FORMAT = 3


def save(path: Path, fingerprint: dict[str, Any], state: dict[str, Any]) -> None:
    """Write beside ``path`` and rename, so that a crash never leaves half a file."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as stream:
        torch.save({"format": FORMAT, "fingerprint": fingerprint, "state": state}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, path)


def load(path: Path, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return the state saved at ``path``.

    Raises:
        UsageError: If the file is none of these, or its fingerprint is another one, naming what differs.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        known = content["format"] == FORMAT
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not readable ({error.__class__.__name__}); remove it") from None
    if not known:
        raise UsageError(f"{path} is of another version; remove it")
    saved = content["fingerprint"]
    differing = [
        f"{key} (there {saved.get(key)!r}, now {fingerprint.get(key)!r})"
        for key in dict.fromkeys([*fingerprint, *saved])
        if saved.get(key) != fingerprint.get(key)
    ]
    if differing:
        raise UsageError(f"{path} was made with other settings: {'; '.join(differing)}; remove it")
    return content["state"]
