"""One run, in a process of its own: a module that such a process can import, as it cannot a package's ``__main__``."""

from dataclasses import asdict, replace

import torch

from bench import rows
from bench.experiments.scales import SCALES
from bench.lengths.protocol import Unit
from bench.training.run import Record, Run

MODELS = {scale.name: scale for scale in SCALES["tiny"]}
EVALUATIONS = 20


def train(unit: Unit) -> tuple[Record, rows.Row]:
    """Train one unit on one thread; return its record and where that was."""
    torch.set_num_threads(1)
    scale = MODELS[unit.model]
    source = scale.open(None)
    settings = scale.settings({unit.form: unit.hyper()}, source.vocabulary, "cpu", curve=True)
    every = max(1, unit.steps // EVALUATIONS)
    run = Run(replace(settings, steps=unit.steps, eval_every=every), unit.seed, source)
    while not run.finished:
        run.advance()
    own = {"data": source.name, "data_sha256": source.sha256}
    return run.records()[unit.form], own | rows.environment(torch.device("cpu"))


def rows_of(unit: Unit, record: Record, where: rows.Row) -> tuple[rows.Row, list[rows.Row]]:
    """Return the row of a run, and those of its curve."""
    key = {"optimizer" if name == "form" else name: value for name, value in asdict(unit).items()}
    steps = len(record.losses)
    own = {"rank": unit.hyper().rank, "validation_loss": record.final_loss, "state_mb": record.state_bytes / 1e6}
    own |= {"model_ms": 1e3 * sum(record.model_seconds) / max(1, steps)}
    own |= {"optimizer_ms": 1e3 * sum(record.optimizer_seconds[1:]) / max(1, steps - 1)}
    own |= {"diverged_at": record.diverged_at}
    curve = [
        key | {"step": step, "validation_loss": loss, "seconds": record.seconds(step)}
        for step, loss in record.validation
    ]
    return key | own | where, curve
