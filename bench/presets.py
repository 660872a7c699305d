"""The paper's run lengths, and what the sweep tables of its appendix (tab:sweep-gpt124m and so on) selected.

Under every method but AdamW itself, embedding, head and norms have AdamW with the learning rate and weight decay of the
same table's AdamW row (``adamw_lr``, ``adamw_weight_decay``). On LLaMA every weight decay is 0. The two ablation
variants have Pro-KLShampoo's values at rank 128 with the learning rate times 1.5, as the paragraph "Ablation
hyperparameters" says; Smok-Hop on GPT-2 124M and LLaMA 450M has KL-Shampoo's.
"""

from dataclasses import dataclass

from bench.optimizers import Hyper


@dataclass(frozen=True)
class RunLength:
    """The length of a model's training."""

    steps: int
    batch: int  # sequences of a step, over all devices
    data: str  # what the paper trained on


RUNS = {
    # The paper: 5100 and 13000 iterations, 2.7B and 6.8B tokens. That is modded-nanogpt's 512 sequences of 1024 a step.
    "gpt2-124m": RunLength(5100, 512, "FineWeb-10B"),
    "gpt2-350m": RunLength(13_000, 512, "FineWeb-10B"),
    # The paper: 5000 iterations "on a 5B subset", 6250 on a 10B one; it leaves tokens per step and context open.
    # Assumed: one pass, so about 1.0M and 1.6M tokens a step, rounded to a multiple of 512 sequences; and the 1024
    # positions of GaLore's configs, though its scripts train on 512 sequences of 256.
    "llama-134m": RunLength(5000, 1024, "C4, a subset of 5B tokens"),
    "llama-450m": RunLength(6250, 1536, "C4, a subset of 10B tokens"),
}
"""Lengths of runs by model of :mod:`bench.models`."""

SELECTED: dict[tuple[str, str, int | None], tuple[float, float, float | None]] = {}
"""Learning rate, weight decay and alpha_kl by method, model and rank."""
# Method, ranks: these, as printed, by model, but for one thing: where the paper says that Smok-Hop uses KL-Shampoo's
# selected rate, that rate stands.
for _method, _ranks, _of_models in (
    ("adamw", (None,), ((2e-3, 5e-2), (2e-3, 5e-2), (3e-3, 0.0), (2e-3, 0.0))),
    ("muon", (None,), ((2e-2, 2e-2), (2e-2, 3e-2), (2e-2, 0.0), (2e-2, 0.0))),
    ("kl-shampoo", (None,), ((2e-3, 2.5e-1), (2e-3, 1.5e-1), (5e-3, 0.0), (3e-3, 0.0))),
    ("cosmos", (64, 128), ((5e-4, 2.5e-1), (1e-3, 5e-1), (1e-3, 0.0), (5e-4, 0.0))),
    ("pro-klshampoo", (32, 64), ((2e-2, 3e-2, 1e-2), (2e-2, 3e-2, 1e-2), (2e-2, 0.0, 1e-2), (2e-2, 0.0, 5e-3))),
    ("pro-klshampoo", (128,), ((2e-2, 3e-2, 1e-2), (2e-2, 3e-2, 1e-2), (3e-2, 0.0, 1e-2), (2e-2, 0.0, 5e-3))),
    ("smok-hop", (128,), ((2e-3, 2.5e-1), None, (3e-3, 0.0), (3e-3, 0.0))),
):
    for _model, _values in zip(RUNS, _of_models, strict=True):
        for _rank in _ranks:
            if _values is not None:
                SELECTED[_method, _model, _rank] = (*_values, None)[:3]
for _model in ("gpt2-124m", "llama-134m"):  # the paper ran these ablations there only, at rank 128
    for _method in ("subspace-only", "complement-only"):
        _lr, *_rest = SELECTED["pro-klshampoo", _model, 128]
        SELECTED[_method, _model, 128] = (1.5 * _lr, *_rest)


def preset(method: str, model: str, rank: int | None) -> Hyper:
    """Return the values that the paper selected, in the paper's form of the method.

    Args:
        method: "adamw", "muon", "kl-shampoo", "cosmos", "pro-klshampoo", "smok-hop", "subspace-only" or
            "complement-only".
        model: one of the four that the paper trained, "gpt2-124m", "gpt2-350m", "llama-134m" or "llama-450m".
        rank: 32, 64 or 128 where the paper has them; None for a method without a rank.
    """
    lr, decay, alpha_kl = SELECTED[method, model, rank]
    adamw_lr, adamw_decay, _ = SELECTED["adamw", model, None]
    return Hyper(method, lr, adamw_lr, decay, adamw_decay, rank, alpha_kl, preset="paper", bounded=False)
