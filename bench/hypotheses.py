"""The tables of what single changes of Pro-KLShampoo did, from bench/results/hypotheses.csv.

Each was tried on the tiny scale, in a working copy that was not kept; a row's ``base`` is the case that it is a change
of.
"""

from pandas import DataFrame, isna

from bench.lengths.protocol import FIRST_SEED
from bench.markdown import figure, table, with_error

FORMER = "alpha_kl auto, r = 16"
"""The base with momentum and beta2 of 0.95."""
DEFAULTS = "momentum 0.9, beta2 0.9"
RATES = ["lr", "adamw_lr"]


def changes_table(found: DataFrame, base: str) -> str:
    """Return the mean difference of every change from its base, over the rates that both were trained with.

    A change of what the rate means shares none: of such a one the lowest loss is compared with the base's lowest.
    """
    its = found[(found["seed"] == FIRST_SEED) & ((found["base"] == base) | (found["case"] == base))]
    lines = []
    for case in sorted(its["case"].unique(), key=lambda name: (name != base, name)):
        cells: dict[str, object] = {"case": case}
        for (model, steps), runs in its.groupby(["model", "steps"]):
            by_rate = runs.pivot(index=RATES, columns="case", values="validation_loss").reindex(
                columns=list({base, case})
            )
            own = by_rate[case]
            apart = (own - by_rate[base]).mean()
            if isna(apart):
                apart = own.min() - by_rate[base].min()
            cells[f"{model}, {steps:,}"] = figure(own.mean(), 3) if case == base else figure(apart, 3, "+")
        lines.append(cells)
    return table(DataFrame(lines), 1)


def seeds_table(found: DataFrame) -> str:
    """Return what was trained on further seeds: differences from a base, paired by seed, or a base's mean loss.

    FIRST_SEED, on which changes were chosen, is left out.
    """
    further = found[found["seed"] != FIRST_SEED]
    base_of = dict(zip(further["case"], further["base"], strict=True))
    lines = []
    for (model, steps, lr, _), runs in further.groupby(["model", "steps", *RATES]):
        by_seed = runs.pivot(index="seed", columns="case", values="validation_loss")
        for case in sorted(by_seed, key=lambda name: (base_of[name] != FORMER, name != FORMER, name != DEFAULTS, name)):
            base = base_of[case] if base_of[case] in by_seed and case != FORMER else ""
            apart = (by_seed[case] - by_seed[base] if base else by_seed[case]).dropna()
            if len(apart):
                cells: dict[str, object] = {"model": model, "steps": f"{steps:,}", "lr": f"{lr:.3g}"}
                cells |= {"case": case, "changed from": base, "seeds": len(apart)}
                lines.append(cells | {"difference": with_error(apart.mean(), apart.sem(), 3, sign="+" if base else "")})
    return table(DataFrame(lines), 5)
