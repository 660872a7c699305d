"""The optimizers that are put to the tasks, each built as its documentation says, at its own defaults.

Those beside which steps are timed, with the settings of there; others of the same packages; and some that live in
repositories alone, which take part from a checkout.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import prokl
from bench import rows
from bench.steps.peers import PEERS, CannotRun, reason
from bench.tasks.problem import Failed

Make = Callable[[Any, Any], Optimizer]
"""Builds an optimizer of its module, and of weights or groups."""
ADAMW_LR = 3e-3
"""Of everything but matrices, wherever a learning rate of its own is asked for."""


def everything(model: nn.Module) -> list[Any]:
    """Return all weights."""
    return list(model.parameters())


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the matrices and all others, by this package's routing, so that all agree on what a matrix is."""
    matrix, *rest = prokl.param_groups(model, lr=1.0, adamw_lr=1.0)
    return [p for _, p in matrix["params"]], [p for group in rest for _, p in group["params"]]


def _weights(groups: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the weights of what an optimizer is given."""
    for one in groups:
        if isinstance(one, dict):
            yield from _weights(one["params"])
        else:
            yield one[1] if isinstance(one, tuple) else one


@dataclass(frozen=True)
class Peer:
    """An optimizer that can be built.

    Attributes:
        name: as recorded.
        build: builds it of weights or groups.
        groups: what it is to be given of a model.
        unnamed: likewise, without weights' names; None where ``groups`` has none.
    """

    name: str
    build: Callable[[Any], Optimizer]
    groups: Callable[[nn.Module], list[Any]] = everything
    unnamed: Callable[[nn.Module], list[Any]] | None = None

    def optimizer(self, model: nn.Module, weight: Tensor | None = None, what: str = "") -> Optimizer:
        """Build it of a model.

        Raises:
            Failed: it is not meant for ``weight``, which is one of ``what``.
        """
        groups = self.groups(model)
        if weight is not None and not any(p is weight for p in _weights(groups)):
            raise Failed(f"not for {what}")
        return self.build(groups)


@dataclass(frozen=True)
class Contender:
    """An optimizer, and where it comes from.

    Attributes:
        name: as recorded.
        module: where the optimizer is.
        make: builds it of the module and weights or groups.
        groups, unnamed: as in :class:`Peer`.
        distribution: as pip knows it, where it is installed.
        checkout: as --checkout knows it, where it is not.
        python: oldest one that the package runs on.
    """

    name: str
    module: str
    make: Make
    groups: Callable[[nn.Module], list[Any]] = everything
    unnamed: Callable[[nn.Module], list[Any]] | None = None
    distribution: str = ""
    checkout: str = ""
    python: tuple[int, int] = (0, 0)

    def version(self, checkouts: Mapping[str, Path]) -> str:
        """Return the version, or the commit of a checkout.

        Raises:
            CannotRun: it is not there, or not for this Python.
        """
        if self.checkout:
            if self.checkout not in checkouts:
                raise CannotRun(f"no checkout: --checkout {self.checkout}=DIR")
            return commit(checkouts[self.checkout])
        if sys.version_info < self.python:
            raise CannotRun(f"{self.distribution} needs Python {'.'.join(map(str, self.python))}")
        found = prokl.__version__ if self.distribution == "prokl" else rows.version(self.distribution)
        if found is None:
            raise CannotRun(f"not installed: pip install {self.distribution}")
        return found

    def load(self, checkouts: Mapping[str, Path]) -> Peer:
        """Import the package, in a process that is its own.

        Raises:
            CannotRun: it cannot be imported.
        """
        if self.checkout:
            sys.path.insert(0, str(checkouts[self.checkout].resolve()))
        torch.compiler.set_stance("force_eager")  # torch.compile of single functions takes minutes
        try:
            package = import_module(self.module)
        except Exception as error:  # another package may fail in any way
            raise CannotRun(reason(error)) from error
        return Peer(self.name, lambda params: self.make(package, params), self.groups, self.unnamed)


def commit(folder: Path) -> str:
    """Return the commit of a checkout, "checkout" where there is no telling."""
    words = ["git", "-C", str(folder), "rev-parse", "--short=12", "--show-prefix", "HEAD"]
    try:
        prefix, name = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[
            :2
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return "checkout"
    return "checkout" if prefix else name


def _routed(lr: float, rank: int | None = 128, **more: Any) -> Callable[[nn.Module], list[Any]]:
    return lambda model: prokl.param_groups(model, lr=lr, adamw_lr=ADAMW_LR, rank=rank, **more)


def _two_dimensional(model: nn.Module) -> list[Any]:
    return [p for p in split(model)[0] if p.ndim == 2]


def _flagged(model: nn.Module) -> list[Any]:
    """Return groups with the flag ``use_muon``."""
    matrices, others = split(model)
    found = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False, "lr": ADAMW_LR}]
    return [group for group in found if group["params"]]


def _dion(model: nn.Module) -> list[Any]:
    """Return a group of matrices, convolutions flattened, and one for AdamW."""
    matrices, others = split(model)
    found = [
        {"params": [p for p in matrices if p.ndim < 4]},
        {"params": [p for p in matrices if p.ndim >= 4], "flatten": True},
        {"params": others, "algorithm": "adamw", "lr": ADAMW_LR},
    ]
    return [group for group in found if group["params"]]


def _with_scalars(model: nn.Module) -> list[Any]:
    """Return a group of matrices and stacks, and one for the optimizer of the others."""
    matrices, others = split(model)
    found = [{"params": [p for p in matrices if p.ndim < 4]}, {"params": others, "scalar": True}]
    return [group for group in found if group["params"]]


def _gram(package: Any, groups: list[dict[str, Any]]) -> Optimizer:
    own, others = ([g for g in groups if ("scalar" in g) == scalar] for scalar in (False, True))
    rest = torch.optim.AdamW([p for g in others for p in g["params"]], ADAMW_LR) if others else None
    # No kernels, which are for GPUs; restarting after two of five iterations is what it tunes itself to.
    return package.Muon(own, ns_use_kernels=False, gram_newton_schulz_restart_iterations=[2], scalar_optimizer=rest)


def _own(name: str) -> Make:
    return lambda package, params: getattr(package, name)(params)


def _timed(name: str, groups: Callable[[nn.Module], list[Any]] = everything, make: Make | None = None) -> Contender:
    """Return a peer beside which steps are timed, with its settings there unless others are given."""
    (peer,) = (peer for peer in PEERS if peer.name == name)
    more = {"distribution": peer.distribution, "python": peer.python}
    return Contender(name, peer.module, make or peer.make, groups, **more)


def _uncompiled(make: Make) -> Make:
    def build(package: Any, params: Any) -> Optimizer:
        package.utils.compile_mode = None  # else it compiles each of its functions, for minutes
        return make(package, params)

    return build


def _heavyball(contender: Contender) -> Contender:
    return replace(contender, make=_uncompiled(contender.make), distribution="heavyball")


CONTENDERS = (
    Contender("prokl.ProKLShampoo", "prokl", _own("ProKLShampoo"), _routed(0.02),
              _routed(0.02, names=False), "prokl"),
    Contender("prokl.KLShampoo", "prokl", _own("KLShampoo"), _routed(0.005, None),
              _routed(0.005, None, names=False), "prokl"),
    Contender("torch.AdamW", "torch.optim", _own("AdamW"), distribution="torch"),
    Contender("torch.Muon", "torch.optim", _own("Muon"), _two_dimensional, distribution="torch"),
    _heavyball(_timed("heavyball.KLShampoo")),
    _heavyball(Contender("heavyball.SOAP", "heavyball", _own("SOAP"))),
    _heavyball(Contender("heavyball.MuonAdamW", "heavyball", _own("MuonAdamW"))),
    _timed("pytorch_optimizer.SOAP"),
    _timed("pytorch_optimizer.Shampoo"),
    Contender("pytorch_optimizer.Muon", "pytorch_optimizer", _own("Muon"), _flagged,
              distribution="pytorch-optimizer"),
    _timed("gram_newton_schulz.Muon", _with_scalars, _gram),
    _timed("emerging_optimizers.SOAP", _two_dimensional),
    Contender("KellerJordan/Muon", "muon", _own("SingleDeviceMuonWithAuxAdam"), _flagged, checkout="muon"),
    Contender("dion.Muon", "dion", _own("Muon"), _dion, checkout="dion"),
    Contender("dion.Dion2", "dion", _own("Dion2"), _dion, checkout="dion"),
    Contender("nikhilvyas/SOAP", "soap", _own("SOAP"), checkout="soap"),
)  # fmt: skip
