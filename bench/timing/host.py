"""Times the host's part of a step, launches and replays left out.

A step that is replayed from CUDA graphs is, on the host, checks of what may have changed since the last one, tables of
addresses that are written anew where gradients lie elsewhere, one replay a batch, and clocks. Here the tables lie on a
CPU, where writing one is a copy in place of a launch, and nothing is replayed. Figures are of the process's own time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from bench import rows
from prokl import KLShampoo, ProKLShampoo
from prokl.backends.select import _triton_backend
from prokl.engine.bucket import Bucket
from prokl.engine.engine import Engine
from prokl.engine.graphs import Capture

LAYERS = 24
LAYER = [(32, 32)] * 4 + [(96, 32)] * 2 + [(32, 96)]
"""A layer of LLaMA; what lies in a weight does not matter to the host."""
OPTIMIZERS: dict[str, Callable[..., Any]] = {"pro-klshampoo": ProKLShampoo, "kl-shampoo": KLShampoo}
CASES = {
    "gradients where they were": (False, False),
    "gradients elsewhere": (False, True),
    "a group each, gradients elsewhere": (True, True),
}
"""Whether each weight has a group and an lr of its own, and whether every step's gradients have addresses of their own,
as after ``zero_grad``."""
WARM = 25
"""Steps before: weights begin, and both kinds of step are recorded."""


def _execute(bucket: Bucket, plan: Any) -> tuple[int, ...]:
    bucket.schedule.begin(plan.initialising)
    return plan.stepping


def step_ms(optimizer: str, apart: bool, elsewhere: bool, steps: int) -> list[float]:
    """Return what every step took."""
    with ExitStack() as stack:
        gpu = staticmethod(lambda *_: _triton_backend(True, False, True, True))
        stack.enter_context(patch.object(Engine, "select", gpu))
        stack.enter_context(patch("prokl.engine.graphs.record", lambda *_: lambda: None))
        stack.enter_context(patch.object(Capture, "on", lambda device: None))
        stack.enter_context(patch.object(Bucket, "execute", _execute))
        named = [(f"{i}", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(LAYER * LAYERS)]
        each = [{"params": [own], "lr": 0.02 / (1 + i)} for i, own in enumerate(named)]
        made, found = OPTIMIZERS[optimizer](each if apart else named), []
        gradients = [[torch.zeros_like(p) for _, p in named] for _ in range(2)]
        for t in range(WARM + steps):
            for (_, p), g in zip(named, gradients[t % 2 if elsewhere else 0], strict=True):
                p.grad = g
            start = time.process_time()
            made.step()
            found.append(1e3 * (time.process_time() - start))
    return found[WARM:]


def measure(steps: int) -> Iterator[rows.Row]:
    """Yield a row of every optimizer and case."""
    for optimizer in OPTIMIZERS:
        for case, (apart, elsewhere) in CASES.items():
            who = {"model": f"{LAYERS} layers", "case": case, "optimizer": optimizer, "backend": "triton"}
            found = rows.quartiles(step_ms(optimizer, apart, elsewhere, steps))
            yield who | {"metric": "host's part of a step", "unit": "ms", "rounds": steps} | found
