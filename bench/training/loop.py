"""Runs a run to its end: checkpoints in between, and Ctrl-C between two steps."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from bench.training import checkpoint
from bench.training.run import Run


class Interrupt:
    """Set by the first Ctrl-C; the second one is not waited for."""

    def __init__(self) -> None:
        self.requested = False
        self.told: list[Callable[[], None]] = []  # to call when it is set


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Lets the step under way finish at Ctrl-C, since half a step could not be resumed bit for bit."""
    interrupt = Interrupt()

    def handler(signum: int, frame: Any) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True
        for tell in interrupt.told:
            tell()
        print(
            "\nFinishing this step and saving; Ctrl-C again gives up what the last checkpoint lacks.", file=sys.stderr
        )

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def train(
    run: Run,
    path: Path,
    fingerprint: dict[str, Any],
    stop: Callable[[], bool],
    checkpoint_seconds: float,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Trains until done or told to stop; the first of its processes leaves a checkpoint of the last whole step.

    Processes that train together stop together: as soon as one of them is told to.
    """

    def save() -> int:
        if run.processes.first:
            checkpoint.save(path, fingerprint, run.state_dict())
        return run.done

    saved_at, saved = monotonic(), run.done if path.exists() else None
    while not run.finished and not run.processes.any(stop(), run.settings.device):
        run.advance()
        after_step()
        if monotonic() - saved_at >= checkpoint_seconds:
            saved, saved_at = save(), monotonic()
    if saved != run.done:
        save()
