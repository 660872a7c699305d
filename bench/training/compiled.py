"""A model that stays on its device for many runs: compiled once, restarted in place, without a wait in a step."""

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench import clock, optimizers
from bench.command import UsageError
from bench.models import build
from bench.optimizers import Hyper
from bench.training.run import Record, Scale, mean_loss, state_bytes
from bench.training.schedules import linear
from bench.training.sources import Batch, Source

FIRST_MARK = 10
"""The first validation comes after this part of the steps: a tenth."""
WARMUPS = 20
"""The rate rises over this part of the steps, a twentieth, then falls to zero."""
TIMED = 5
"""Passes that are timed after compiling."""


class Compiled:
    """A model of a scale with its loss, and data.

    Runs of one scale, seed and source start from the same weights and see the same batches. Nothing of a run is left
    for the next one.

    Attributes:
        model: its weights are the same tensors in every run.
        pass_seconds: what forward and backward of a step take once they are compiled.
    """

    def __init__(self, scale: Scale, source: Source, device: torch.device, eager: bool) -> None:
        """Compile the model unless ``eager``.

        Raises:
            UsageError: the data holds too little for a validation.
        """
        self.scale, self.source, self.device = scale, source, device
        self.size = scale.micro_batch or scale.batch
        context = scale.config.context
        every = source.validation_batches(scale.eval_windows, self.size, context)
        # What is compiled has one shape.
        self.validation = [self._here(batch) for batch in every if len(batch[0]) == self.size]
        if not self.validation:
            raise UsageError(
                f"{source.name} holds out {len(every[0][0])} windows of {context} tokens, and one forward pass takes "
                f"{self.size}; give more data for validation, or a smaller --micro-batch"
            )
        self.model = self._drawn(0).to(device)
        self._start: tuple[int, dict[str, Tensor]] | None = None

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            return mean_loss(self.model, inputs, targets, scale.autocast)

        self.loss = loss if eager else torch.compile(loss, fullgraph=True, dynamic=False)
        self.pass_seconds = self._time_passes()

    @property
    def parameters(self) -> int:
        """The number of the model's weights, of tied ones once."""
        return sum(weight.numel() for weight in self.model.parameters())

    def run(self, hyper: Hyper, seed: int, steps: int, state_dtype: str | None = None) -> Iterator[Record]:
        """Train from the start, and yield the record after every validation; the same one, which grows.

        Validations come after a tenth of the steps and ``scale.evaluations`` times along the run. There alone the
        losses of the steps are read: the last record of a run that diverged says at which of them.

        Args:
            hyper: what the optimizer is built with. seed: of weights and batches.
            steps: of the whole run.
            state_dtype: in which this package's optimizers keep their state; None is the weights' own.
        """
        self._restart(seed)
        own = optimizers.build(self.model, hyper, None if state_dtype is None else getattr(torch, state_dtype))
        peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in own]
        record, done = Record(), 0
        for stop in self.marks(steps):
            losses, times = [], [clock.mark(self.device)]
            for step in range(done, stop):
                factor = linear(step, steps, WARMUPS)
                for optimizer, its in zip(own, peaks, strict=True):
                    for group, peak in zip(optimizer.param_groups, its, strict=True):
                        group["lr"] = peak * factor
                losses.append(self._pass(seed, step))
                times.append(clock.mark(self.device))
                before = perf_counter()
                for optimizer in own:
                    optimizer.step()
                record.host_seconds.append(perf_counter() - before)
                self.model.zero_grad()
                times.append(clock.mark(self.device))
            clock.wait(self.device)
            done = stop
            self._take_down(record, losses, times)
            if record.diverged_at is None:
                self._evaluate(record, done)
            if record.diverged_at is not None or done == steps:
                record.state_bytes = state_bytes(own)
                record.clipped = _clipped(own)
                record.peak_bytes = self._peak()
            yield record
            if record.diverged_at is not None:
                return

    def marks(self, steps: int) -> list[int]:
        """Return after how many steps a run is validated."""
        along = {steps * i // self.scale.evaluations for i in range(1, self.scale.evaluations + 1)}
        return sorted({max(1, steps // FIRST_MARK), *along} - {0})

    def _drawn(self, seed: int) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build(replace(self.scale.config, vocabulary=self.source.vocabulary))

    def _restart(self, seed: int) -> None:
        """Give the weights the values that they start from, and free all that the run before has left."""
        if self.device.type == "cuda":
            gc.collect()  # an optimizer and its graphs refer to each other
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        if self._start is None or self._start[0] != seed:
            self._start = seed, self._drawn(seed).state_dict()
        self.model.load_state_dict(self._start[1])
        self.model.zero_grad()
        torch.manual_seed(seed)

    def _here(self, batch: Batch) -> Batch:
        """Return a batch on the device; the host does not wait for the copies, which pinned whole tensors take."""
        inputs, targets = (part.contiguous() for part in batch)
        if self.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def _pass(self, seed: int, step: int) -> Tensor:
        """Add the gradient of a step's batch; return the mean loss, () on the device."""
        s = self.scale
        inputs, targets = self._here(self.source.training_batch(seed, step, s.batch, s.config.context))
        parts = []
        for x, y in zip(inputs.split(self.size), targets.split(self.size), strict=True):
            loss = self.loss(x, y) * (len(x) / len(inputs))
            loss.backward()
            parts.append(loss.detach())
        return torch.stack(parts).sum()

    def _evaluate(self, record: Record, done: int) -> None:
        # With gradients on, as in training: without them it would be another model to compile.
        value = torch.stack([self.loss(*batch).detach() for batch in self.validation]).mean().item()
        if math.isfinite(value):
            record.validation.append((done, value))
        else:
            record.diverged_at = done

    def _take_down(self, record: Record, losses: list[Tensor], times: list[Any]) -> None:
        """Add to a record what was measured since the last validation: two marks a step after the first."""
        values = torch.stack(losses).tolist()
        record.losses += values
        record.model_seconds += [clock.between(*both) for both in zip(times[0:-1:2], times[1::2], strict=True)]
        record.optimizer_seconds += [clock.between(*both) for both in zip(times[1::2], times[2::2], strict=True)]
        bad = [i for i, value in enumerate(values) if not math.isfinite(value)]
        if bad:
            record.diverged_at = len(record.losses) - len(values) + bad[0] + 1

    def _time_passes(self) -> float:
        """Return the seconds of forward and backward; the first one compiles."""
        took = []
        for _ in range(1 + TIMED):
            start = clock.mark(self.device)
            self._pass(0, 0)
            self.model.zero_grad()
            end = clock.mark(self.device)
            clock.wait(self.device)
            took.append(clock.between(start, end))
        return median(took[1:])

    def _peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def _clipped(own: list[torch.optim.Optimizer]) -> int | None:
    """Return how often this package's optimizers bounded the step of a matrix; None of others."""
    counts = [sum(optimizer.clipped().values()) for optimizer in own if hasattr(optimizer, "clipped")]
    return sum(counts) if counts else None
