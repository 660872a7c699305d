"""Take runs to their end: from their last checkpoint, with others in between, and asked to stop between two steps."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import torch

from bench.training.run import Run
from bench.workers import GOES_ON, asked_to_stop

BAR = "{desc} |{bar}| {n}/{total}, {remaining} left{postfix}"
BETWEEN = 120.0  # seconds from one checkpoint to the next


def train(runs: Sequence[Run], path: Path, shown: bool) -> None:
    """Train runs of one scale, seed and source in turns, from their checkpoint on if there is one, and leave the last.

    A bar says how far they are, if it is ``shown``; a log gets a line now and then.

    Raises:
        KeyboardInterrupt: it was asked to stop, and has saved the last whole step.
    """
    from tqdm import tqdm

    def done() -> int:
        return max(run.done for run in runs)  # one that diverged has stopped before

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        for run, own in zip(runs, torch.load(path, map_location="cpu", weights_only=True), strict=True):
            run.load_state_dict(own)
    saved_at, at_times = monotonic(), 0.1 if sys.stderr.isatty() else 30.0  # seconds
    bar = tqdm(
        desc=f"seed {runs[0].seed}", total=runs[0].scale.steps, initial=done(), disable=not shown, leave=False,
        bar_format=BAR, mininterval=at_times, maxinterval=at_times,
    )  # fmt: skip
    with asked_to_stop() as stop, bar as progress:
        while not all(run.finished for run in runs):
            stopped = stop()
            if stopped or monotonic() - saved_at >= BETWEEN:
                save(runs, path)
                saved_at = monotonic()
            if stopped:
                raise KeyboardInterrupt(GOES_ON)
            # The order rotates, so that nobody always finds the caches as the same neighbour left them.
            shift = done() % len(runs)
            for run in (*runs[shift:], *runs[:shift]):
                if not run.finished:
                    run.advance()
            latest = {run.name.partition("-")[0]: run.record.losses[-1] for run in runs if not run.finished}
            progress.set_postfix_str("  ".join(f"{name} {loss:.2f}" for name, loss in latest.items()), refresh=False)
            progress.update()
    save(runs, path)


def save(runs: Sequence[Run], path: Path) -> None:
    """Write a checkpoint beside ``path`` and rename it, so that a crash never leaves half a file."""
    unfinished = path.with_name(path.name + ".tmp")
    torch.save([run.state_dict() for run in runs], unfinished)
    os.replace(unfinished, path)
