"""One seed's run: every contender trains its own copy of the same model, interleaved step by step."""

import copy
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.models import build
from bench.training.contenders import contender_of
from bench.training.processes import ALONE, Processes
from bench.training.schedules import SCHEDULE
from bench.training.settings import Settings
from bench.training.sources import Batch, Source
from prokl.base import MatrixOptimizer
from prokl.diagnostics import eigenvalues


@dataclass
class Record:
    """What one contender did; plain numbers, so that it fits into a checkpoint."""

    losses: list[float] = field(default_factory=list)  # training loss of step 1, 2, ...
    model_seconds: list[float] = field(default_factory=list)  # forward and backward
    optimizer_seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    diverged_at: int | None = None  # the step whose loss was not finite
    state_bytes: int = 0
    spectra: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def seconds(self, steps: int) -> float:
        """Time spent in training, evaluation aside, up to and with step ``steps``."""
        return sum(self.model_seconds[:steps]) + sum(self.optimizer_seconds[:steps])

    @property
    def final_loss(self) -> float:
        """The latest validation loss; nan for a contender that diverged or was never evaluated."""
        return self.validation[-1][1] if self.validation and self.diverged_at is None else math.nan


class Lane:
    """One contender in training."""

    def __init__(self, key: str, model: nn.Module, settings: Settings, processes: Processes = ALONE) -> None:
        self.key = key
        self.model = model
        self.settings = settings
        self.processes = processes
        self.called = processes.wrapped(model)
        hyper = settings.hyper[key]
        state_dtype = None if settings.state_dtype is None else getattr(torch, settings.state_dtype)
        self.optimizers = contender_of(hyper.method).build(model, hyper, state_dtype)
        self.peak_lrs = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.record = Record()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of this process's part."""
        device = self.settings.device.partition(":")[0]
        with torch.autocast(device, torch.bfloat16) if self.settings.autocast else nullcontext():
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step(self, step: int, scale: float, inputs: Tensor, targets: Tensor) -> None:
        """Trains on one batch, or records that the contender diverged."""
        start = self._clock()
        self.model.zero_grad()
        value = self._backward(inputs, targets)
        if not math.isfinite(value):
            self.record.diverged_at = step
            return
        middle = self._clock()
        for optimizer, peaks in zip(self.optimizers, self.peak_lrs, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale
            optimizer.step()
        end = self._clock()
        self.record.losses.append(value)
        self.record.model_seconds.append(middle - start)
        self.record.optimizer_seconds.append(end - middle)

    def _backward(self, inputs: Tensor, targets: Tensor) -> float:
        """Leaves the gradient of the whole batch's mean loss, which it returns."""
        size = self.settings.micro_batch or len(inputs)
        parts = list(zip(inputs.split(size), targets.split(size), strict=True))
        total = torch.zeros((), device=inputs.device)
        for i, (x, y) in enumerate(parts):
            later = self.processes.count > 1 and i < len(parts) - 1
            with self.called.no_sync() if later else nullcontext():  # processes share their sum once
                loss = self.loss(self.called, x, y) * (len(x) / len(inputs))
                loss.backward()
            total += loss.detach()
        return self.processes.mean(total).item()

    def _clock(self) -> float:
        if self.settings.device.startswith("cuda"):
            torch.cuda.synchronize(self.settings.device)
        return perf_counter()

    @torch.no_grad()
    def evaluate(self, step: int, batches: list[Batch]) -> None:
        """Records the mean validation loss per token after ``step`` steps; processes share the batches out."""
        total = sum(
            self.loss(self.model, *batch).item() * batch[1].numel()
            for batch in batches[self.processes.rank :: self.processes.count]
        )
        mean = self.processes.mean(torch.tensor(total, dtype=torch.float64, device=self.settings.device)).item()
        value = mean * self.processes.count / sum(batch[1].numel() for batch in batches)
        if math.isfinite(value):
            self.record.validation.append((step, value))
        else:
            self.record.diverged_at = step

    def snapshot(self) -> Record:
        """The record, with the optimizer state's size and spectra as they are now."""
        if not self.optimizers:  # a finished run's checkpoint has them in the record already
            return self.record
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        self.record.state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for optimizer in self.optimizers:
            if isinstance(optimizer, MatrixOptimizer):
                self.record.spectra |= eigenvalues(optimizer)
        return self.record


class Run:
    """All contenders on one seed. ``state_dict`` and ``load_state_dict`` continue it bit for bit."""

    def __init__(self, settings: Settings, seed: int, source: Source, processes: Processes = ALONE) -> None:
        self.settings = settings
        self.seed = seed
        self.source = source
        self.processes = processes
        self.done = 0  # steps that every live contender has finished
        self.observed: dict[str, Any] = {}  # tensors that somebody watching collects; saved with the rest
        self.scale = SCHEDULE[settings.model.family]
        self.share = settings.batch // processes.count
        batches = source.validation_batches(settings.eval_windows, settings.micro_batch or self.share, settings.context)
        self.validation = [self._here(batch) for batch in batches]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            initial = build(settings.model).to(settings.device)
        self.lanes = [Lane(key, copy.deepcopy(initial), settings, processes) for key in settings.optimizers]

    def _here(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.settings.device), targets.to(self.settings.device)

    @property
    def live(self) -> list[Lane]:
        """The contenders that have not diverged."""
        return [lane for lane in self.lanes if lane.record.diverged_at is None]

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.done >= self.settings.steps or not self.live

    def advance(self) -> None:
        """One step of every live contender, on one batch; evaluates where the plan says so."""
        s = self.settings
        if self.done == 0:
            self._evaluate()
        inputs, targets = self._here(
            self.source.training_batch(
                self.seed, self.done, self.share, s.context, self.processes.rank, self.processes.count
            )
        )
        scale = self.scale(self.done, s.steps)
        # The order rotates, so that nobody always finds the caches as the same neighbour left them.
        shift = self.done % len(self.lanes)
        for lane in self.lanes[shift:] + self.lanes[:shift]:
            if lane.record.diverged_at is None:
                lane.step(self.done + 1, scale, inputs, targets)
        self.done += 1
        if self.done % s.eval_every == 0 or self.done == s.steps:
            self._evaluate()

    def _evaluate(self) -> None:
        for lane in self.live:
            lane.evaluate(self.done, self.validation)

    def records(self) -> dict[str, Record]:
        """What each contender has done so far, by key."""
        return {lane.key: lane.snapshot() for lane in self.lanes}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; of a finished run the optimizer state is left out."""
        return {
            "done": self.done,
            "finished": self.finished,
            "observed": self.observed,
            "records": {key: asdict(record) for key, record in self.records().items()},
            "models": {lane.key: lane.model.state_dict() for lane in self.lanes},
            "optimizers": {
                lane.key: None if self.finished else [o.state_dict() for o in lane.optimizers] for lane in self.lanes
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state that ``state_dict`` gave under the same settings."""
        self.done = state["done"]
        self.observed = state["observed"]
        for lane in self.lanes:
            lane.record = Record(**state["records"][lane.key])
            lane.model.load_state_dict(state["models"][lane.key])
            saved = state["optimizers"][lane.key]
            if saved is None:
                lane.optimizers = []
            for optimizer, its_state in zip(lane.optimizers, saved or [], strict=True):
                optimizer.load_state_dict(its_state)
