"""A model that stays on its device for many runs: compiled once, restarted in place, without a wait in a step."""

import gc
import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from bench import clock, optimizers
from bench.command import UsageError
from bench.optimizers import Hyper
from bench.training.run import Record, Scale, backward, drawn, mean_loss, set_rates, state_bytes
from bench.training.schedules import linear
from bench.training.sources import Batch, Source

FIRST_MARK = 10  # the first validation comes after this part of the steps, a tenth
WARMUPS = 20  # the rate rises over this part of the steps, a twentieth, then falls to zero
TIMED = 5  # passes that are timed after compiling


class Compiled:
    """A model of a scale with its loss, and data; its weights are the same tensors in every run.

    Runs of one scale, seed and source start from the same weights and see the same batches. Nothing of a run is left
    for the next one.
    """

    def __init__(self, scale: Scale, source: Source, device: torch.device, eager: bool) -> None:
        """Compile the model unless ``eager``; raise UsageError where the data holds too little for a validation."""
        self.scale, self.source, self.device = scale, source, device
        self.size = scale.micro_batch or scale.batch
        context = scale.config.context
        every = source.validation_batches(scale.eval_windows, self.size, context)
        # The compiled loss takes one shape.
        self.validation = [self._here(batch) for batch in every if len(batch[0]) == self.size]
        if not self.validation:
            raise UsageError(
                f"{source.name} holds out {len(every[0][0])} windows of {context} tokens, and one forward pass takes "
                f"{self.size}; give more data for validation, or a smaller --micro-batch"
            )
        self.model = drawn(scale, source, 0).to(device)
        self._start: tuple[int, dict[str, Tensor]] | None = None

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            return mean_loss(self.model, inputs, targets, scale.autocast)

        self.loss = loss if eager else torch.compile(loss, fullgraph=True, dynamic=False)
        self.pass_seconds = self._time_passes()  # of forward and backward of a step, once they are compiled

    @property
    def parameters(self) -> int:
        """The number of the model's weights, of tied ones once."""
        return sum(weight.numel() for weight in self.model.parameters())

    def run(self, hyper: Hyper, seed: int, steps: int, state_dtype: str | None = None) -> Iterator[Record]:
        """Train from the start, and yield the record after every validation; the same one, which grows.

        Validations come after a tenth of the steps and ``scale.evaluations`` times along the run. There alone the
        losses of the steps are read: the last record of a run that diverged says at which of them. ``state_dtype`` is
        of this package's optimizers; None is the weights' own.
        """
        self._restart(seed)
        own = optimizers.build(self.model, hyper, None if state_dtype is None else getattr(torch, state_dtype))
        peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in own]
        record, done = Record(), 0
        for stop in self.marks(steps):
            losses, times = [], [clock.mark(self.device)]
            for step in range(done, stop):
                set_rates(own, peaks, linear(step, steps, WARMUPS))
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
            record.losses += torch.stack(losses).tolist()
            seconds = [clock.between(*both) for both in pairwise(times)]
            record.model_seconds += seconds[0::2]
            record.optimizer_seconds += seconds[1::2]
            bad = (i for i, value in enumerate(record.losses, 1) if not math.isfinite(value))
            record.diverged_at = next(bad, None)
            if record.diverged_at is None:
                # With gradients on, as in training: without them it would be another model to compile.
                value = torch.stack([self.loss(*batch).detach() for batch in self.validation]).mean().item()
                if math.isfinite(value):
                    record.validation.append((done, value))
                else:
                    record.diverged_at = done
            if record.diverged_at is not None or done == steps:
                record.state_bytes = state_bytes(own)
                counts = [sum(its.clipped().values()) for its in own if hasattr(its, "clipped")]
                record.clipped = sum(counts) if counts else None
                if self.device.type == "cuda":
                    record.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            yield record
            if record.diverged_at is not None:
                return

    def marks(self, steps: int) -> list[int]:
        """Return after how many steps a run is validated."""
        along = {steps * i // self.scale.evaluations for i in range(1, self.scale.evaluations + 1)}
        return sorted({max(1, steps // FIRST_MARK), *along} - {0})

    def _restart(self, seed: int) -> None:
        """Give the weights the values that they start from, and free all that the run before has left."""
        if self.device.type == "cuda":
            gc.collect()  # an optimizer and its graphs refer to each other
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        if self._start is None or self._start[0] != seed:
            self._start = seed, drawn(self.scale, self.source, seed).state_dict()
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
        batch = self._here(self.source.training_batch(seed, step, s.batch, s.config.context))
        return backward(self.loss, *batch, self.size)

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
