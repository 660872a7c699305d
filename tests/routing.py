"""Tiny models for the tests of routing."""

import torch
from torch import nn


def holding(**parts):
    """A module whose children and parameters are ``parts``."""
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)
    return module
