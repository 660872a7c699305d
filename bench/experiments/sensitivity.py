"""What orderings depend on: the eigenvalues' start, the run's length, the ablations' learning rate, Smok-Hop's rank.

The paper has no such table. This one is for looking into orderings that come out otherwise than the paper's: one thing
is varied, all others stay as selected, and what is compared is the difference of two contenders, paired by seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench.errors import UsageError
from bench.experiments import figures, results, tables
from bench.experiments.protocol import ABLATIONS, PRO, Kind, Tuning, check
from bench.experiments.scales import AUTO, PAPER_START, Scale
from bench.experiments.spectra import watched
from bench.experiments.study import Study
from bench.experiments.units import Result
from bench.markdown import read_rows
from bench.training.report import mean_and_error
from bench.training.run import Run
from bench.training.settings import Hyper
from prokl import diagnostics
from prokl.base import MatrixOptimizer
from prokl.initial import ceiling_scale
from prokl.shapes import MatrixShape, ceiling

NAME = "sensitivity"
STARTS = (PAPER_START, 1e-2, 1e-3, 1e-4, AUTO)
STEP_FACTORS = (1, 4)  # times the scale's steps
RATE_FACTORS = (0.5, 1.0, 1.5, 2.0)  # times Pro-KLShampoo's
RANK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the scale's largest
LOOKS = 40  # at the eigenvalues along a run
ROUNDING = 1e-5  # of a float32 inverse square root, squared


@dataclass(frozen=True)
class Training:
    """What is trained, on every seed."""

    hyper: Hyper
    scale: Scale

    @property
    def kind(self) -> Kind:
        """Names it in tables."""
        return Kind(self.hyper.method, self.hyper.rank, self.hyper.init_eigenvalue)


@dataclass(frozen=True)
class Point:
    """One difference: ``training`` minus ``minus``, where ``varied`` has this value."""

    varied: str
    value: str | float
    training: Training
    minus: Training


def points(scale: Scale, tuning: Tuning) -> list[Point]:
    """All differences of a model, with the hyper-parameters that were selected for it."""
    largest = scale.largest

    def of(method: str, rank: int | None = None, start: str | float | None = None) -> Training:
        return Training(tuning.selected[Kind(method, rank, start)], scale)

    muon, kl, smok_hop = of("muon"), of("kl-shampoo", None, AUTO), of("smok-hop", largest, AUTO)
    pro = {start: of(PRO, largest, start) for start in (PAPER_START, AUTO)}
    subspace, complement = (of(method, largest, AUTO) for method in ABLATIONS)
    started = [pro[PAPER_START], of("kl-shampoo", None, PAPER_START)]
    ranks = [round(share * largest) for share in RANK_FACTORS]
    return [
        *(Point("start", s, _with(t, init_eigenvalue=s), muon) for t in started for s in STARTS),
        *(Point("steps", x * scale.steps, _longer(t, x), _longer(muon, x)) for t in pro.values() for x in STEP_FACTORS),
        *(Point("lr", x, _with(complement, lr=lr), _with(subspace, lr=lr)) for x, lr in _rates(pro[AUTO].hyper.lr)),
        *(Point("rank", r, _with(smok_hop, rank=r), kl) for r in ranks if 1 <= r < scale.config.width),
    ]


def _rates(lr: float) -> list[tuple[float, float]]:
    return [(factor, lr * factor) for factor in RATE_FACTORS]


def _with(training: Training, **changed: object) -> Training:
    return replace(training, hyper=replace(training.hyper, **changed))


def _longer(training: Training, factor: int) -> Training:
    return replace(training, scale=replace(training.scale, steps=factor * training.scale.steps))


def kinds(scale: Scale) -> list[Kind]:
    """What has to be tuned."""
    largest = scale.largest
    started = [k for start in (PAPER_START, AUTO) for k in (Kind(PRO, largest, start), Kind("kl-shampoo", None, start))]
    return [Kind("muon"), *started, *(Kind(method, largest, AUTO) for method in ("smok-hop", *ABLATIONS))]


def possible(scales: Sequence[Scale], search: bool) -> tuple[Scale, ...]:
    """The models of which all that is needed can be tuned, or is the paper's.

    Raises:
        UsageError: there is none.
    """
    having, complaints = [], []
    for scale in scales:
        try:
            check(kinds(scale), scale, search)
            having.append(scale)
        except UsageError as error:
            complaints.append(error)
    if not having:
        raise complaints[0]
    return tuple(having)


def run(studies: Sequence[Study], vary: Sequence[str], out: Path) -> str:
    """Trains what is missing and writes sensitivity*.csv and .png after every model; the tables in Markdown.

    Args:
        vary: of tables.VARIED; only these.
    """
    rows: list[results.Row] = []
    traces: list[results.Row] = []
    for study in studies:
        found = points(study.scale, study.tune(kinds(study.scale)))
        rows += _rows(study, [point for point in found if point.varied in vary])
        traces += _traces(study, found[0].training.hyper) if "start" in vary else []
        if study.runner.place.processes.first:
            results.merge(out / f"{NAME}.csv", rows)
            if traces:
                results.merge(out / f"{NAME}-eigenvalues.csv", traces)
    if not studies[0].runner.place.processes.first:
        return ""
    draw(out)
    written = read_rows(out / f"{NAME}.csv")
    return "\n".join(tables.sensitivity_table(written, varied) for varied in tables.VARIED if varied in vary)


def draw(folder: Path) -> None:
    """Draws sensitivity.png from the CSV files of this folder, where they are."""
    files = [folder / f"{NAME}{part}.csv" for part in ("", "-eigenvalues")]
    rows, traces = (read_rows(file) if file.exists() else [] for file in files)
    if rows:
        figures.sensitivity(folder / f"{NAME}.png", rows, traces)


def _rows(study: Study, found: Sequence[Point]) -> list[results.Row]:
    trained = _train(study, list(dict.fromkeys(t for point in found for t in (point.training, point.minus))))
    rows = []
    for point in found:
        here, other = trained[point.training], trained[point.minus]
        losses = [result.record.final_loss for result in here]
        loss, error = mean_and_error(losses)
        difference = results.paired(losses, [result.record.final_loss for result in other])
        hyper = point.training.hyper
        rows.append(
            {
                "model": study.scale.name,
                "varied": point.varied,
                "value": point.value,
                "optimizer": hyper.method,
                "rank": hyper.rank,
                "start": hyper.init_eigenvalue,
                "lr": hyper.lr,
                "alpha_kl": hyper.alpha_kl,
                "adamw_lr": hyper.adamw_lr,
                "steps": point.training.scale.steps,
                "seeds": " ".join(map(str, study.seeds)),
                "validation_loss": loss,
                "validation_loss_se": error,
                "validation_loss_per_seed": " ".join(f"{loss:.5f}" for loss in losses),
                "minus": point.minus.hyper.method,
                "difference": difference.mean,
                "difference_se": difference.error,
                "confidence": results.CONFIDENCE,
                "decided": "yes" if difference.decided else "no",
                **results.environment_of([*here, *other]),
            }
        )
    return rows


def _train(study: Study, wanted: Sequence[Training]) -> dict[Training, list[Result]]:
    """Results by seed; what a comparison has trained already is not trained again."""
    tasks = [
        replace(study, scale=t.scale).task({t.kind.key: t.hyper}, seed, "final") for t in wanted for seed in study.seeds
    ]
    given = iter(study.runner.run(tasks, f"{study.scale.name} {NAME}"))
    return {t: [next(given)[t.kind.key] for _ in study.seeds] for t in wanted}


def _traces(study: Study, hyper: Hyper) -> list[results.Row]:
    """Pro-KLShampoo's eigenvalues along a run, for every start: what variance they say, and how many are clipped."""
    rows = []
    for start in STARTS:
        training = watched(study, replace(hyper, init_eigenvalue=start), f"{NAME}-start", _watch_eigenvalues)
        for step in sorted((step for step in training.observed if step.isdigit()), key=int):
            row = {"model": study.scale.name, "start": start, "step": int(step), "seed": study.seeds[0]}
            rows.append(row | {name: float(value) for name, value in training.observed[step].items()})
    return rows


