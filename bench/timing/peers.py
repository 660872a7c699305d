"""Optimizers of other packages, beside which whole steps are timed: ``pip install -e .[peers]``.

Each is imported when it is built. All refresh every tenth step, as this package does, where they have such a period.
Nothing is compiled: torch.compile takes minutes, and the steps beside which these are timed are not compiled either.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench import rows
from bench.optimizers import OPTIMIZERS
from bench.timing.entries import PERIOD, Entry


class CannotRun(Exception):
    """The optimizer cannot run here; the text says why."""


def _gram(package: Any, weights: list[Tensor]) -> Optimizer:
    # Its own kernels are for GPUs; restarting after two of five iterations is what it tunes itself to, printing.
    restarts = [2]
    return package.Muon(weights, ns_use_kernels=weights[0].is_cuda, gram_newton_schulz_restart_iterations=restarts)


@dataclass(frozen=True)
class Peer:
    """An optimizer of another package.

    Attributes:
        name: as recorded.
        distribution: as pip knows it.
        module: where the optimizer is.
        make: builds it of the module and weights.
        note: what a reader must know.
        python: oldest one that the package runs on, where that is not every one of this package.
    """

    name: str
    distribution: str
    module: str
    make: Callable[[Any, list[Tensor]], Optimizer]
    note: str = ""
    python: tuple[int, int] = (0, 0)

    def build(self, weights: list[Tensor]) -> Optimizer:
        """Build the optimizer.

        Raises:
            CannotRun: it is not installed, not for this Python, or cannot be imported or built.
        """
        if sys.version_info < self.python:
            needed, here = (".".join(map(str, version[:2])) for version in (self.python, sys.version_info))
            raise CannotRun(f"{self.distribution} needs Python {needed}, this is {here}")
        if rows.version(self.distribution) is None:
            raise CannotRun(f"not installed: pip install {self.distribution}, or -e .[peers]")
        torch.compiler.set_stance("force_eager")
        try:
            return self.make(import_module(self.module), weights)
        except Exception as error:  # another package may fail in any way, and the rest is to be measured
            raise CannotRun(reason(error)) from error

    def entry(self) -> Entry:
        """Return it as it is timed; the note has the version."""
        found = rows.version(self.distribution)
        notes = [f"{self.distribution} {found}" if found else "", self.note]
        return Entry(self.name, self.build, note="; ".join(filter(None, notes)))


def _every_tenth(name: str, period: str) -> Callable[[Any, list[Tensor]], Optimizer]:
    return lambda package, weights: getattr(package, name)(weights, **{period: PERIOD})


PEERS = (
    Peer("heavyball.KLShampoo", "heavyball", "heavyball",
         _every_tenth("KLShampoo", "precondition_frequency"), "torch.compile off"),
    Peer("pytorch_optimizer.SOAP", "pytorch-optimizer", "pytorch_optimizer",
         _every_tenth("SOAP", "precondition_frequency")),
    Peer("pytorch_optimizer.Shampoo", "pytorch-optimizer", "pytorch_optimizer",
         _every_tenth("Shampoo", "preconditioning_compute_steps")),
    Peer("gram_newton_schulz.Muon", "gram-newton-schulz", "gram_newton_schulz",
         _gram, "torch.compile off, Newton-Schulz in float16"),
    Peer("emerging_optimizers.SOAP", "emerging-optimizers", "emerging_optimizers.soap",
         lambda package, weights: package.SOAP(weights, lr=1e-3, use_kl_shampoo=True),
         "use_kl_shampoo=True; QR in every step, it has no period", (3, 12)),
)  # fmt: skip


def reason(error: BaseException) -> str:
    """Return an exception as one line."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= 200 else line[:197] + "..."


def peers(rank: int, polar: torch.dtype) -> list[Entry]:
    """Return those of other packages, and COSMOS at this rank with Newton-Schulz in ``polar``."""
    note = "written from its description, weight by weight; QR in every step"
    settings = (("rank", rank), ("ns_dtype", polar))
    cosmos = Entry("cosmos", OPTIMIZERS["cosmos"].make, settings, rank=rank, polar=polar, note=note)
    return [*(peer.entry() for peer in PEERS), cosmos]
