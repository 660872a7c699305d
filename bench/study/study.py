"""One model's runs: what every method gives on every seed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.optimizers import Hyper
from bench.study.scales import Scale
from bench.study.units import Place, Result, Task, run
from bench.training.run import Settings


def by_key(every: Iterable[Hyper]) -> dict[str, Hyper]:
    """Return what trains side by side, by method and rank."""
    return {hyper.method + (f"-r{hyper.rank}" if hyper.rank else ""): hyper for hyper in every}


@dataclass(frozen=True)
class Study:
    """The runs of one model."""

    place: Place  # where they are made
    folder: Path  # of all results
    seeds: tuple[int, ...]
    device: str = "cpu"  # or "cuda"

    @property
    def scale(self) -> Scale:
        """The model."""
        return self.place.scale

    def results(self, selected: Mapping[str, Hyper]) -> dict[str, list[Result]]:
        """Train what has no result; return what each gives, by seed in their order."""
        groups = [dict(selected)] if self.scale.together else [{key: hyper} for key, hyper in selected.items()]
        by_seed: dict[int, dict[str, Result]] = {seed: {} for seed in self.seeds}
        for seed, found in by_seed.items():
            for group in groups:
                found |= run(Task(self.folder / "runs", self._settings(group), seed), self.place)
        return {key: [found[key] for found in by_seed.values()] for key in selected}

    @property
    def plan(self) -> dict[str, Any]:
        """What all runs share, and their data."""
        return self._settings({}).plan() | self.place.origin

    def _settings(self, hyper: dict[str, Hyper]) -> Settings:
        return self.scale.settings(hyper, self.place.source.vocabulary, self.device, curve=True)
