"""Optimizers of other packages, beside which whole steps are timed: ``pip install -e .[peers]``.

Each is imported when it is built. All refresh every tenth step, as this package does, where they have such a period.
Nothing is compiled: torch.compile takes minutes, and the steps beside which these are timed are not compiled either.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench import records
from bench.steps.contenders import PERIOD, Contender
from bench.training.cosmos import Cosmos

PYTHON = {"emerging-optimizers": (3, 12)}
"""Oldest Python of the peers that do not run on every one of this package."""


class CannotRun(Exception):
    """The peer cannot run here; the text says why."""


def _heavyball(package: Any, weights: list[Tensor]) -> Optimizer:
    return package.KLShampoo(weights, precondition_frequency=PERIOD)


def _soap(package: Any, weights: list[Tensor]) -> Optimizer:
    return package.SOAP(weights, precondition_frequency=PERIOD)


def _shampoo(package: Any, weights: list[Tensor]) -> Optimizer:
    return package.Shampoo(weights, preconditioning_compute_steps=PERIOD)


def _gram(package: Any, weights: list[Tensor]) -> Optimizer:
    # Its own kernels are for GPUs; restarting after two of five iterations is what it tunes itself to, printing.
    restarts = [2]
    return package.Muon(weights, ns_use_kernels=weights[0].is_cuda, gram_newton_schulz_restart_iterations=restarts)


def _kl_soap(package: Any, weights: list[Tensor]) -> Optimizer:
    return package.SOAP(weights, lr=1e-3, use_kl_shampoo=True)


PEERS: tuple[tuple[str, str, str, Callable[[Any, list[Tensor]], Optimizer], str], ...] = (
    ("heavyball.KLShampoo", "heavyball", "heavyball", _heavyball, "torch.compile off"),
    ("pytorch_optimizer.SOAP", "pytorch-optimizer", "pytorch_optimizer", _soap, ""),
    ("pytorch_optimizer.Shampoo", "pytorch-optimizer", "pytorch_optimizer", _shampoo, ""),
    (
        "gram_newton_schulz.Muon",
        "gram-newton-schulz",
        "gram_newton_schulz",
        _gram,
        "torch.compile off, Newton-Schulz in float16",
    ),
    (
        "emerging_optimizers.SOAP",
        "emerging-optimizers",
        "emerging_optimizers.soap",
        _kl_soap,
        "use_kl_shampoo=True; QR in every step, it has no period",
    ),
)
"""Name, distribution, module, how to build, what a reader must know."""


def build(
    distribution: str, module: str, make: Callable[[Any, list[Tensor]], Optimizer], weights: list[Tensor]
) -> Optimizer:
    """The optimizer of another package.

    Raises:
        CannotRun: it is not installed, not for this Python, or cannot be imported or built.
    """
    oldest = PYTHON.get(distribution, (0, 0))
    if sys.version_info < oldest:
        needed, here = (".".join(map(str, version[:2])) for version in (oldest, sys.version_info))
        raise CannotRun(f"{distribution} needs Python {needed}, this is {here}")
    if records.version(distribution) is None:
        raise CannotRun(f"not installed: pip install {distribution}, or -e .[peers]")
    torch.compiler.set_stance("force_eager")
    try:
        return make(import_module(module), weights)
    except Exception as error:  # another package may fail in any way, and the rest is to be measured
        raise CannotRun(reason(error)) from error


def reason(error: BaseException) -> str:
    """An exception as one line."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= 200 else line[:197] + "..."


def peers(rank: int, polar: torch.dtype) -> list[Contender]:
    """Those of other packages, and COSMOS at this rank with Newton-Schulz in this dtype; its authors' is bfloat16."""

    def contender(
        name: str, distribution: str, module: str, make: Callable[[Any, list[Tensor]], Optimizer], note: str
    ) -> Contender:
        found = records.version(distribution)
        known = [f"{distribution} {found}"] if found else []
        return Contender(
            name,
            lambda weights: build(distribution, module, make, weights),
            note="; ".join(filter(None, [*known, note])),
        )

    def cosmos(weights: list[Tensor]) -> Optimizer:
        return Cosmos(weights, rank=rank, ns_dtype=polar)

    note = "written from its description, weight by weight; QR in every step"
    return [*(contender(*peer) for peer in PEERS), Contender("cosmos", cosmos, rank=rank, polar=polar, note=note)]
