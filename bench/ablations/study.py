"""What a study is, and the one schema of its rows: a row for every figure of every run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import rows

Settings = Mapping[str, Any]
"""What a variant changes, by name."""


@dataclass(frozen=True)
class Unit:
    """One run."""

    study: str
    model: str
    optimizer: str
    variant: str
    seed: int
    steps: int


def by_variant(unit: Unit) -> rows.Row:
    """Return what tells a unit's rows from those of others."""
    own = {"model": unit.model, "optimizer": unit.optimizer, "value": unit.variant}
    return own | {"seed": unit.seed, "steps": unit.steps}


@dataclass(frozen=True)
class Study:
    """Variants of a run.

    Attributes:
        what: it shows.
        models: that are trained.
        optimizers: that train them.
        variants: by name, of a model and an optimizer; of the first the others are changes.
        figures: yields the rows of a unit with a variant's settings: ``metric``, ``unit``, ``median``, and what the run
            was made of.
        seeds: of weights and batches.
        steps: of every run.
        key: what tells a unit's rows from those of others.
    """

    what: str
    models: Sequence[str]
    optimizers: Sequence[str]
    variants: Callable[[str, str], Mapping[str, Settings]]
    figures: Callable[[Unit, Settings], Iterable[rows.Row]]
    seeds: tuple[int, ...] = (0,)
    steps: int = 400
    key: Callable[[Unit], rows.Row] = by_variant

    def units(self, name: str, seeds: Sequence[int] = (), steps: int | None = None) -> Iterator[Unit]:
        """Yield all runs, seed by seed."""
        for seed in seeds or self.seeds:
            for model in self.models:
                for optimizer in self.optimizers:
                    for variant in self.variants(model, optimizer):
                        yield Unit(name, model, optimizer, variant, seed, steps or self.steps)

    def known(self, unit: Unit, recorded: Iterable[Mapping[str, str]]) -> bool:
        """Return whether a file has this unit's rows."""
        own = {name: rows.text(value) for name, value in self.key(unit).items()}
        return any(own.items() <= row.items() for row in recorded)

    def rows(self, unit: Unit) -> list[rows.Row]:
        """Run a unit and return its rows."""
        settings = self.variants(unit.model, unit.optimizer)[unit.variant]
        return [self.key(unit) | found for found in self.figures(unit, settings)]
