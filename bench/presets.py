"""The paper's hyper-parameters and run lengths: four sweep tables of its appendix "Hyperparameter sweeps", as data.

Under every method but AdamW itself, embedding, head and norms have AdamW with the learning rate and weight decay of the
same table's AdamW row (``adamw_lr``, ``adamw_weight_decay``). On LLaMA every weight decay is 0. The two ablation
variants have Pro-KLShampoo's values at rank 128 with the learning rate times 1.5, as the paragraph "Ablation
hyperparameters" says; Smok-Hop on GPT-2 124M and LLaMA 450M has KL-Shampoo's.
"""

from dataclasses import dataclass

from bench.command import UsageError

ABLATION_FACTOR = 1.5
"""By which the ablation variants' learning rate is above Pro-KLShampoo's, for the component that they lack."""

Key = tuple[str, str, int | None]
"""Method, model, and rank where the method has one."""


@dataclass(frozen=True)
class Preset:
    """What the paper selected.

    Attributes:
        lr: of the method's weights.
        weight_decay: of the method's weights.
        alpha_kl: None where the method has none.
        table: where the paper has it: the caption's words and the label.
        adamw_lr: of embedding, head and norms.
        adamw_weight_decay: of embedding, head and norms.
    """

    lr: float
    weight_decay: float
    alpha_kl: float | None
    table: str
    adamw_lr: float
    adamw_weight_decay: float


@dataclass(frozen=True)
class Range:
    """What the paper tried, each value with each; one value where it did not sweep.

    Attributes:
        alpha_kl: empty where the method has none.
    """

    lr: tuple[float, ...]
    weight_decay: tuple[float, ...]
    alpha_kl: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """A row of a table: what was tried, and the selected values."""

    tried: Range
    lr: float
    weight_decay: float
    alpha_kl: float | None = None


@dataclass(frozen=True)
class RunLength:
    """How long a model is trained.

    Attributes:
        batch: sequences of a step, over all devices.
        context: tokens of a sequence.
        data: what the paper trained on.
    """

    steps: int
    batch: int
    context: int
    data: str

    @property
    def tokens(self) -> int:
        """Seen in the whole run."""
        return self.steps * self.batch * self.context


RUNS = {
    # The paper: 5100 and 13000 iterations, 2.7B and 6.8B tokens. That is modded-nanogpt's 512 sequences of 1024 a step.
    "gpt2-124m": RunLength(5100, 512, 1024, "FineWeb-10B"),
    "gpt2-350m": RunLength(13_000, 512, 1024, "FineWeb-10B"),
    # The paper: 5000 iterations "on a 5B subset", 6250 on a 10B one; it leaves tokens per step and context open.
    # Assumed: one pass, so about 1.0M and 1.6M tokens a step, rounded to a multiple of 512 sequences; and the 1024
    # positions of GaLore's configs, though its scripts train on 512 sequences of 256.
    "llama-134m": RunLength(5000, 1024, 1024, "C4, a subset of 5B tokens"),
    "llama-450m": RunLength(6250, 1536, 1024, "C4, a subset of 10B tokens"),
}
"""By model of :mod:`bench.models`."""

_CAPTIONS = {
    "gpt2-124m": 'Table "Sweep ranges and selected values, GPT-2 124M on FineWeb-10B" (tab:sweep-gpt124m)',
    "gpt2-350m": 'Table "Sweep ranges and selected values, GPT-2 350M on FineWeb-10B" (tab:sweep-gpt350m)',
    "llama-134m": 'Table "Sweep ranges and selected values, LLaMA 134M on C4" (tab:sweep-llama134m)',
    "llama-450m": 'Table "Sweep ranges and selected values, LLaMA 450M on C4" (tab:sweep-llama450m)',
}
_COSMOS_LR = (2e-4, 5e-4, 1e-3, 2e-3)
_PRO_LR = (1e-2, 2e-2, 3e-2)
_PRO_DECAY = (1e-2, 2e-2, 3e-2, 5e-2, 1e-1)
_ALPHA = (5e-3, 1e-2, 1.5e-2)
_MUON_DECAY = (0.0, 2e-2, 3e-2, 5e-2, 1e-1)
_KL_DECAY = (5e-2, 1e-1, 1.5e-1, 2e-1, 2.5e-1, 3e-1)
_NO_DECAY = (0.0,)


def _every(
    rank_free: dict[str, Row], ranked: dict[tuple[str, tuple[int, ...]], Row]
) -> dict[tuple[str, int | None], Row]:
    rows: dict[tuple[str, int | None], Row] = {(method, None): row for method, row in rank_free.items()}
    return rows | {(method, rank): row for (method, ranks), row in ranked.items() for rank in ranks}


