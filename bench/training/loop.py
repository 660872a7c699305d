"""Take a run to its end: from its last checkpoint, with others in between, and Ctrl-C between two steps."""

import sys
from pathlib import Path
from time import monotonic
from typing import Any

from tqdm import tqdm

from bench.training import checkpoint
from bench.training.run import Run
from bench.workers import GOES_ON, asked_to_stop

BAR = "{desc} |{bar}| {n}/{total}, {remaining} left{postfix}"  # fits 80 columns with four losses


def train(run: Run, path: Path, fingerprint: dict[str, Any], checkpoint_seconds: float, shown: bool) -> None:
    """Train until done, from the checkpoint at ``path`` on if there is one; ``shown`` is whether a bar says how far.

    Processes that train together stop together, as soon as one of them is asked to.

    Raises:
        KeyboardInterrupt: it was asked to stop; the first of its processes has saved the last whole step.
    """
    with asked_to_stop() as stop:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            run.load_state_dict(checkpoint.load(path, fingerprint))
        at_times = 0.1 if sys.stderr.isatty() else 30.0  # seconds; a log gets a line now and then
        bar = tqdm(
            desc=f"seed {run.seed}", total=run.settings.steps, initial=run.done, disable=not shown, leave=False,
            bar_format=BAR, mininterval=at_times, maxinterval=at_times,
        )  # fmt: skip
        saved_at = monotonic()
        while not run.finished:
            stopped = run.processes.any(stop(), run.settings.device)
            if stopped or monotonic() - saved_at >= checkpoint_seconds:
                if run.processes.first:
                    checkpoint.save(path, fingerprint, run.state_dict())
                saved_at = monotonic()
            if stopped:
                raise KeyboardInterrupt(GOES_ON)
            run.advance()
            bar.set_postfix_str(losses(run), refresh=False)
            bar.update()
        bar.close()


def losses(run: Run) -> str:
    """Return the latest training loss of each trainee that has not diverged."""
    latest = {trainee.key: trainee.record.losses[-1] for trainee in run.live}
    return "  ".join(f"{key.partition('-')[0]} {loss:.2f}" for key, loss in latest.items())
