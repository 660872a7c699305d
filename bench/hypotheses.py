"""The tables of what single changes of Pro-KLShampoo did, from bench/results/hypotheses.csv.

Each was tried on the tiny scale, most in a working copy that was not kept; a row's ``base`` is the case that it is a
change of.
"""

from pandas import DataFrame, Series, isna

from bench.lengths.protocol import FIRST_SEED
from bench.markdown import figure, table, with_error

FORMER = "alpha_kl auto, r = 16"
"""The base with momentum and beta2 of 0.95."""
DEFAULTS = "momentum 0.9, beta2 0.9"


def changes_table(found: DataFrame, base: str) -> str:
    """Return the mean difference of every change from its base, over the rates that both were trained with.

    A change of what the rate means shares none: of such a one the lowest loss is compared with the base's lowest.
    """
    its = found[(found["seed"] == FIRST_SEED) & ((found["base"] == base) | (found["case"] == base))]
    lines = []
    for case in sorted(its["case"].unique(), key=lambda name: (name != base, name)):
        cells: dict[str, object] = {"case": case}
        for (model, steps), runs in its.groupby(["model", "steps"]):
            by_rate = runs.pivot(index="lr", columns="case", values="validation_loss")
            own = by_rate.get(case, Series(dtype=float))
            apart = (own - by_rate[base]).mean()
            if isna(apart):
                apart = own.min() - by_rate[base].min()
            cells[f"{model}, {steps:,}"] = figure(own.mean(), 3) if case == base else figure(apart, 3, "+")
        lines.append(cells)
    return table(DataFrame(lines), 1)


def seeds_table(found: DataFrame) -> str:
    """Return what was trained on further seeds at one rate: FORMER's mean loss, and differences from a base by seed.

    FIRST_SEED, on which changes were chosen, is left out.
    """
    further = found[found["seed"] != FIRST_SEED]
    base_of = dict(zip(further["case"], further["base"], strict=True))
    lines = []
    for case in sorted(base_of, key=lambda name: (base_of[name] != FORMER, name != FORMER, name)):
        cells: dict[str, object] = {"case": case, "changed from": "" if case == FORMER else base_of[case]}
        for model, runs in further.groupby("model"):
            by_seed = runs.pivot(index="seed", columns="case", values="validation_loss")
            own = by_seed.get(case, Series(dtype=float))
            apart = (own if case == FORMER else own - by_seed[base_of[case]]).dropna()
            (rate,) = set(runs["lr"])
            text = with_error(apart.mean(), apart.sem(), 3, sign="" if case == FORMER else "+")
            cells[f"{model}, lr {rate:.3g}"] = f"{text} ({len(apart)})" if len(apart) else "-"
        lines.append(cells)
    return table(DataFrame(lines), 2)
