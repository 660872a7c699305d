"""An experiment small enough for a test: one layer of width 16, ranks 2, 4 and 8; optimizers and text for it."""

from bench.models import gpt2
from bench.optimizers import Hyper
from bench.training.run import Scale

MICRO = Scale("gpt2-micro", gpt2(1, 16, 2, context=16), (2, 4, 8), 4, 2, 4, batch=4)
HYPERS = {
    "adamw": Hyper("adamw", 3e-3),
    "muon": Hyper("muon", 2e-2, 3e-3, weight_decay=0.1),
    "kl": Hyper("kl-shampoo", 1e-2, 3e-3),
    "pro": Hyper("pro-klshampoo", 2e-2, 3e-3, rank=4, alpha_kl=0.01),
}


def text_in(folder):
    """Write a text to train on; return its file."""
    path = folder / "text.txt"
    path.write_text("many words of text that come back again and again " * 40)
    return path
