"""``python -m bench.pretrain`` trains a small GPT on real text with several optimizers side by side.

All start from the same weights, see the same batches, and take turns step by step, so that their timings share
whatever else the machine does. It is the smallest of :mod:`bench.study`, with fixed learning rates in place of
searches. The run ends with a table and writes into ``--out``: ``table.md``, ``summary.csv``, ``curves.csv``,
``loss.png``, and below ``runs`` what the same command goes on from.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pandas import DataFrame

from bench import command
from bench.command import UsageError
from bench.models import BYTES, build, byte_gpt
from bench.optimizers import OPTIMIZERS, PRO, RANKED, Hyper, label
from bench.rows import frame, write
from bench.study import figures, results, tables
from bench.study.options import Training
from bench.study.scales import DEMO, Scale
from bench.study.study import Study
from bench.study.units import Place
from bench.training.run import Settings

SHAPE = DEMO.config


@dataclass(frozen=True, kw_only=True)
class Options(Training):
    """Train a small byte-level GPT with several optimizers on the same batches and weights.

    Ctrl-C keeps what was done; the same command goes on bit for bit.
    """

    out: Path = Path("runs/pretrain")  # Results folder
    steps: int = DEMO.steps  # Of every run
    batch: int = DEMO.batch  # Sequences a step
    evaluations: int = DEMO.evaluations  # Of the validation loss, along a run
    eval_windows: int = DEMO.eval_windows  # Validation contexts
    optimizers: tuple[Literal[tuple(OPTIMIZERS)], ...] = ("adamw", "muon", "kl-shampoo", PRO)  # type: ignore[valid-type]
    """Side by side."""
    lr: tuple[str, ...] = ()  # Learning rates by optimizer in place of their own, as in muon=0.02
    adamw_lr: float = OPTIMIZERS["adamw"].lr  # Of AdamW, and of embedding, head and norms under every optimizer
    rank: int = DEMO.largest  # Of the tracked subspace
    threads: int = command.cores()  # CPU threads
    layers: int = SHAPE.layers  # Transformer layers
    width: int = SHAPE.width  # Of the residual stream
    heads: int = SHAPE.heads  # Attention heads
    context: int = SHAPE.context  # Bytes per sequence

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("rank", "threads", "layers", "width", "heads", "context")
        command.at_least(1, **{name: getattr(self, name) for name in counts})
        command.positive(adamw_lr=self.adamw_lr, lr=[*self.rates.values()])
        command.some(optimizers=self.optimizers)
        try:
            self.scale  # noqa: B018
        except ValueError as error:
            raise UsageError(f"--width or --heads: {error}") from None
        for name in self.rates.keys() - set(self.optimizers):
            raise UsageError(f"--lr {name}=... but {name} does not run; add it to --optimizers")

    @property
    def scale(self) -> Scale:
        """The model and the run."""
        config = byte_gpt(self.layers, self.width, self.heads, self.context)
        return replace(DEMO, config=config, ranks=(self.rank,), threads=self.threads, **self.given)

    @property
    def selected(self) -> dict[str, Hyper]:
        """What trains, by method."""
        lrs = {name: OPTIMIZERS[name].lr for name in self.optimizers} | {"adamw": self.adamw_lr} | self.rates
        ranks = {name: self.rank for name in RANKED}
        return {name: Hyper(name, lrs[name], self.adamw_lr, rank=ranks.get(name)) for name in self.optimizers}

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates by optimizer, where they were given.

        Raises:
            UsageError: If they are not written as in muon=0.02.
        """
        found = {}
        for text in self.lr:
            name, _, value = text.partition("=")
            if name not in OPTIMIZERS:
                raise UsageError(f"--lr {text}: unknown optimizer {name!r}; choose from {', '.join(OPTIMIZERS)}")
            try:
                found[name] = float(value)
            except ValueError:
                raise UsageError(f"--lr {text}: {value!r} is no learning rate; write it as in muon=0.02") from None
        return found

    def settings(self, curve: bool) -> Settings:
        """Return a run of all, evaluated along the way or only at its end."""
        return self.scale.settings(self.selected, BYTES, "cpu", curve)


def announcement(o: Options) -> str:
    """Return what a run will do, and where its results go."""
    with torch.device("meta"):
        million = sum(p.numel() for p in build(o.scale.config).parameters()) / 1e6
    seeds = f"{len(o.seeds)} seed{'s' * (len(o.seeds) > 1)}"
    names = ", ".join(dict.fromkeys(label(name) for name in o.optimizers))
    return (
        f"Trains a GPT of {million:.1f}M parameters for {o.steps} steps with {names}, side by side, on {seeds}.\n"
        f"After some steps it says how long it takes. Results go to {o.out}. Ctrl-C keeps what was done."
    )


def verdict(rows: DataFrame) -> str:
    """Return who ended lowest, by how much, and how the time of its steps compares; ``rows`` of summary.csv."""
    ended = rows.dropna(subset="validation_loss").sort_values("validation_loss")
    if ended.empty:
        return "Every run diverged: no loss was finite at the end."
    named = [label(method) for method in ended["optimizer"]]
    losses, ms = ended["validation_loss"].to_list(), (ended["model_ms"] + ended["optimizer_ms"]).to_list()
    lines = [f"{named[0]} ended lowest, at a validation loss of {losses[0]:.4f} nats a byte."]
    if len(named) > 1:
        lines.append(f"{named[1]} came next, {losses[1] - losses[0]:.4f} above; {named[-1]} last, at {losses[-1]:.4f}.")
        quickest = min(range(len(ms)), key=ms.__getitem__)
        lines.append(f"Its training step took {ms[0] / ms[quickest]:.2f} times as long as {named[quickest]}'s.")
    if len(str(ended["validation_loss_per_seed"].iloc[0]).split()) == 1:
        lines[0] += " One seed: differences of 0.01 or 0.02 may be chance."
    return "\n".join(lines)


def run(o: Options) -> str:
    """Train every seed and write the results; return the verdict and the table."""
    command.make_folder(o.out)
    torch.set_num_threads(o.threads)
    place, selected = Place(o.scale, o.data), o.selected
    source, study = place.source, Study(place, o.out, o.seeds)
    print(f"{announcement(o)}\n{source.name}: {source.train_tokens:,} bytes to train on", flush=True)
    found = study.results(selected)
    write(o.out / "summary.csv", results.rows_of(study, selected, found))
    write(o.out / "curves.csv", results.curve_rows(study, selected, found))
    rows = frame(o.out / "summary.csv")
    figures.loss(o.out / "loss.png", frame(o.out / "curves.csv"))
    what = f"{o.steps} steps of {o.batch} x {o.context} bytes, seeds {' '.join(map(str, o.seeds))}"
    table = f"{what}, threads: {o.threads}, {source.name}\n\n{tables.table_of(rows)}"
    (o.out / "table.md").write_text(table, encoding="utf-8")
    return f"{verdict(rows)}\n\n{table}"


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    options = command.options(Options, argv, "bench.pretrain")
    threads = torch.get_num_threads()
    try:
        print(f"\n{run(options)}", flush=True)
    finally:
        torch.set_num_threads(threads)
    print(f"Picture: {options.out / 'loss.png'}\nResults: {options.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
