"""An experiment small enough for a test: one layer of width 16, ranks 2, 4 and 8; and optimizers for it."""

from dataclasses import replace

from bench.models import gpt2
from bench.optimizers import Hyper
from bench.study.runs import Task
from bench.training.run import Scale

MICRO = Scale("gpt2-micro", gpt2(1, 16, 2, context=16), (2, 4, 8), 4, 2, 4, batch=4)
HYPERS = {
    "adamw": Hyper("adamw", 3e-3),
    "muon": Hyper("muon", 2e-2, 3e-3, weight_decay=0.1),
    "kl": Hyper("kl-shampoo", 1e-2, 3e-3),
    "pro": Hyper("pro-klshampoo", 2e-2, 3e-3, rank=4, alpha_kl=0.01),
    "cosmos": Hyper("cosmos", 1e-3, 3e-3, rank=4),
    "complement": Hyper("complement-only", 2e-2, 3e-3, rank=4, alpha_kl=0.01),
}


def task(folder, text, key, **changes):
    """A run of 14 steps of one of these on the text of a file."""
    return Task(replace(MICRO, steps=14, **changes), text, key, HYPERS[key], 0, folder)
