"""The studies' tables from their rows; bench.tables puts them into the documents."""

import math
from collections.abc import Sequence

from pandas import DataFrame, Series, isna

from bench.ablations import disturbed, experts
from bench.ablations.disturbed import FORMS
from bench.ablations.language import recorded_row
from bench.ablations.studies import EXPERTS, MATCHED, ORIGINAL, OWN, USUAL, changed, of_digits
from bench.markdown import figure, table, with_error
from bench.optimizers import OPTIMIZERS, label
from bench.paired import CONFIDENCE, paired
from bench.study.lengths import FORMS as TUNED

LOSS = "validation loss"
STEPS = 400
"""Of the runs on digits that are shown."""


def differences_table(found: DataFrame) -> str:
    """Return the mean loss of every variant, and its difference from the first one's on the seeds that both have."""
    lines = []
    losses = found[found["metric"] == LOSS]
    for (model, method), its in losses.groupby(["model", "optimizer"], sort=False):
        by_seed = {value: own.set_index("seed")["median"] for value, own in its.groupby("value", sort=False)}
        usual = next(iter(by_seed.values()))
        for variant, own in by_seed.items():
            cells = {"model": model, "optimizer": label(method), "variant": variant, "seeds": str(len(own))}
            cells["loss"] = with_error(own.mean(), own.sem())
            cells |= {"difference": "-", f"upper bound, {CONFIDENCE:.0%}": "-"}
            if own is not usual:
                seeds = own.index.intersection(usual.index)
                apart = paired(own[seeds], usual[seeds])
                cells["difference"] = with_error(apart.mean, apart.error, sign="+")
                cells[f"upper bound, {CONFIDENCE:.0%}"] = figure(apart.upper, 4, "+")
            lines.append(cells)
    return table(DataFrame(lines), 3)


def robustness_table(found: DataFrame) -> str:
    """Return the losses by what was changed, and how far each method's is from its usual one."""
    by = found.set_index(["value", "optimizer"])["median"]
    methods = [method for method in TUNED if method in set(found["optimizer"])]
    methods.sort(key=lambda method: method != "pro-klshampoo")
    lines = []
    for name in (*changed("llama-tiny", methods[0]), EXPERTS):
        cells = {"changed": name} | {label(method): figure(by.get((name, method)), 3) for method in methods}
        for method in methods:
            loss, usual = by.get((name, method)), by.get((USUAL, method))
            alone = loss is None or usual is None or name in (USUAL, EXPERTS)
            cells[f"{label(method)}, change"] = "-" if alone else figure(loss - usual, 3, "+")
        lines.append(cells)
    return table(DataFrame(lines), 1)


def digits_table(found: DataFrame) -> str:
    """Return test losses by factor of the rate, means over the seeds with every rate, and errors at the best one."""
    lines = []
    for form in (name for name in TUNED if name in set(found["optimizer"])):
        its = found[(found["optimizer"] == form) & (found["steps"] == STEPS)]
        losses = its[its["metric"] == "test loss"]
        by_seed = losses.pivot(index="seed", columns="value", values="median")
        by_seed = by_seed.reindex(columns=list(of_digits("mixer", form))).dropna()
        if by_seed.empty:
            continue
        best = by_seed.mean().idxmin()
        lost = paired(by_seed["1"], by_seed[best])
        at_best = its[(its["value"] == best) & its["seed"].isin(by_seed.index)]
        errors = 100 * at_best[at_best["metric"] == "test errors"]["median"]
        cells = {"optimizer": TUNED[form].label}
        cells |= {f"lr × {factor}": f"{mean:.3f}" for factor, mean in by_seed.mean().items()}
        cells["default − best"] = with_error(lost.mean, lost.error, 3)
        cells["errors at the best, %"] = with_error(errors.mean(), errors.sem(), 1)
        cells["seeds"] = str(len(by_seed))
        lines.append(cells)
    return table(DataFrame(lines), 1)


def _units(found: DataFrame) -> Series:
    """Return the units of lr of every row, "" for AdamW's."""
    return found["value"].str.partition(" ")[2]


def rates_table(found: DataFrame) -> str:
    """Return the mean validation loss over the seeds of every rate, its best in bold."""
    losses = found[found["metric"] == LOSS]
    cells = []
    for method, units in (("adamw", ""), *((method, units) for units in (MATCHED, ORIGINAL) for method in OWN)):
        its = losses[(losses["optimizer"] == method) & (_units(losses) == units)]
        means = its.groupby("lr")["median"].mean()
        best = means.min()
        shown = (f"{lr:g}: **{loss:.3f}**" if loss == best else f"{lr:g}: {loss:.3f}" for lr, loss in means.items())
        of = "matrices" if units == ORIGINAL else "all groups"
        cells.append({"lr of": of, "optimizer": label(method), "validation loss by lr": ", ".join(shown)})
    return table(DataFrame(cells), 3)


