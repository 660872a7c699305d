"""The paper's tuning protocol: AdamW first, its rate then fixed for embedding, head and norms under every other method.

At a scale of the paper its selected values are taken (``bench.presets``), or with ``--tune`` searched for over its
whole ranges. A scaled-down model has the ranges of the paper's model of its family, with these differences: weight
decay is 0; alpha_kl is searched jointly with the learning rate at the largest rank, whose choice the smaller ranks take
over. Everywhere a range of learning rates or alpha_kl grows while the best lies at its edge. The paper did not do that;
small models need it, for the bracket on alpha_kl moves up as weights get smaller. The ablation variants are not
searched: they have what Pro-KLShampoo has at the largest rank, with 1.5 times its learning rate. All searches are on
one seed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from bench.command import UsageError
from bench.optimizers import Hyper, label
from bench.presets import ABLATION_FACTOR, RANGES, Range, preset
from bench.study.scales import Scale
from bench.study.search import Climbed, climb, near, neighbours

PRO, ABLATIONS = "pro-klshampoo", ("subspace-only", "complement-only")
RANKED = (PRO, "smok-hop", "cosmos", *ABLATIONS)
STARTED = ("kl-shampoo", PRO, "smok-hop", *ABLATIONS)  # those whose eigenvalues start somewhere
PAPER_RANKS = (32, 64, 128)
GROWING = ("lr", "alpha_kl")


@dataclass(frozen=True)
class Kind:
    """A trainee before it is tuned; rank and start are None where the method has none."""

    method: str
    rank: int | None = None
    start: str | float | None = None
    lr: float | None = None  # Set if several rates of one method are compared

    @property
    def key(self) -> str:
        """Its name among the trainees of a run."""
        rank = f"-r{self.rank}" if self.rank else ""
        return self.method + rank + (f"-{self.start}" if self.start else "") + (f"@{self.lr:g}" if self.lr else "")

    @property
    def label(self) -> str:
        """Its name in a table."""
        return label(self.method, self.rank)


def kind(method: str, rank: int, start: str | float) -> Kind:
    """Return the method with those of the two that it has."""
    return Kind(method, rank if method in RANKED else None, start if method in STARTED else None)


@dataclass(frozen=True)
class Search:
    """One method's search: all of the ranges, then what lies beside the best along learning rate and alpha_kl.

    A range of a single value is not searched, and does not grow.
    """

    base: Hyper  # what is not searched
    ranges: Range
    losses: Mapping[Hyper, float]  # as far as they are known

    @cached_property
    def found(self) -> Climbed[Hyper]:
        """How far it has come.

        Raises:
            UsageError: everything diverged.
        """
        values = product(self.ranges.lr, self.ranges.weight_decay, self.ranges.alpha_kl or (None,))
        grid = [replace(self.base, lr=lr, weight_decay=decay, alpha_kl=alpha) for lr, decay, alpha in values]
        found = climb(grid, lambda hyper: (one for one, allowed in self._beside(hyper) if allowed), self.losses)
        if found.best and self.losses[found.best] == math.inf:
            rates = sorted({hyper.lr for hyper in found.tried})
            raise UsageError(f"{self.base.method} diverged at every learning rate tried: {rates}; check the model")
        return found

    @property
    def edges(self) -> list[str]:
        """In what the best could still be too low or too high, because that is as far as a search goes."""
        assert (best := self.found.best)
        beyond = [hyper for hyper, allowed in self._beside(best) if not allowed]
        return [name for name in sorted(GROWING) if any(getattr(h, name) != getattr(best, name) for h in beyond)]

    def _beside(self, hyper: Hyper) -> Iterator[tuple[Hyper, bool]]:
        """Yield what has one value a step lower or higher, and whether that is near enough to the range."""
        for name in GROWING:
            values = getattr(self.ranges, name)
            for value in neighbours(getattr(hyper, name), values) if len(values) > 1 else ():
                yield replace(hyper, **{name: value}), near(value, values)


@dataclass
class Tuning:
    """The values selected for a model, and the searches behind them; no searches where the paper's were taken."""

    selected: dict[Kind, Hyper] = field(default_factory=dict)
    searches: dict[Kind, Search] = field(default_factory=dict)
    wanted: list[Hyper] = field(default_factory=list)  # to be trained before anything else can be selected

    def know(self, searches: Mapping[Kind, Search]) -> bool:
        """Take over what these searches have found; return whether all of them have ended."""
        self.searches |= searches
        self.wanted += [hyper for search in searches.values() for hyper in search.found.wanted]
        self.selected |= {k: search.found.best for k, search in searches.items() if search.found.best}
        return not self.wanted


