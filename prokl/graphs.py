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
        # Other threads (a data loader that pins memory) may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    return graph.replay


def obstacle(bucket: Bucket, ops: Primitives | None) -> str | None:
    """Why the step of a bucket can never be captured; None when it can."""
    if ops is None or not ops.linked:
        return 'only backend="triton" can be captured'
    if may_branch(bucket.skipped):
        return f"graphs need a CUDA device, not {bucket.skipped.device}"
    return None


class Graphs:
    """The graphs of one optimizer."""

    def __init__(self) -> None:
        self.replays: dict[Hashable, Callable[[], None] | None] = {}
        self.pools: dict[torch.device, Any] = {}

    def run(self, work: Sequence[Work]) -> list[Sequence[int]] | None:
        """Replay the step of all buckets, recorded when it comes up for the second time.

        The first time it just runs, which compiles the kernels and creates the libraries' workspaces.

        Returns:
            The matrices of every bucket that move, as far as the host knows; None: nothing was done.
        """
        steady = all(plan.steady and not bucket.copied() and not obstacle(bucket, ops) for bucket, plan, ops in work)
        if not steady or not work:
            return None
        for device in dict.fromkeys(bucket.made_for[1] for bucket, _, _ in work):
            own = [entry for entry in work if entry[0].made_for[1] == device]
            key = (device, tuple((bucket, plan, _fixed(bucket)) for bucket, plan, _ in own))
            if key not in self.replays:
                self.replays[key] = None
                _run(own)
                continue
            replay = self.replays[key]
            if replay is None:
                replay = self.replays[key] = record(partial(_run, own), device, self._pool(device))
            replay()
        return [plan.stepping for _, plan, _ in work]

    def _pool(self, device: torch.device) -> Any:
        # One pool: replays follow each other on one stream, and nothing in it outlives a replay.
        if device not in self.pools:
            self.pools[device] = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        return self.pools[device]


def _run(work: Sequence[Work]) -> None:
    for bucket, plan, ops in work:
        bucket.run(plan, ops)


def _fixed(bucket: Bucket) -> Any:
    """The hyper-parameters that a graph fixes: all but lr and weight decay."""
    h = bucket.method.hyper(bucket.group)
    return replace(h, lr=0.0, weight_decay=0.0), bucket.group["maximize"]
