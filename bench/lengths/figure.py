"""The figure of :mod:`bench.lengths`: validation loss along the runs of one length."""

from pathlib import Path

from pandas import DataFrame

from bench.drawing import plt, save, tidy
from bench.experiments.figures import curve, fit
from bench.lengths.protocol import FORMS
from bench.lengths.tables import Compared, curves_of, judged, step_ms, units
from bench.optimizers import OPTIMIZERS

STEPS = 1600
SHOWN = ("adamw", "muon", "muon-0.9", "kl-shampoo", "kl-shampoo-0.9", "pro-klshampoo")


def draw(path: Path, found: DataFrame, curves: DataFrame, steps: int = STEPS) -> None:
    """Draw tuned methods' loss against steps and seconds, a line of panels per model; bands are one standard error.

    Seconds are steps times what one takes, as in the table of shares.
    """
    losses, every_ms = units(found), step_ms(found)
    models = list(dict.fromkeys(unit.model for unit in losses))
    figure, grid = plt.subplots(len(models), 2, figsize=(11, 3.8 * len(models)), squeeze=False, layout="constrained")
    for line, model in zip(grid, models, strict=True):
        compared = Compared(losses, model, steps)
        best = {form: unit for form in SHOWN if (unit := compared.tuned[form].unit)}
        seeds = judged(set.intersection(*(set(compared.at_best(form).index) for form in best)) if best else ())
        for form, unit in best.items():
            its = curves_of(curves, unit)
            its = its[its["seed"].isin(seeds)].assign(seconds=its["step"] * every_ms[model, form] / 1e3)
            own = OPTIMIZERS[unit.hyper().method]
            style = {"color": own.colour, "lw": 1.6, "label": f"{FORMS[form].label}, lr {unit.lr:.2g}"}
            style["ls"] = "--" if FORMS[form].label != own.label else "-"
            for axes, x in zip(line, ("step", "seconds"), strict=True):
                curve(axes, its, x, "validation_loss", **style)
        of = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        for axes, label in zip(line, ("steps", "seconds of training"), strict=True):
            axes.set(xlabel=label, ylabel="validation loss, nats per byte", title=f"{model}, {steps:,} steps, {of}")
            fit(axes)
            tidy(axes)
        line[1].legend(frameon=False, fontsize="small", loc="upper right")
    save(figure, path)