def tuned(wanted: Iterable[Kind], scale: Scale, search: bool, losses: Mapping[Hyper, float]) -> Tuning:
    """Return the hyper-parameters of all that are wanted, or what is to be trained next to know them.

    With ``search`` they are searched also where the paper's own would fit; ``losses`` are the final validation losses
    that are known, infinite for what diverged.

    Raises:
        UsageError: the paper has no such run, or a method diverged everywhere.
    """
    kinds = list(dict.fromkeys(wanted))
    check(kinds, scale, search)
    if scale.is_paper and not search:
        return Tuning(selected={k: _of_paper(k, scale) for k in kinds})
    tuning, adamw = Tuning(), Kind("adamw")
    if not tuning.know({adamw: Search(Hyper("adamw", 0.0), _range(adamw, scale), losses)}):
        return tuning
    rest = tuning.selected[adamw]
    base = Hyper("", 0.0, adamw_lr=rest.lr, adamw_weight_decay=rest.weight_decay, preset="paper")
    base = replace(base, bounded=not scale.is_paper)

    def search_of(k: Kind, **fixed: tuple[float | None]) -> Search:
        named = replace(base, method=k.method, rank=k.rank, init_eigenvalue=k.start)
        return Search(named, replace(_range(k, scale), **fixed), losses)

    searched = [k for k in kinds if k.method not in ("adamw", *ABLATIONS)]
    largest = {k: replace(k, method=PRO, rank=scale.largest) for k in kinds if k.method in (PRO, *ABLATIONS)}
    first = [k for k in searched if scale.is_paper or k.method != PRO or k.rank == scale.largest]
    if not tuning.know({k: search_of(k) for k in (*first, *largest.values())}):
        return tuning
    smaller = [k for k in searched if k not in first]
    if not tuning.know({k: search_of(k, alpha_kl=(tuning.selected[largest[k]].alpha_kl,)) for k in smaller}):
        return tuning
    for k in kinds:
        if k.method in ABLATIONS:
            pro = tuning.selected[largest[k]]
            (lr,) = scale.lr.get(k.method, (pro.lr * ABLATION_FACTOR,))
            tuning.selected[k] = replace(pro, method=k.method, lr=lr)
    return tuning


def check(kinds: Iterable[Kind], scale: Scale, search: bool) -> None:
    """Look up what :func:`tuned` will need for these, so that a missing one is known before anything trains.

    Raises:
        UsageError: the paper has no such run.
    """
    for k in kinds:
        if scale.is_paper and not search:
            _of_paper(k, scale)
        else:
            paper_range(replace(k, method=PRO) if k.method in ABLATIONS else k, scale)


def paper_range(k: Kind, scale: Scale) -> Range:
    """Return the paper's range; of a rank that it does not have, that of the rank in the same place among its three.

    Raises:
        UsageError: the paper did not tune this method on this model.
    """
    method, model = k.method, scale.paper
    if method == "smok-hop" and not scale.is_paper:
        model = "llama-134m"  # the only one for which the paper searched it
    rank = None if k.rank is None else PAPER_RANKS[scale.ranks.index(k.rank) - len(scale.ranks)]
    found = RANGES.get((method, model, rank))
    if found is None:
        having = ", ".join(m for name, m, r in RANGES if (name, r) == (method, rank))
        raise UsageError(f"the paper tuned no {method} on {model}; give --model with one on which it did: {having}")
    return found


def _range(k: Kind, scale: Scale) -> Range:
    """Return the range of a search: the paper's, or the rates that were given."""
    found = paper_range(k, scale)
    found = replace(found, lr=scale.lr.get(k.method, found.lr))
    return found if scale.is_paper else replace(found, weight_decay=(0.0,))


def _of_paper(k: Kind, scale: Scale) -> Hyper:
    found = preset(k.method, scale.name, k.rank)
    decay = found.weight_decay, found.adamw_weight_decay
    return Hyper(k.method, found.lr, found.adamw_lr, *decay, k.rank, found.alpha_kl, k.start, "paper", bounded=False)
