"""The paper's tuning protocol: AdamW first, its rate then fixed for embedding, head and norms under every other method.

At a scale of the paper its selected values are taken (``bench.presets``), or with ``--tune`` searched for over its
whole ranges. A scaled-down model has the ranges of the paper's model of its family, with these differences: weight
decay is 0; alpha_kl is searched jointly with the learning rate at the largest rank, whose choice the smaller ranks take
over. Everywhere a range of learning rates or alpha_kl grows while the best lies at its edge. The paper did not do that;
small models need it, for the bracket on alpha_kl moves up as weights get smaller. The ablation variants are not
searched: they have what Pro-KLShampoo has at the largest rank, with 1.5 times its learning rate. All searches are on
one seed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from bench.command import UsageError
from bench.optimizers import Hyper, label
from bench.presets import ABLATION_FACTOR, RANGES, Range, preset
from bench.study.scales import Scale
from bench.study.search import Search, search_all

PRO, ABLATIONS = "pro-klshampoo", ("subspace-only", "complement-only")
RANKED = (PRO, "smok-hop", "cosmos", *ABLATIONS)
STARTED = ("kl-shampoo", PRO, "smok-hop", *ABLATIONS)  # those whose eigenvalues start somewhere
PAPER_RANKS = (32, 64, 128)


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


@dataclass
class Tuning:
    """The values selected for a model, and the searches behind them; no searches where the paper's were taken."""

    selected: dict[Kind, Hyper] = field(default_factory=dict)
    searches: dict[Kind, Search] = field(default_factory=dict)


def tuned(wanted: Iterable[Kind], scale: Scale, search: bool, measure: Callable[[list[Hyper]], list[float]]) -> Tuning:
    """Return the hyper-parameters of all that are wanted.

    With ``search`` they are searched also where the paper's own would fit; ``measure`` gives the final validation
    losses of a list.

    Raises:
        UsageError: the paper has no such run.
    """
    kinds = list(dict.fromkeys(wanted))
    check(kinds, scale, search)
    if scale.is_paper and not search:
        return Tuning(selected={k: _of_paper(k, scale) for k in kinds})
    tuning = Tuning()
    adamw = Kind("adamw")
    _search({adamw: Search(Hyper("adamw", 0.0), _range(adamw, scale))}, tuning, measure)
    rest = tuning.selected[adamw]
    base = Hyper("", 0.0, adamw_lr=rest.lr, adamw_weight_decay=rest.weight_decay, preset="paper")
    base = replace(base, bounded=not scale.is_paper)

    searched = [k for k in kinds if k.method not in ("adamw", *ABLATIONS)]
    largest = {k: replace(k, method=PRO, rank=scale.largest) for k in kinds if k.method in (PRO, *ABLATIONS)}
    first = [k for k in searched if scale.is_paper or k.method != PRO or k.rank == scale.largest]
    first = list(dict.fromkeys([*first, *largest.values()]))
    _search({k: Search(_named(base, k), _range(k, scale)) for k in first}, tuning, measure)
    smaller = {
        k: Search(_named(base, k), replace(_range(k, scale), alpha_kl=(tuning.selected[largest[k]].alpha_kl,)))
        for k in searched
        if k not in first
    }
    _search(smaller, tuning, measure)
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


def _search(searches: dict[Kind, Search], tuning: Tuning, measure: Callable[[list[Hyper]], list[float]]) -> None:
    search_all(searches.values(), measure)
    tuning.searches |= searches
    tuning.selected |= {k: s.best for k, s in searches.items()}


def _named(base: Hyper, k: Kind) -> Hyper:
    return replace(base, method=k.method, rank=k.rank, init_eigenvalue=k.start)


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