def sizes_table(found: DataFrame) -> str:
    """Return the median root mean square of updates over lr by shape, of one seed, at the lr nearest AdamW's own."""
    sizes = found[(found["metric"] == "update rms") & (found["seed"] == found["seed"].min())]
    cells = []
    for (method, units), its in sizes.groupby(["optimizer", _units(sizes)], sort=False):
        rate = min(its["lr"].unique(), key=lambda lr: abs(lr - OPTIMIZERS["adamw"].lr))
        own = its[its["lr"] == rate].set_index("shapes")["median"]
        named = {shape.replace("x", " × "): figure(own[shape], 3) for shape in own.index}
        cells.append({"optimizer": label(method), "adjust_lr_fn": units or "-", "lr": f"{rate:g}"} | named)
    return table(DataFrame(cells), 2)


def drift_table(found: DataFrame) -> str:
    """Return the largest error of every basis at the first look and of the whole run, by what is kept in bfloat16."""
    errors = found[found["metric"].str.startswith("orthogonality of ")]
    lines = []
    for (method, metric), its in errors.groupby(["optimizer", "metric"], sort=False):
        cells = {"optimizer": label(method), "basis": metric.removeprefix("orthogonality of ")}
        for form, own in its.groupby("value", sort=False):
            cells[form] = f"{_short(own['median'].iloc[0])}, {_short(own['median'].max())}"
        lines.append(cells)
    return table(DataFrame(lines), 2)


def _short(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def bounded_table(found: DataFrame) -> str:
    """Return how many gradients were bounded by seed, and the loss beside that of the recorded runs."""
    lines = []
    for (model, method), its in found.groupby(["model", "optimizer"], sort=False):
        losses, counts = (its[its["metric"] == metric].set_index("seed") for metric in (LOSS, "bounded gradients"))
        before = recorded_row(model, method)
        usual = dict(zip(before["seeds"].split(), map(float, before["validation_loss_per_seed"].split()), strict=True))
        seeds = [seed for seed in losses.index if str(seed) in usual]
        apart = paired(losses["median"][seeds], [usual[str(seed)] for seed in seeds])
        cells = {"model": model, "optimizer": label(method), "gradients": counts["note"].iloc[0].split()[1]}
        cells["bounded, by seed"] = ", ".join(f"{count:.0f}" for count in counts["median"])
        lines.append(cells | {"difference in loss": with_error(apart.mean, apart.error, sign="+")})
    return table(DataFrame(lines), 2)


Line = tuple[str, str, tuple[str, ...]]
"""Title in front of the case's value, case, and the metrics of which the largest is shown."""
LENGTHS = ("first step", f"largest of the next {disturbed.AFTER}")

DISTURBED: tuple[Line, ...] = (
    ("one gradient larger", "spike", LENGTHS),
    ("zero gradients", "zeros", LENGTHS),
    ("gradients of 1e-4", "faint", LENGTHS),
    ("one row zero", "row", LENGTHS),
    ("the same, the row's own step", "row", tuple(f"row's {metric}" for metric in LENGTHS)),
    ("gradients of 1e-6, then one larger", "huge", LENGTHS),
    ("another scale for good", "scale", ("largest step",)),
    ("the same, steps until as usual", "scale", ("as usual again after",)),
)
LOSSES: tuple[Line, ...] = (
    ("experts, before they are idle", "experts", ("loss before",)),
    ("idle experts, worst after return", "experts", (f"worst loss of the next {experts.AFTER}",)),
    ("GPT, undisturbed", "undisturbed", (LOSS,)),
    ("GPT, a layer's gradients zero", "layer", (LOSS,)),
    ("GPT, gradient spikes", "spikes", (LOSS,)),
)
DIGITS = {"steps": 0, "usual steps": 2}
"""Decimals by unit; of losses more."""


def disturbances_table(rows: DataFrame, lines: Sequence[Line]) -> str:
    """Return a line for every case and value, a column for every optimizer: the paper's form in parentheses."""
    found = []
    for title, case, metrics in lines:
        own = rows[(rows["case"] == case) & rows["metric"].isin(metrics)]
        for value, its in own.groupby("value", sort=False):
            figures = its.groupby(["optimizer", "clip_threshold"])["median"].max()
            digits = DIGITS.get(its["unit"].iloc[0], 3)
            cells = {"case": f"{title}, {value}" if value else title}
            for form in FORMS:
                figure = short(figures[form.optimizer, form.clip_threshold], digits)
                name = label(form.optimizer)
                cells[name] = f"{cells[name]} ({figure})" if name in cells else figure
            found.append(cells)
    return table(DataFrame(found), 1)


def short(figure: float, digits: int) -> str:
    """Return a figure with at most this many decimals, fewer where it is large; "-" where there is none."""
    if isna(figure):
        return "-"
    if math.isinf(figure):
        return "not finite"
    if figure >= 1e5:
        return f"{figure:.0e}".replace("e+", "e").replace("e0", "e")
    return f"{figure:,.{0 if figure >= 100 else min(digits, 1) if figure >= 10 else digits}f}"
