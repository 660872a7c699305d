"""One model's runs: what is selected by the sweeps, and what everything selected then gives on every seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.optimizers import Hyper
from bench.study.pool import Runner
from bench.study.protocol import Kind, Tuning, tuned
from bench.study.scales import Scale
from bench.study.units import Result, Task
from bench.training.run import Watch, nothing


@dataclass
class Study:
    """The runs of one model."""

    scale: Scale
    runner: Runner  # does them
    folder: Path  # of all results
    seeds: tuple[int, ...]  # of the final runs; the sweeps have the first
    search: bool  # whether hyper-parameters are searched also where the paper's would fit
    device: str  # "cpu" or "cuda"
    swept: dict[Hyper, Result] = field(default_factory=dict)

    def tune(self, kinds: Sequence[Kind]) -> Tuning:
        """Return the hyper-parameters of all of these."""
        return tuned(kinds, self.scale, self.search, self._measure)

    def _measure(self, hypers: list[Hyper]) -> list[float]:
        """Return the final validation loss of each, on one seed, in runs of their own."""
        tasks = [self.task({hyper.method: hyper}, self.seeds[0], "sweep") for hyper in hypers]
        results = self.runner.run(tasks, f"{self.scale.name} sweep")
        for hyper, found in zip(hypers, results, strict=True):
            self.swept[hyper] = found[hyper.method]
        return [self.swept[hyper].record.final_loss for hyper in hypers]

    def final(
        self, selected: dict[Kind, Hyper], timed: bool, name: str = "final", watch: Watch = nothing
    ) -> dict[Kind, list[Result]]:
        """Return what each gives, by seed in the order of the seeds; ``timed`` where their times are compared."""
        hyper = {kind.key: its for kind, its in selected.items()}
        groups: list[dict[str, Any]] = [hyper] if self.scale.together else [{k: h} for k, h in hyper.items()]
        tasks = [
            replace(self.task(group, seed, name), timed=timed, watch=watch) for seed in self.seeds for group in groups
        ]
        results = self.runner.run(tasks, f"{self.scale.name} {name}")
        by_seed = [{} for _ in self.seeds]
        for task, found in zip(tasks, results, strict=True):
            by_seed[self.seeds.index(task.seed)] |= found
        return {kind: [found[kind.key] for found in by_seed] for kind in selected}

    def peak_bytes(self, hyper: Hyper, results: Sequence[Result]) -> int:
        """Return the most GPU memory of a run with nothing beside it: the selected one of the sweep, or a final one."""
        alone = [*results, *([self.swept[hyper]] if hyper in self.swept else [])]
        return max(result.peak_bytes for result in alone)

    def plan(self, curve: bool) -> dict[str, Any]:
        """Return what all runs share, and their data; ``curve`` of those that are evaluated along the way."""
        source = self.runner.place.source
        settings = self.scale.settings({}, source.vocabulary, self.device, curve)
        return settings.plan() | {"data": source.name, "data_sha256": source.sha256}

    def task(self, hyper: dict[str, Hyper], seed: int, name: str) -> Task:
        """Return a run of these; all but sweeps are evaluated along the way."""
        vocabulary = self.runner.place.source.vocabulary
        settings = self.scale.settings(hyper, vocabulary, self.device, curve=name != "sweep")
        return Task(self.folder / "runs" / name, settings, seed)
