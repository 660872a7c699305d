"""The paper's spectra: of KL-Shampoo's L and R (its Figure 1), and of Phi_L along a run of Pro-KLShampoo (appendix).

Both train one contender, tuned as in the main table, on the first seed, and look at three depths: the first layer, one
in the middle and the last. What was seen is kept in the run's checkpoint, so a run goes on where it was interrupted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.errors import UsageError
from bench.experiments import results, units
from bench.experiments.pool import Interrupted
from bench.experiments.protocol import PRO, Kind
from bench.experiments.study import Study
from bench.training import checkpoint
from bench.training.loop import train
from bench.training.run import Run
from bench.training.settings import Hyper
from bench.training.spectrum_figure import draw, normalised, place_of
from prokl import diagnostics

WINDOW = 10  # minibatches that Phi_L is made of
SHARES = (0.25, 0.5, 1.0)  # of the run, at whose ends is looked

Watch = Callable[[Run], Callable[[], None]]


@dataclass(frozen=True)
class Watching:
    """One of the two experiments.

    Attributes:
        name: of the command; files are "spectra-MODEL" and "spectra-phi-MODEL".
        kind: what is trained, by largest rank and start.
        watch: puts eigenvalues into ``run.observed`` under "STEP"; gives what to call after every step.
        factors: rows of the figure.
    """

    name: str
    kind: Callable[[int, str | float], Kind]
    watch: Watch
    factors: tuple[str, ...]

    def run(self, study: Study, start: str | float, out: Path) -> Path | None:
        """Trains, and writes the figure and a CSV file of the tails; the path of the figure, in one process.

        Raises:
            UsageError: the contender diverged before there was anything to see.
        """
        kind = self.kind(study.scale.largest, start)
        hyper = study.tune([kind]).selected[kind]
        training = watched(study, hyper, f"spectra-{self.name}", self.watch)
        steps = sorted((step for step in training.observed if step.isdigit()), key=int)
        if not steps:
            (lane,) = training.lanes
            raise UsageError(
                f"{kind.label} on {study.scale.name} diverged at step {lane.record.diverged_at}, before the first "
                f"look at its spectra after step {_stages(training.settings.steps)[0]}; give other --starts, or fewer "
                "--steps"
            )
        if not study.runner.place.processes.first:
            return None
        rank = study.scale.largest
        path = out / f"spectra{'-phi' if self.name == 'phi' else ''}-{study.scale.name}.png"
        stages = {
            f"step {step}": {w: normalised(f, rank) for w, f in training.observed[step].items()} for step in steps
        }
        of = "$\\Phi_L$ under" if self.name == "phi" else "the factors of"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(path, stages, self.factors, rank, f"Eigenvalues of {of} {kind.label}, {study.scale.name}, start {start}")
        rows = [row for step in steps for row in _rows(study, start, step, training.observed[step])]
        results.write(path.with_suffix(".csv"), rows)
        return path


def watched(study: Study, hyper: Hyper, name: str, watch: Watch) -> Run:
    """Trains one contender on the first seed; what was seen is in ``Run.observed``, and in the folder ``name``.

    Args:
        watch: gives what to call after every step.

    Raises:
        Interrupted: after Ctrl-C; the same call goes on.
    """
    task, place = study.task({hyper.method: hyper}, study.seeds[0], name), study.runner.place
    made_of = units.fingerprint(task, hyper, place)
    task.folder.mkdir(parents=True, exist_ok=True)
    path = units.path_of(task, hyper, place).with_suffix(".pt")
    run = Run(task.settings, task.seed, place.source, place.processes)
    if path.exists():
        run.load_state_dict(checkpoint.load(path, made_of))
    if not run.finished:
        train(run, path, made_of, place.stop, place.checkpoint_seconds, watch(run))
    if not run.finished:
        raise Interrupted
    return run


def _stages(steps: int) -> list[int]:
    """Steps after which is looked; early enough for a window where the run is long enough for one."""
    return sorted({max(2, min(round(share * steps), steps)) for share in SHARES})


def _watched(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """Those of three depths."""
    last = run.settings.model.layers - 1
    depths = {0, last // 2, last}
    return {weight: value for weight, value in found.items() if place_of(weight)[0] in depths}


def watch_factors(run: Run) -> Callable[[], None]:
    """L and R as they are at the ends of SHARES."""
    stages = _stages(run.settings.steps)
    ((optimizer,),) = [lane.optimizers for lane in run.lanes]

    def after_step() -> None:
        if run.done in stages and run.live:
            run.observed[str(run.done)] = _watched(run, diagnostics.eigenvalues(optimizer))

    return after_step


def watch_phi(run: Run) -> Callable[[], None]:
    """Phi_L, the sum of G^T L^-1 G over the WINDOW steps that end with each of SHARES, by the L before each step.

    The paper's mean differs by a factor, which goes when spectra are divided by their tail mean.
    """
    stages = _stages(run.settings.steps)
    ((optimizer,),) = [lane.optimizers for lane in run.lanes]
    sums: dict[str, dict[str, Tensor]] = run.observed.setdefault("sums", {})  # of windows that have not ended

    def before_step(*_: Any) -> None:
        windows = [str(stage) for stage in stages if stage - WINDOW <= run.done < stage]
        found = _watched(run, diagnostics.phi(optimizer)) if windows else {}
        for window in windows:
            so_far = sums.setdefault(window, {})
            for weight, phi in found.items():
                so_far[weight] = so_far[weight].to(phi) + phi if weight in so_far else phi  # .to: from a checkpoint

    def after_step() -> None:
        if run.done in stages and run.live:
            found = sums.pop(str(run.done), {})
            run.observed[str(run.done)] = {
                weight: {"Phi_L": torch.linalg.eigvalsh(phi.double()).flip(-1).cpu()} for weight, phi in found.items()
            }

    optimizer.register_step_pre_hook(before_step)
    return after_step


def _rows(study: Study, start: str | float, step: str, found: dict[str, dict[str, Tensor]]) -> list[results.Row]:
    """How spiked and how flat each spectrum is."""
    rank = study.scale.largest
    return [
        {
            "model": study.scale.name,
            "start": start,
            "step": step,
            "weight": weight,
            "factor": factor,
            "size": len(values),
            "rank": rank,
            "largest_over_tail_mean": float(diagnostics.over_tail(values, rank)[0]),
            "above_twice_tail_mean": int((diagnostics.over_tail(values, rank) > 2).sum()),
            "tail_am_gm": float(diagnostics.tail_am_gm(values, rank)),
        }
        for weight, factors in found.items()
        for factor, values in factors.items()
    ]


WATCHINGS = {
    w.name: w
    for w in (
        Watching("spectra", lambda rank, start: Kind("kl-shampoo", None, start), watch_factors, ("R", "L")),
        Watching("phi", lambda rank, start: Kind(PRO, rank, start), watch_phi, ("Phi_L",)),
    )
}
