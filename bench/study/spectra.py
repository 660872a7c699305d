"""The paper's spectra: of KL-Shampoo's L and R (its Figure 1), and of Phi_L along a run of Pro-KLShampoo (appendix).

Both train one optimizer, tuned as in the main table, on the first seed, and look at three depths: the first layer, one
in the middle and the last. What was seen is kept in the run's checkpoint, so a run goes on where it was interrupted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.command import UsageError
from bench.rows import Row, write
from bench.study.protocol import PRO
from bench.study.protocol import kind as kind_of
from bench.study.study import Study
from bench.training.run import Trainee, Watch
from bench.training.spectrum_figure import draw, normalised, place_of
from prokl import diagnostics
from prokl.matrix_optimizer import MatrixOptimizer

WINDOW = 10  # minibatches that Phi_L is made of
SHARES = (0.25, 0.5, 1.0)  # of the run, at whose ends is looked


@dataclass(frozen=True)
class Watching:
    """One of the two experiments."""

    file: str  # of the results, without the model
    method: str  # that is trained, at the largest rank
    watch: Watch  # collects eigenvalues under "STEP"
    of: str  # the figure's title
    factors: tuple[str, ...]  # rows of the figure

    def run(self, study: Study, start: str | float, out: Path) -> Path | None:
        """Train, and write the figure and a CSV file of the tails; return the figure's path in the first process.

        Raises:
            UsageError: If it diverged before there was anything to see.
        """
        rank, scale = study.scale.largest, study.scale
        kind = kind_of(self.method, rank, start)
        hyper = study.tune([kind]).selected[kind]
        task = study.task({hyper.method: hyper}, study.seeds[0], self.file, watch=self.watch)
        record = study.place.results([task])[0][hyper.method].record
        steps = sorted((step for step in record.observed if step.isdigit()), key=int)
        if not steps:
            raise UsageError(
                f"{kind.label} on {scale.name} diverged at step {record.diverged_at}, before the first look at its "
                f"spectra after step {_stages(scale.steps)[0]}; give other --starts, or fewer --steps"
            )
        if not study.place.processes.first:
            return None
        path = out / f"{self.file}-{scale.name}.png"
        observed = {step: record.observed[step] for step in steps}
        stages = {f"step {step}": {w: normalised(f, rank) for w, f in its.items()} for step, its in observed.items()}
        draw(path, stages, self.factors, rank, f"Eigenvalues of {self.of} {kind.label}, {scale.name}, start {start}")
        rows = [row for step, found in observed.items() for row in _rows(study, start, step, found)]
        write(path.with_suffix(".csv"), rows)
        return path


def _stages(steps: int) -> list[int]:
    """Return the steps after which is looked; early enough for a window where the run is long enough for one."""
    return sorted({max(2, min(round(share * steps), steps)) for share in SHARES})


def _three_depths(trainee: Trainee, found: dict[str, Any]) -> dict[str, Any]:
    last = trainee.settings.model.layers - 1
    depths = {0, last // 2, last}
    return {weight: value for weight, value in found.items() if place_of(weight)[0] in depths}


def watch_factors(trainee: Trainee) -> Callable[[int], None]:
    """Collect the eigenvalues of L and R as they are at the ends of SHARES."""
    stages = _stages(trainee.settings.steps)
    (optimizer,) = trainee.optimizers

    def after_step(step: int) -> None:
        if step in stages:
            trainee.record.observed[str(step)] = _three_depths(trainee, diagnostics.eigenvalues(optimizer))

    return after_step


def watch_end(trainee: Trainee) -> Callable[[int], None]:
    """Collect all eigenvalues of every optimizer of this package at the end of the run."""

    def after_step(step: int) -> None:
        if step == trainee.settings.steps:
            for optimizer in trainee.optimizers:
                if isinstance(optimizer, MatrixOptimizer):
                    trainee.record.observed[str(step)] = diagnostics.eigenvalues(optimizer)

    return after_step


def watch_phi(trainee: Trainee) -> Callable[[int], None]:
    """Collect Phi_L, the sum of G^T L^-1 G over the WINDOW steps that end with each of SHARES, L from before each step.

    The paper's mean differs by a factor, which goes when spectra are divided by their tail mean.
    """
    stages = _stages(trainee.settings.steps)
    (optimizer,) = trainee.optimizers

    def before_step(*_: Any) -> None:
        done = len(trainee.record.losses)
        windows = [str(stage) for stage in stages if stage - WINDOW <= done < stage]
        found = _three_depths(trainee, diagnostics.phi(optimizer)) if windows else {}
        for window in windows:
            so_far = trainee.record.observed.setdefault("sums", {}).setdefault(window, {})
            for weight, phi in found.items():
                so_far[weight] = so_far[weight].to(phi) + phi if weight in so_far else phi  # .to: from a checkpoint

    def after_step(step: int) -> None:
        if step in stages:
            found = trainee.record.observed.get("sums", {}).pop(str(step), {})
            trainee.record.observed[str(step)] = {
                weight: {"Phi_L": torch.linalg.eigvalsh(phi.double()).flip(-1).cpu()} for weight, phi in found.items()
            }

    optimizer.register_step_pre_hook(before_step)
    return after_step


def _rows(study: Study, start: str | float, step: str, found: dict[str, dict[str, Tensor]]) -> list[Row]:
    """Return how spiked and how flat each spectrum is."""
    rows, rank = [], study.scale.largest
    for weight, factors in found.items():
        for factor, values in factors.items():
            over = diagnostics.over_tail(values, rank)
            named = {"model": study.scale.name, "start": start, "step": step, "weight": weight, "factor": factor}
            shape = {"largest_over_tail_mean": float(over[0]), "above_twice_tail_mean": int((over > 2).sum())}
            shape["tail_am_gm"] = float(diagnostics.tail_am_gm(values, rank))
            rows.append(named | {"size": len(values), "rank": rank} | shape)
    return rows


WATCHINGS = {
    "spectra": Watching("spectra", "kl-shampoo", watch_factors, "the factors of", ("R", "L")),
    "phi": Watching("spectra-phi", PRO, watch_phi, "$\\Phi_L$ under", ("Phi_L",)),
}
