"""Whether the defaults hold elsewhere: ``python -m bench.robustness [--out bench/results/robustness.csv]``.

Trains llama-tiny, the more sensitive of the scaled-down families, for 400 steps with Pro-KLShampoo and Muon as the
README gives them, and again with one thing changed: rate, rank, batch, scale of the loss, width, projections that start
at zero; and experts that see fewer tokens than r. One seed, one run a process, nothing tuned.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame
from torch import Tensor, nn

from bench import command, rows
from bench.disturbances import experts
from bench.disturbances.forms import Form, bounded
from bench.experiments.scales import SCALES
from bench.lengths.protocol import ADAMW_LR, FORMS
from bench.markdown import figure, table
from bench.optimizers import Hyper, label
from bench.training.run import Run, Trainee
from bench.training.settings import Settings
from bench.workers import one_run_each

(SCALE,) = (scale for scale in SCALES["tiny"] if scale.name == "llama-tiny")
METHODS = ("pro-klshampoo", "muon")
STEPS, SEED = 400, 0
USUAL = "as it is"
EXPERTS, EXPERT_TOKENS, LAST = "experts of 4 tokens, r = 8", 4, 20
"""A case, the tokens of each expert in a step, and the last steps whose mean is its loss."""


@dataclass(frozen=True)
class Case:
    """One thing that is changed.

    Attributes:
        settings: of the run.
        hyper: of the optimizer.
        lr: factor of the rate of matrices.
        gradients: factor of the loss, and so of all gradients.
        start: changes the weights before the first step.
        methods: which have it.
    """

    settings: Callable[[Settings], Settings] = lambda settings: settings
    hyper: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1.0
    gradients: float = 1.0
    start: Callable[[nn.Module], None] = lambda model: None
    methods: tuple[str, ...] = METHODS


def _width(width: int) -> Case:
    def change(settings: Settings) -> Settings:
        own = settings.model
        share = width // own.width
        model = replace(own, width=width, heads=own.heads * share, mlp_width=own.mlp_width * share)
        return replace(settings, model=model)

    return Case(change)


def _batch(batch: int) -> Case:
    return Case(lambda settings: replace(settings, batch=batch))


@torch.no_grad()
def _zero_projections(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()


CASES = {
    USUAL: Case(),
    "lr × 1/2": Case(lr=0.5),
    "lr × 2": Case(lr=2.0),
    **{f"rank {rank}": Case(hyper={"rank": rank}, methods=METHODS[:1]) for rank in (4, 8, 16, 32, 64)},
    "batch × 1/4": _batch(SCALE.batch // 4),
    "batch × 4": _batch(SCALE.batch * 4),
    "loss × 1e-3": Case(gradients=1e-3),
    "loss × 1e3": Case(gradients=1e3),
    "projections start at zero": Case(start=_zero_projections),
    "width 192": _width(192),
    "width 384": _width(384),
    EXPERTS: Case(),
}
"""By name. The usual width is 96, the usual batch four sequences of 128 bytes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with one thing changed at a time."""

    out: Path = rows.RESULTS / "robustness.csv"  # Results file; what is in it is not trained again
    cases: tuple[str, ...] = tuple(CASES)  # Some of them
    jobs: int = command.cores()  # Runs at a time, each on one thread

    def __post_init__(self) -> None:
        command.at_least(1, jobs=self.jobs)
        command.some(cases=self.cases)
        if unknown := set(self.cases) - CASES.keys():
            raise command.UsageError(f"--cases: unknown {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")


def hyper(method: str, case: Case) -> Hyper:
    """Return a method's defaults with what the case changes."""
    default = FORMS[method].default
    return replace(default, lr=default.lr * case.lr, **case.hyper)


def trained(method: str, name: str, steps: int = STEPS) -> float:
    """Return the final loss of a case on one thread, infinite where the run diverged."""
    torch.set_num_threads(1)
    if name == EXPERTS:
        form = bounded(method) if method != "muon" else Form(method)
        found = experts.losses(form, steps, 0, 0, EXPERT_TOKENS, hyper(method, CASES[name]).lr)
        return sum(found[-LAST:]) / LAST
    case, source = CASES[name], SCALE.open(None)
    settings = SCALE.settings({method: hyper(method, case)}, source.vocabulary, "cpu", curve=False)

    def begin(trainee: Trainee) -> Callable[[int], None]:
        case.start(trainee.model)
        for weight in trainee.model.parameters():
            weight.register_hook(_times(case.gradients))
        return lambda step: None

    run = Run(case.settings(replace(settings, steps=steps, eval_every=steps)), SEED, source, watch=begin)
    while not run.finished:
        run.advance()
    record = run.records()[method]
    return record.final_loss if record.diverged_at is None else float("inf")


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * factor


def row(method: str, name: str, loss: float) -> rows.Row:
    """Return the row of a case."""
    case = CASES[name]
    own = {"case": name, "optimizer": method, "seed": SEED, "steps": STEPS, "metric": "validation loss", "unit": "nats"}
    own |= {"model": SCALE.name, "lr": hyper(method, case).lr, "adamw_lr": ADAMW_LR, "rank": case.hyper.get("rank")}
    if name == EXPERTS:
        own |= {
            "model": "experts",
            "metric": "training loss",
            "unit": "1",
            "adamw_lr": None,
        }
        own |= {"rank": experts.RANK if method != "muon" else None}
    return own | {"median": loss} | rows.environment(torch.device("cpu")) | {"threads": "1"}  # not this process's


def losses_table(found: DataFrame) -> str:
    """Return the losses by case, and how far each method's is from its usual one."""
    lines = []
    by = found.set_index(["case", "optimizer"])["median"]
    for name in (name for name in CASES if name in set(found["case"])):
        cells = {"changed": name}
        for method in METHODS:
            loss = by.get((name, method))
            cells[label(method)] = figure(loss, 3)
        for method in METHODS:
            loss, usual = by.get((name, method)), by.get((USUAL, method))
            apart = loss is None or usual is None or name in (USUAL, EXPERTS)
            cells[f"{label(method)}, change"] = "-" if apart else figure(loss - usual, 3, "+")
        lines.append(cells)
    return table(DataFrame(lines), 1)


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.robustness")
    command.make_file(o.out)
    done = {(one["case"], one["optimizer"]) for one in rows.read(o.out)}
    wanted = [(method, name) for name in o.cases for method in CASES[name].methods if (name, method) not in done]
    with one_run_each(o.jobs) as pool:
        futures = {pool.submit(trained, *one): one for one in wanted}
        for future in as_completed(futures):
            found = row(*futures[future], future.result())
            rows.upsert(o.out, [found], ("case", "optimizer"))
            print(rows.describe(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