def _watch_eigenvalues(run: Run) -> Callable[[], None]:
    """Keeps :func:`eigenvalue_figures` LOOKS times, from when all weights have begun.

    Those behind a layer that starts at zero begin some steps after the first; before, it would be of other weights.
    """
    (lane,) = run.lanes
    (optimizer,) = lane.optimizers
    weights = dict(lane.model.named_parameters())
    every = max(1, run.settings.steps // LOOKS)
    matrices = sum(len(group["params"]) for group in optimizer.param_groups if group["algorithm"] == "matrix")

    def after_step() -> None:
        if run.live and run.done % every == 0:
            found = diagnostics.eigenvalues(optimizer)
            if len(found) == matrices:
                run.observed[str(run.done)] = eigenvalue_figures(optimizer, weights, found)

    return after_step


def eigenvalue_figures(
    optimizer: MatrixOptimizer, weights: Mapping[str, Tensor], found: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Of a Pro-KLShampoo's 2-D weights: what variance its eigenvalues say, and which share of them the clip holds up.

    Args:
        weights: by name.
        found: what ``diagnostics.eigenvalues`` gives of all of them.

    Returns:
        "tail_variance", of a gradient's element outside the subspace: L's geometric mean times mu, and of that the
        geometric mean over weights; "clipped_L", "clipped_S" and "clipped_mu", shares of eigenvalues at their floor.
    """
    logs = [factors["L"].log().mean() + factors["mu"].log().mean() for factors in found.values()]
    clipped: dict[str, list[Tensor]] = {"L": [], "S": [], "mu": []}
    for name, factors in found.items():
        shape, scale = MatrixShape.of(weights[name]), ceiling_scale(optimizer.state[weights[name]])
        for factor, values in factors.items():
            floor = (ceiling(shape.m if factor == "L" else shape.n) * float(scale)) ** -2
            clipped[factor].append(values <= floor * (1 + ROUNDING))
    shares = {f"clipped_{factor}": torch.cat(held).double().mean() for factor, held in clipped.items()}
    return {"tail_variance": torch.stack(logs).mean().exp()} | shares
