"""Take a run to its end: from its last checkpoint, with others in between, and asked to stop between two steps."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import torch
from tqdm import tqdm

from bench.training.run import Run
from bench.workers import GOES_ON, asked_to_stop

BAR = "{desc} |{bar}| {n}/{total}, {remaining} left{postfix}"  # fits 80 columns with four losses
BETWEEN = 120.0
"""Seconds from one checkpoint to the next."""


def steps(run: Run, shown: bool) -> Iterator[None]:
    """Yield before every step of a run, until it is done; ``shown`` is whether a bar says how far."""
    at_times = 0.1 if sys.stderr.isatty() else 30.0  # seconds; a log gets a line now and then
    bar = tqdm(
        desc=f"seed {run.seed}", total=run.scale.steps, initial=run.done, disable=not shown, leave=False,
        bar_format=BAR, mininterval=at_times, maxinterval=at_times,
    )  # fmt: skip
    while not run.finished:
        yield
        run.advance()
        bar.set_postfix_str(losses(run), refresh=False)
        bar.update()
    bar.close()


def losses(run: Run) -> str:
    """Return the latest training loss of each trainee that has not diverged."""
    latest = {trainee.key: trainee.record.losses[-1] for trainee in run.live}
    return "  ".join(f"{key.partition('-')[0]} {loss:.2f}" for key, loss in latest.items())


def train(run: Run, path: Path, shown: bool) -> None:
    """Train until done, from the checkpoint at ``path`` on if there is one, and leave the last one there.

    Raises:
        KeyboardInterrupt: it was asked to stop, and has saved the last whole step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        run.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    saved_at = monotonic()
    with asked_to_stop() as stop:
        for _ in steps(run, shown):
            stopped = stop()
            if stopped or monotonic() - saved_at >= BETWEEN:
                save(run, path)
                saved_at = monotonic()
            if stopped:
                raise KeyboardInterrupt(GOES_ON)
    save(run, path)


def save(run: Run, path: Path) -> None:
    """Write a checkpoint beside ``path`` and rename it, so that a crash never leaves half a file."""
    unfinished = path.with_name(path.name + ".tmp")
    torch.save(run.state_dict(), unfinished)
    os.replace(unfinished, path)
