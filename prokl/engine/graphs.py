"""CUDA graphs of a bucket's device work: one launch instead of a few dozen.

A graph fixes everything the host decided while it was recorded, so a bucket has one for every plan that comes up
(ordinary steps, refresh steps) and every set of hyper-parameters other than lr and weight decay. Values
that change from step to step are reached through the bucket's I/O, which is written before each replay. A graph is one
bucket's alone, so that its work can be waited for by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from prokl.backends.device import GPU_WORKSPACE_DIVISOR
from prokl.engine.bucket import Bucket, Plan, Rows


class Capture(NamedTuple):
    """The stream and the memory pool of the captures whose graphs one stream replays.

    One pool is safe in any order of replays: they follow each other on that stream, and nothing that a graph allocates
    outlives its replay. Captures have one stream, since libraries keep a workspace for each; torch's own lies on
    whichever device captured first.
    """

    pool: Any
    stream: Any

    @classmethod
    def on(cls, device: torch.device, before: Capture | None = None) -> Capture:
        """Make a pool of ``device``, and a stream where there is none from before, as torch has few of them."""
        stream = torch.cuda.Stream(device) if before is None else before.stream  # type: ignore[no-untyped-call]
        return cls(torch.cuda.graph_pool_handle(), stream)


FAILED: list[Any] = []
"""Graphs whose capture failed, a few hundred bytes each. They are kept: from torch 2.11 on the allocator of pinned
memory goes on asking them whether a stream is being captured, and would read what is freed."""


def record(run: Callable[[], Any], device: torch.device, capture: Capture) -> Callable[[], None]:
    """Return a function that repeats on ``device`` what ``run`` launches; ``run`` itself is recorded, not executed.

    ``torch.cuda.graph`` would wait for the device and empty every cache. Here that is done where the device has less
    memory left than a batch's step may take, as the allocator gives none back during a capture.
    """
    free, total = torch.cuda.mem_get_info(device)
    if free < total // GPU_WORKSPACE_DIVISOR:
        torch.cuda.empty_cache()
    with torch.cuda.device(device):
        try:
            return _captured(run, capture)
        except BaseException:
            # Up to torch 2.11 the default generator refuses every dropout until some capture ends well.
            with suppress(Exception):
                t = torch.zeros(1, device=device)  # before: an empty graph would be warned about
                _captured(t.zero_, Capture.on(device))
            raise


def _captured(run: Callable[[], Any], capture: Capture) -> Callable[[], None]:
    """Capture what ``run`` launches on the current device; stream and allocator are left as they were."""
    graph, pool, stream = torch.cuda.CUDAGraph(), capture.pool, capture.stream
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            # Other threads (a data loader that pins memory) may use CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(Exception):  # what run() raised says more than that the capture is invalid
                    graph.capture_end()
                raise
            graph.capture_end()
    except BaseException:
        with suppress(Exception):
            graph.reset()  # what a capture that did end holds
        FAILED.append(graph)
        # One that could not be ended has left the allocator in its pool, which then refuses to free its cache.
        with suppress(AttributeError, RuntimeError):  # where torch has no such thing, or there is nothing left to do
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        raise
    return graph.replay


KEPT = 12
"""Graphs kept of one bucket, whose kernels take memory, all on one stream: those of ordinary steps, of the refreshes of
weights that began in each phase of the default tau, and one more. The longest unused go first."""


class Recorded(NamedTuple):
    """A graph, and what it reads besides the bucket's own: kept as long as the graph is."""

    replay: Callable[[], None]
    rows: tuple[Rows | None, ...]


class Graphs:
    """The graphs of one optimizer.

    Attributes:
        refused: whether a recording or a replay has failed, after which there is no other.
    """

    def __init__(self) -> None:
        self.refused = False
        self.replays: dict[Bucket, dict[tuple[Any, ...], Recorded | None]] = {}
        self.captures: dict[Any, Capture] = {}  # by the stream that replays, which belongs to a device

    def keep(self, buckets: Collection[Bucket]) -> None:
        """Give up the graphs of all other buckets."""
        for bucket in self.replays.keys() - {*buckets}:
            self.replays.pop(bucket).clear()

    def execute(self, bucket: Bucket, plan: Plan) -> tuple[tuple[int, ...], list[str]]:
        """Do the device's work of a bucket's step, from a graph where one can capture it.

        A graph is recorded when its kind of step comes up for the second time. The first time it just runs, which
        compiles the kernels and creates the libraries' workspaces.

        Returns:
            The matrices that move, as far as the host knows, and warnings.
        """
        if not bucket.group["cuda_graphs"]:
            self.replays.pop(bucket, {}).clear()
        if self.refused or not capturable(bucket, plan):
            return bucket.execute(plan), []
        # The key has the hyper-parameters that a graph fixes, all but lr and weight decay; the I/O, as a graph reads
        # its tables; and the stream, whose graphs share their memory.
        device = bucket.layout.device
        stream = torch.cuda.current_stream(device)
        replays = self.replays.setdefault(bucket, {})
        key = (plan, bucket.h, bucket.group["maximize"], bucket.io, stream)
        if key not in replays:
            bucket.execute(plan)
            replays[key] = None
            if len(replays) > KEPT:
                del replays[next(iter(replays))]
            return plan.stepping, []
        recorded, failure = replays.pop(key), ""
        try:
            if recorded is None:
                if not any(own and k[-1] == stream for kept in self.replays.values() for k, own in kept.items()):
                    # torch takes no pool again that no graph uses any more
                    self.captures[stream] = Capture.on(device, self.captures.get(stream))
                # Before the capture, which cannot copy from the host.
                rows = tuple(map(bucket.rows, (plan.waiting, plan.stepping, plan.refreshing)))
                recorded = Recorded(record(lambda: bucket.execute(plan), device, self.captures[stream]), rows)
            recorded.replay()
        except Exception as error:  # whatever it is, nothing has moved
            failure = str(error)  # alone: the error's frames keep the memory of the recording
        else:
            replays[key] = recorded  # the last used is the last to go
            return plan.stepping, []
        del recorded
        self.refused = True
        self.keep(())
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
        message = f"Steps run without CUDA graphs, as recording or replaying one failed: {failure}. cuda_graphs=False "
        return bucket.execute(plan), [message + "makes no attempt."]  # an error of the step itself is raised here


def capturable(bucket: Bucket, plan: Plan) -> bool:
    """Return True if a graph can do this step: no host decision depends on values, and the I/O can be replayed."""
    return (
        bucket.group["cuda_graphs"]
        and all(plan.has_grad)
        and not plan.initialising
        and (bucket.backend.graphs_of_refreshes or not plan.refreshing)
        and bucket.io.capturable
    )
