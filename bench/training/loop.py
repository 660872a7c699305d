"""Take a run to its end: from its last checkpoint, with others in between, and asked to stop between two steps."""

import os
import sys
from pathlib import Path
from time import monotonic

import torch
from tqdm import tqdm

from bench.training.run import Run
from bench.workers import GOES_ON, asked_to_stop

BAR = "{desc} |{bar}| {n}/{total}, {remaining} left{postfix}"
BETWEEN = 120.0
"""Seconds from one checkpoint to the next."""


def bar(run: Run, shown: bool) -> tqdm:
    """Return a bar that says how far a run is, if it is ``shown``; a log gets a line now and then."""
    at_times = 0.1 if sys.stderr.isatty() else 30.0  # seconds
    return tqdm(
        desc=f"seed {run.seed}", total=run.scale.steps, initial=run.done, disable=not shown, leave=False,
        bar_format=BAR, mininterval=at_times, maxinterval=at_times,
    )  # fmt: skip


def train(run: Run, path: Path, shown: bool) -> None:
    """Train until done, from the checkpoint at ``path`` on if there is one, and leave the last one there.

    Raises:
        KeyboardInterrupt: it was asked to stop, and has saved the last whole step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        run.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    saved_at = monotonic()
    with asked_to_stop() as stop, bar(run, shown) as said:
        while not run.finished:
            stopped = stop()
            if stopped or monotonic() - saved_at >= BETWEEN:
                save(run, path)
                saved_at = monotonic()
            if stopped:
                raise KeyboardInterrupt(GOES_ON)
            run.advance()
            said.update()
    save(run, path)


def save(run: Run, path: Path) -> None:
    """Write a checkpoint beside ``path`` and rename it, so that a crash never leaves half a file."""
    unfinished = path.with_name(path.name + ".tmp")
    torch.save(run.state_dict(), unfinished)
    os.replace(unfinished, path)
