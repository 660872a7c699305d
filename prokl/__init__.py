"""Pro-KLShampoo and KL-Shampoo: matrix-structured optimizers for PyTorch."""

from importlib import import_module
from types import ModuleType

from prokl import cuda_qr as cuda_qr
from prokl import diagnostics
from prokl import ops as ops
from prokl.optimizer import PAPER, KLShampoo, ProKLShampoo
from prokl.routing.param_groups import param_groups

__all__ = ["PAPER", "KLShampoo", "ProKLShampoo", "diagnostics", "param_groups"]
__version__ = "0.7.0.dev0"


def __getattr__(name: str) -> ModuleType:
    """Import ``prokl.doctor`` when it is asked for: before, ``python -m prokl.doctor`` would find it imported."""
    if name == "doctor":
        return import_module("prokl.doctor")
    raise AttributeError(f"module 'prokl' has no attribute {name!r}")
