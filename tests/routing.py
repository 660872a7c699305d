"""Tiny models for the tests of routing, and what is found of them."""

import torch
from torch import nn

from prokl import param_groups

RATES = {"lr": 0.02, "adamw_lr": 1e-3}
GUESS = ", taken for a factor of products (adamw= if it acts element by element)"
HINT = "; each read as (out, in) (transposed= reads it as (in, out))"


def of_class(name, module="", /, **parts):
    """A module of a class of this name, from a file of that name, with these children and parameters."""
    built = type(name, (nn.Module,), {"__module__": module})()
    for attribute, part in parts.items():
        setattr(built, attribute, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)
    return built


def holding(**parts):
    """A module whose children and parameters are ``parts``."""
    return of_class("Module", "", **parts)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def mlp(*sizes):
    return nn.Sequential(*(part for pair in zip(sizes, sizes[1:], strict=False) for part in (linear(*pair), nn.ReLU())))


def blocks(width=8, count=2):
    return nn.ModuleList(holding(up=linear(width, 20), down=linear(20, width)) for _ in range(count))


KINDS = {"blocks": blocks, "attention": lambda: nn.MultiheadAttention(8, 2), "words": lambda: nn.Embedding(9, 8)}


def net(layers, **parts):
    """A model of layers "path:inputs>outputs", "@size" convolutions, by more sizes an mlp, of KINDS, and of parts."""
    model = holding()
    for path, kind in (layer.split(":") for layer in layers.split()):
        sizes, _, kernel = kind.partition("@")
        each = [int(size) for size in sizes.split(">")] if kind not in KINDS else []
        plain = KINDS[kind]() if kind in KINDS else mlp(*each) if len(each) > 2 else linear(*each)
        *around, name = path.split(".")
        owner = model
        for outer in around:
            if not hasattr(owner, outer):
                setattr(owner, outer, holding())
            owner = getattr(owner, outer)
        setattr(owner, name, nn.Conv2d(*each, int(kernel), bias=False) if kernel else plain)
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def at(path, module):
    """A model with a module at a path."""
    for part in reversed(path.split(".")):
        module = holding(**{part: module})
    return module


class Conv1D(nn.Module):
    """A stand-in for transformers' own: a linear layer with its weight (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = holding(qkv=nn.Linear(width, 3 * width), output=nn.Linear(width, width))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width))


class GPT(nn.Module):
    def __init__(self, width=16, layers=2, vocabulary=48, tied=False):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.pos_emb = nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def experts():
    """Two stacks of 4 experts, with biases in the two layouts that libraries use."""
    stacks = {"up": (4, 16, 32), "up_bias": (4, 32), "down": (4, 32, 16), "b2": (4, 1, 16)}
    return holding(**{name: torch.zeros(shape) for name, shape in stacks.items()})


def by_name(model, **options):
    """Route of every name of a model."""
    found = param_groups(model, **RATES, **options).routes
    return {name: route for route in found for name in route.names}


def routes(model, **options):
    """Route of every name of ``it``, beside a linear layer so that the matrix method has something."""
    found = by_name(holding(it=model, own=nn.Linear(3, 5)), **options)
    return {name.removeprefix("it."): route for name, route in found.items() if not name.startswith("own.")}


def adamw(model, **options):
    """Names of the weights of at least two dimensions that go to AdamW, with the reasons."""
    found = param_groups(model, **RATES, **options).routes
    return {r.names[0]: r.reason for r in found if r.algorithm == "adamw" and len(r.shape) > 1}