_TABLES = {
    "gpt2-124m": _every(
        {
            "adamw": Row(Range((1e-3, 2e-3, 3e-3), (2e-2, 5e-2, 1e-1), ()), 2e-3, 5e-2),
            "muon": Row(Range((1e-2, 2e-2, 3e-2), _MUON_DECAY, ()), 2e-2, 2e-2),
            "kl-shampoo": Row(Range((1e-3, 2e-3, 3e-3), _KL_DECAY, ()), 2e-3, 2.5e-1),
        },
        {
            ("cosmos", (64, 128)): Row(Range(_COSMOS_LR, (1e-1, 2.5e-1, 5e-1), ()), 5e-4, 2.5e-1),
            ("pro-klshampoo", (32, 64, 128)): Row(Range(_PRO_LR, _PRO_DECAY, _ALPHA), 2e-2, 3e-2, 1e-2),
            ("smok-hop", (128,)): Row(Range((2e-3,), (2.5e-1,), ()), 2e-3, 2.5e-1),
        },
    ),
    "gpt2-350m": _every(
        {
            "adamw": Row(Range((1e-3, 2e-3, 3e-3), (5e-2, 1e-1, 1.5e-1), ()), 2e-3, 5e-2),
            "muon": Row(Range((1e-2, 2e-2, 3e-2, 5e-2), _MUON_DECAY, ()), 2e-2, 3e-2),
            "kl-shampoo": Row(Range((1e-3, 2e-3, 3e-3), _KL_DECAY, ()), 2e-3, 1.5e-1),
        },
        {
            ("cosmos", (64, 128)): Row(Range(_COSMOS_LR, (2e-1, 3e-1, 5e-1), ()), 1e-3, 5e-1),
            ("pro-klshampoo", (32, 64, 128)): Row(Range(_PRO_LR, _PRO_DECAY, _ALPHA), 2e-2, 3e-2, 1e-2),
        },
    ),
    "llama-134m": _every(
        {
            "adamw": Row(Range((1e-3, 2e-3, 3e-3, 5e-3), _NO_DECAY, ()), 3e-3, 0.0),
            "muon": Row(Range((5e-3, 1e-2, 2e-2, 3e-2), _NO_DECAY, ()), 2e-2, 0.0),
            "kl-shampoo": Row(Range((2e-3, 3e-3, 4e-3, 5e-3, 8e-3), _NO_DECAY, ()), 5e-3, 0.0),
        },
        {
            ("cosmos", (64, 128)): Row(Range(_COSMOS_LR, _NO_DECAY, ()), 1e-3, 0.0),
            ("pro-klshampoo", (32, 64)): Row(Range(_PRO_LR, _NO_DECAY, _ALPHA), 2e-2, 0.0, 1e-2),
            ("pro-klshampoo", (128,)): Row(Range(_PRO_LR, _NO_DECAY, _ALPHA), 3e-2, 0.0, 1e-2),
            ("smok-hop", (128,)): Row(Range((2e-3, 3e-3, 5e-3), _NO_DECAY, ()), 3e-3, 0.0),
        },
    ),
    "llama-450m": _every(
        {
            "adamw": Row(Range((2e-3, 3e-3, 5e-3), _NO_DECAY, ()), 2e-3, 0.0),
            "muon": Row(Range((2e-2, 3e-2, 5e-2), _NO_DECAY, ()), 2e-2, 0.0),
            "kl-shampoo": Row(Range((2e-3, 3e-3, 5e-3), _NO_DECAY, ()), 3e-3, 0.0),
        },
        {
            ("cosmos", (64, 128)): Row(Range(_COSMOS_LR, _NO_DECAY, ()), 5e-4, 0.0),
            ("pro-klshampoo", (32, 64, 128)): Row(Range((2e-2, 3e-2), _NO_DECAY, (5e-3, 1e-2)), 2e-2, 0.0, 5e-3),
            ("smok-hop", (128,)): Row(Range((3e-3,), _NO_DECAY, ()), 3e-3, 0.0),
        },
    ),
}


def _scaled(row: Row) -> Row:
    """An ablation variant's row, from Pro-KLShampoo's."""
    lr = row.lr * ABLATION_FACTOR
    return Row(Range((lr,), (row.weight_decay,), (row.alpha_kl,)), lr, row.weight_decay, row.alpha_kl)


for _model in ("gpt2-124m", "llama-134m"):  # the paper ran these ablations there only, at rank 128
    for _variant in ("subspace-only", "complement-only"):
        _TABLES[_model][_variant, 128] = _scaled(_TABLES[_model]["pro-klshampoo", 128])

RANGES: dict[Key, Range] = {
    (method, model, rank): row.tried for model, rows in _TABLES.items() for (method, rank), row in rows.items()
}
"""What the paper tried, by method, model and rank."""


def preset(method: str, model: str, rank: int | None) -> Preset:
    """The paper's selected values.

    Args:
        method: "adamw", "muon", "kl-shampoo", "cosmos", "pro-klshampoo", "smok-hop", "subspace-only" or
            "complement-only".
        model: one of the four that the paper trained, "gpt2-124m", "gpt2-350m", "llama-134m" or "llama-450m".
        rank: 32, 64 or 128 where the paper has them; None for a method without a rank.

    Raises:
        UsageError: If the paper has no such run; says which it has.
    """
    if model not in _TABLES:
        raise UsageError(f"the paper did not train {model}, only {', '.join(_TABLES)}; tune on {model} instead")
    rows = _TABLES[model]
    if (method, rank) not in rows:
        ranks = [known for name, known in rows if name == method]
        if ranks == [None]:
            remedy = f"{method} takes no rank; leave it out"
        elif ranks:
            remedy = f"choose rank {' or '.join(map(str, ranks))}, or tune"
        else:
            remedy = f"choose from {', '.join(dict.fromkeys(name for name, _ in rows))}, or tune"
        raise UsageError(f"the paper has no {method} with rank {rank} on {model}; {remedy}")
    row, adamw = rows[method, rank], rows["adamw", None]
    return Preset(row.lr, row.weight_decay, row.alpha_kl, _CAPTIONS[model], adamw.lr, adamw.weight_decay)
