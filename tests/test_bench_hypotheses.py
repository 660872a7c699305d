"""``bench.hypotheses``: changes are compared with their base at what both were trained with."""

from pandas import DataFrame

from bench.hypotheses import DEFAULTS, FORMER, changes_table, seeds_table


def rows(*runs):
    names = ("base", "case", "lr", "seed", "validation_loss")
    return DataFrame(
        [{"model": "gpt2-tiny", "steps": 400, "adamw_lr": 0.002} | dict(zip(names, run, strict=True)) for run in runs]
    )


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_a_change_is_compared_with_its_own_base_at_the_rates_that_both_have():
    found = rows(
        (FORMER, FORMER, 0.01, 0, 2.0),
        (FORMER, FORMER, 0.02, 0, 3.0),
        (FORMER, FORMER, 0.02, 1, 8.0),
        (FORMER, "r = 8", 0.02, 0, 3.5),
        (FORMER, "r = 8", 0.04, 0, 9.0),
        (FORMER, "r = 4", 1, 0, 1),
        (FORMER, "r = 4", 2, 0, 4),
        (FORMER, DEFAULTS, 0.01, 0, 1.5),
        (DEFAULTS, "ns_steps 4", 0.01, 0, 1.75),
    )
    former = [[FORMER, "2.500"], [DEFAULTS, "-0.500"], ["r = 4", "-1.000"], ["r = 8", "+0.500"]]
    assert cells(changes_table(found, FORMER)) == former
    assert cells(changes_table(found, DEFAULTS)) == [[DEFAULTS, "1.500"], ["ns_steps 4", "+0.250"]]


def test_seeds_but_the_first_are_paired_where_rates_are_the_same():
    found = rows(
        (FORMER, FORMER, 0.01, 0, 99.0),
        (FORMER, FORMER, 0.01, 1, 2.0),
        (FORMER, FORMER, 0.01, 2, 3.0),
        (FORMER, FORMER, 0.02, 0, 9.0),
        (FORMER, DEFAULTS, 0.01, 0, 0.0),
        (FORMER, DEFAULTS, 0.01, 1, 1.5),
        (FORMER, DEFAULTS, 0.01, 2, 2.7),
        (FORMER, "r = 8", 0.01, 0, 1.0),
        (DEFAULTS, "ns_steps 4", 0.01, 1, 1.6),
        (FORMER, DEFAULTS, 0.02, 1, 1.0),
        (DEFAULTS, "ns_steps 4", 0.02, 1, 0.5),
        (DEFAULTS, "ns_steps 4", 0.02, 3, 7.0),
    )
    assert cells(seeds_table(found)) == [
        ["gpt2-tiny", "400", "0.01", FORMER, "", "2", "2.500 ± 0.500"],
        ["gpt2-tiny", "400", "0.01", DEFAULTS, FORMER, "2", "-0.400 ± 0.100"],
        ["gpt2-tiny", "400", "0.01", "ns_steps 4", DEFAULTS, "1", "+0.100"],
        ["gpt2-tiny", "400", "0.02", DEFAULTS, "", "1", "1.000"],
        ["gpt2-tiny", "400", "0.02", "ns_steps 4", DEFAULTS, "1", "-0.500"],
    ]
