"""One model's runs: what is selected by the sweeps, and what everything selected then gives on every seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.optimizers import Hyper
from bench.study.protocol import Kind, Tuning, tuned
from bench.study.scales import Scale
from bench.study.units import Place, Result, Task
from bench.training.run import Watch, nothing


@dataclass
class Study:
    """The runs of one model."""

    place: Place  # where they are made
    folder: Path  # of all results
    seeds: tuple[int, ...]  # of the final runs; the sweeps have the first
    search: bool = False  # whether hyper-parameters are searched also where the paper's would fit
    device: str = "cpu"  # or "cuda"
    swept: dict[Hyper, Result] = field(default_factory=dict)

    @property
    def scale(self) -> Scale:
        """The model."""
        return self.place.scale

    def tune(self, kinds: Sequence[Kind]) -> Tuning:
        """Return the hyper-parameters of all of these, trained for on one seed in runs of their own."""
        while True:
            losses = {hyper: its.record.final_loss for hyper, its in self.swept.items()}
            known = {hyper: math.inf if math.isnan(loss) else loss for hyper, loss in losses.items()}
            tuning = tuned(kinds, self.scale, self.search, known)
            if not tuning.wanted:
                return tuning
            tasks = [self.task({hyper.method: hyper}, self.seeds[0], "sweep") for hyper in tuning.wanted]
            for hyper, found in zip(tuning.wanted, self.place.results(tasks), strict=True):
                self.swept[hyper] = found[hyper.method]

    def final(
        self, selected: dict[Kind, Hyper], timed: bool = False, name: str = "final", watch: Watch = nothing
    ) -> dict[Kind, list[Result]]:
        """Return what each gives, by seed in the order of the seeds; ``timed`` where their times are compared."""
        hyper = {kind.key: its for kind, its in selected.items()}
        groups: list[dict[str, Hyper]] = [hyper] if self.scale.together else [{k: h} for k, h in hyper.items()]
        tasks = [self.task(group, seed, name, timed, watch) for seed in self.seeds for group in groups]
        by_seed: dict[int, dict[str, Result]] = {seed: {} for seed in self.seeds}
        for task, found in zip(tasks, self.place.results(tasks), strict=True):
            by_seed[task.seed] |= found
        return {kind: [found[kind.key] for found in by_seed.values()] for kind in selected}

    def peak_bytes(self, hyper: Hyper, results: Sequence[Result]) -> int:
        """Return the most GPU memory of a run with nothing beside it: the selected one of the sweep, or a final one."""
        alone = [*results, *([self.swept[hyper]] if hyper in self.swept else [])]
        return max(result.peak_bytes for result in alone)

    def plan(self, curve: bool) -> dict[str, Any]:
        """Return what all runs share, and their data; ``curve`` of those that are evaluated along the way."""
        return self.scale.settings({}, self.place.source.vocabulary, self.device, curve).plan() | self.place.origin

    def task(self, hyper: dict[str, Hyper], seed: int, name: str, timed: bool = False, watch: Watch = nothing) -> Task:
        """Return a run of these; all but sweeps are evaluated along the way."""
        settings = self.scale.settings(hyper, self.place.source.vocabulary, self.device, curve=name != "sweep")
        return Task(self.folder / "runs" / name, settings, seed, timed, watch)
