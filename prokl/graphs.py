"""CUDA graphs of the matrix part of an optimizer's step: one launch instead of a few dozen per bucket.

A graph fixes everything the host decided while it was recorded, so there is one for every set of plans that comes
up (ordinary steps, refresh steps) and of hyper-parameters other than lr and weight decay. What changes from step to
step on the device is reached through the buckets' :class:`prokl.links.Links`, which are written before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from prokl.buckets import Bucket, Plan
from prokl.ops import Primitives
from prokl.qr import may_branch

Work = tuple[Bucket, Plan, "Primitives | None"]


def record(run: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """A function that repeats on ``device`` what ``run`` launches; ``run`` itself is recorded, not executed."""
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        # The default stream of captures lies on whichever device captured first. Other threads (a data loader that
        # pins memory) may use CUDA meanwhile.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph.replay


KEPT = 32
"""Graphs that one optimizer keeps; the oldest go first. A momentum that changes at every step would need one a step."""


class Graphs:
    """The graphs of one optimizer."""

    def __init__(self) -> None:
        self.replays: dict[Hashable, Callable[[], None] | None] = {}
        self.pools: dict[torch.device, Any] = {}

    def run(self, work: Sequence[Work]) -> list[Sequence[int]]:
        """Do the step of all buckets, on every device from a graph what can be captured.

        A graph is recorded when its kind of step comes up for the second time. The first time it just runs, which
        compiles the kernels and creates the libraries' workspaces.

        Returns:
            The matrices of every bucket that move, as far as the host knows.
        """
        moved = [() if capturable(*entry) else entry[0].run(*entry[1:]) for entry in work]
        steady = [entry for entry in work if capturable(*entry)]
        for device in dict.fromkeys(bucket.made_for[1] for bucket, _, _ in steady):
            own = [entry for entry in steady if entry[0].made_for[1] == device]
            key = (device, tuple((bucket, plan, _fixed(bucket)) for bucket, plan, _ in own))
            if key not in self.replays:
                _run(own)
                self.replays[key] = None
                if len(self.replays) > KEPT:
                    del self.replays[next(iter(self.replays))]
                continue
            replay = self.replays[key]
            if replay is None:
                replay = self.replays[key] = record(partial(_run, own), device, self._pool(device))
            replay()
        return [
            plan.stepping if capturable(bucket, plan, ops) else rows
            for (bucket, plan, ops), rows in zip(work, moved, strict=True)
        ]

    def _pool(self, device: torch.device) -> Any:
        # One pool: replays follow each other on one stream, and nothing in it outlives a replay.
        if device not in self.pools:
            self.pools[device] = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        return self.pools[device]


def capturable(bucket: Bucket, plan: Plan, ops: Primitives | None) -> bool:
    """Whether a graph can do this step: a linked table, no host decision that depends on values, no weight copied."""
    return ops is not None and ops.linked and not may_branch(bucket.skipped) and plan.steady and not bucket.copied()


def _run(work: Sequence[Work]) -> None:
    for bucket, plan, ops in work:
        bucket.run(plan, ops)


def _fixed(bucket: Bucket) -> Any:
    """The hyper-parameters that a graph fixes: all but lr and weight decay."""
    h = bucket.method.hyper(bucket.group)
    return replace(h, lr=0.0, weight_decay=0.0), bucket.group["maximize"]
