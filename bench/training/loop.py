"""Take a run to its end: checkpoints in between, and Ctrl-C between two steps."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from tqdm import tqdm

from bench.training import checkpoint
from bench.training.run import Run

BAR = "{desc} |{bar}| {n}/{total}, {remaining} left{postfix}"  # fits 80 columns with four losses


class Interrupt:
    """Set by the first Ctrl-C; the second one is not waited for."""

    def __init__(self) -> None:
        self.requested = False
        self.then: list[Callable[[], None]] = []  # to call when it is set


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Let the step under way finish at Ctrl-C, since half a step could not be resumed bit for bit."""
    interrupt = Interrupt()

    def handler(signum: int, frame: Any) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True
        print(
            "\nFinishing this step and saving; Ctrl-C again gives up what the last checkpoint lacks.", file=sys.stderr
        )
        for act in interrupt.then:
            act()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def train(
    run: Run, path: Path, fingerprint: dict[str, Any], stop: Callable[[], bool], checkpoint_seconds: float, shown: bool
) -> None:
    """Train until done or asked to stop; the first of its processes leaves a checkpoint of the last whole step.

    Processes that train together stop together, as soon as one of them is asked to. ``shown`` is whether to show how
    far it is: as a bar or, without a terminal, a line at every evaluation.
    """

    def save() -> int:
        if run.processes.first:
            checkpoint.save(path, fingerprint, run.state_dict())
        return run.done

    steps, start, first = run.settings.steps, monotonic(), run.done
    saved_at, saved = start, run.done if path.exists() else None
    name = f"seed {run.seed}"
    with tqdm(
        desc=name, total=steps, initial=first, disable=None if shown else True, leave=False, bar_format=BAR
    ) as bar:
        while not run.finished and not run.processes.any(stop(), run.settings.device):
            run.advance()
            bar.set_postfix_str(losses(run), refresh=False)
            bar.update()
            if shown and bar.disable and run.done % run.settings.eval_every == 0 and not run.finished:
                left = tqdm.format_interval((monotonic() - start) / (run.done - first) * (steps - run.done))
                print(f"{name}, step {run.done}/{steps}, {left} left: {losses(run)}", flush=True)
            if monotonic() - saved_at >= checkpoint_seconds:
                saved, saved_at = save(), monotonic()
    if saved != run.done:
        save()


def losses(run: Run) -> str:
    """Return the latest training loss of each trainee that has not diverged."""
    latest = {trainee.key: trainee.record.losses[-1] for trainee in run.live}
    return "  ".join(f"{key.partition('-')[0]} {loss:.2f}" for key, loss in latest.items())
