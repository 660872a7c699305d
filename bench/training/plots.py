"""The two figures: loss curves, and the spectra of the preconditioners (the paper's Figure 1)."""

from pathlib import Path

import numpy as np

from bench.drawing import plt, save, tidy
from bench.training.contenders import contender_of, label_of
from bench.training.report import Results
from bench.training.run import Record
from bench.training.settings import Settings
from bench.training.spectrum_figure import draw, normalised


def loss_curves(path: Path, results: Results, settings: Settings) -> None:
    """Validation loss against steps and against training seconds.

    Several seeds are averaged point by point; the band is one standard error of the validation loss.
    """
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    lowest, start = np.inf, []
    for i, key in enumerate(settings.optimizers):
        records = [by_key[key] for by_key in results.values()]
        colour = _colour(key, i, len(settings.optimizers))
        steps, loss, error = _validation(records)
        if not len(steps):
            continue
        last = "diverged" if any(r.diverged_at is not None for r in records) else f"{loss[-1]:.3f}"
        seconds = np.array([np.mean([r.seconds(s) for r in records]) for s in steps])
        for axes, x in ((by_step, steps), (by_time, seconds)):
            axes.plot(x, loss, color=colour, lw=1.8, marker="o", ms=3, label=f"{label_of(key)}  {last}")
            axes.fill_between(x, loss - error, loss + error, color=colour, alpha=0.2, lw=0)
        lowest = min(lowest, loss.min())
        start.append(loss[min(2, len(loss) - 1)])
    by_step.set_xlabel("steps")
    by_time.set_xlabel("seconds of training (forward, backward, optimizer)")
    by_step.set_ylabel("validation loss, nats per byte")
    if start:  # the steep first descent would squeeze the differences that the figure is for
        by_step.set_ylim(lowest - 0.05 * (max(start) - lowest), max(start) * 1.02)
        by_step.legend(title="last value", frameon=False)
    for axes in (by_step, by_time):
        axes.set_xlim(left=0)
        tidy(axes)
    seeds = f"{len(results)} seeds, band: standard error" if len(results) > 1 else f"seed {next(iter(results))}"
    figure.suptitle(f"{settings.model.layers} layers of width {settings.model.width}, {seeds}")
    save(figure, path)


def spectra(path: Path, records: dict[str, Record], settings: Settings) -> bool:
    """Eigenvalues of KL-Shampoo's factors over their tail mean, a panel per layer type, a colour per depth.

    Without KL-Shampoo among the contenders, Pro-KLShampoo's or a variant's S over its tail eigenvalue.
    Returns whether there was anything to draw.
    """
    key = next((k for k in _by_preference(list(records)) if records[k].spectra), None)
    if key is None:
        return False
    record, rank = records[key], settings.hyper[key].rank
    found = {weight: normalised(factors, rank) for weight, factors in record.spectra.items()}
    wide = "R" if any("R" in factors for factors in found.values()) else "S"
    title = f"Eigenvalues of {label_of(key)}'s preconditioners after {len(record.losses)} steps"
    draw(path, {"": found}, (wide, "L"), rank, title)
    return True


def _by_preference(keys: list[str]) -> list[str]:
    order = ("kl-shampoo", "pro-klshampoo")
    return sorted(keys, key=lambda k: order.index(k.partition("@")[0]) if k.partition("@")[0] in order else len(order))


def _validation(records: list[Record]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean loss and its standard error, at the evaluations that every seed has."""
    shared = sorted(set.intersection(*(set(dict(r.validation)) for r in records)))
    losses = np.array([[dict(r.validation)[s] for s in shared] for r in records])
    error = losses.std(axis=0, ddof=1) / np.sqrt(len(records)) if len(records) > 1 else np.zeros(len(shared))
    return np.array(shared), losses.mean(axis=0), error


def _colour(key: str, index: int, count: int) -> object:
    """The contender's own colour; a sweep's rates go through one colour map from low to high."""
    return plt.get_cmap("viridis")(0.85 * index / max(1, count - 1)) if "@" in key else contender_of(key).colour
