"""One seed's run: every optimizer trains its own copy of the same model, interleaved step by step."""

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import optimizers
from bench.models import ModelConfig, build
from bench.optimizers import Hyper
from bench.training.processes import ALONE, Processes
from bench.training.schedules import SCHEDULE
from bench.training.sources import Batch, Source


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run; a checkpoint is continued only when all of it is equal."""

    hyper: dict[str, Hyper]  # by key, which names an optimizer among those of the run
    model: ModelConfig
    steps: int
    eval_every: int
    eval_windows: int
    batch: int  # sequences a step, of all processes together
    threads: int
    # sequences that a process takes through the model at once; None takes all of its share
    micro_batch: int | None = None
    device: str = "cpu"  # torch's name of the device that trains
    autocast: bool = False  # whether the model runs under bfloat16 autocast
    state_dtype: str | None = None  # in which KL-Shampoo and Pro-KLShampoo keep their state; None is the weights' own

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.model.context

    def plan(self) -> dict[str, Any]:
        """Return what the optimizers of the run share, of types that a checkpoint and a CSV file can hold."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["hyper"], own["model"]
        return asdict(self.model) | own


@dataclass
class Record:
    """The history of one trainee: plain numbers and tensors, so that it fits into a checkpoint."""

    losses: list[float] = field(default_factory=list)  # training loss of step 1, 2, ...
    model_seconds: list[float] = field(default_factory=list)  # forward and backward
    optimizer_seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    diverged_at: int | None = None  # the step whose loss was not finite
    state_bytes: int = 0

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Record":
        """Return the record that was saved, of a version too that kept more."""
        return cls(**{name: saved[name] for name in saved.keys() & {field.name for field in fields(cls)}})

    def seconds(self, steps: int) -> float:
        """Return the time spent in training, evaluation aside, up to and with step ``steps``."""
        return sum(self.model_seconds[:steps]) + sum(self.optimizer_seconds[:steps])

    @property
    def final_loss(self) -> float:
        """The latest validation loss; nan for one that diverged or was never evaluated."""
        return self.validation[-1][1] if self.validation and self.diverged_at is None else math.nan


class Trainee:
    """One optimizer with its copy of the model."""

    def __init__(self, key: str, model: nn.Module, settings: Settings, processes: Processes) -> None:
        self.key = key
        self.model = model
        self.settings = settings
        self.processes = processes
        self.called = processes.wrapped(model)
        state_dtype = None if settings.state_dtype is None else getattr(torch, settings.state_dtype)
        self.optimizers = optimizers.build(model, settings.hyper[key], state_dtype)
        self.peak_lrs = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.record = Record()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token of this process's part."""
        device = self.settings.device.partition(":")[0]
        with torch.autocast(device, torch.bfloat16) if self.settings.autocast else nullcontext():
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step(self, step: int, scale: float, inputs: Tensor, targets: Tensor) -> None:
        """Train on one batch, or record divergence."""
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
        """Compute the gradient of the whole batch's mean loss, and return the loss."""
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
        """Record the mean validation loss per token after ``step`` steps; processes share the batches out."""
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
        """Return the record, with the optimizer state's size as it is now."""
        tensors = [t for optimizer in self.optimizers for t in _tensors(list(optimizer.state.values()))]
        self.record.state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return self.record


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state, in which some packages nest lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


class Run:
    """All trainees on one seed. ``state_dict`` and ``load_state_dict`` continue it bit for bit."""

    def __init__(self, settings: Settings, seed: int, source: Source, processes: Processes = ALONE) -> None:
        self.settings = settings
        self.seed = seed
        self.source = source
        self.processes = processes
        self.done = 0  # steps that every live trainee has finished
        self.scale = SCHEDULE[settings.model.family]
        self.share = settings.batch // processes.count
        batches = source.validation_batches(settings.eval_windows, settings.micro_batch or self.share, settings.context)
        self.validation = [self._here(batch) for batch in batches]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            initial = build(settings.model).to(settings.device)
        self.trainees = [Trainee(key, copy.deepcopy(initial), settings, processes) for key in settings.hyper]

    def _here(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.settings.device), targets.to(self.settings.device)

    @property
    def live(self) -> list[Trainee]:
        """The trainees that have not diverged."""
        return [trainee for trainee in self.trainees if trainee.record.diverged_at is None]

    @property
    def finished(self) -> bool:
        """True if nothing is left to train."""
        return self.done >= self.settings.steps or not self.live

    def advance(self) -> None:
        """Train every live trainee on one batch; evaluate where the plan says so."""
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
        shift = self.done % len(self.trainees)
        for trainee in self.trainees[shift:] + self.trainees[:shift]:
            if trainee.record.diverged_at is None:
                trainee.step(self.done + 1, scale, inputs, targets)
        self.done += 1
        if self.done % s.eval_every == 0 or self.done == s.steps:
            self._evaluate()

    def _evaluate(self) -> None:
        for trainee in self.live:
            trainee.evaluate(self.done, self.validation)

    def records(self) -> dict[str, Record]:
        """Return what each trainee has done so far, by key."""
        return {trainee.key: trainee.snapshot() for trainee in self.trainees}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "done": self.done,
            "records": {key: asdict(record) for key, record in self.records().items()},
            "models": {trainee.key: trainee.model.state_dict() for trainee in self.trainees},
            "optimizers": {trainee.key: [o.state_dict() for o in trainee.optimizers] for trainee in self.trainees},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that ``state_dict`` gave under the same settings."""
        self.done = state["done"]
        for trainee in self.trainees:
            trainee.record = Record.of(state["records"][trainee.key])
            trainee.model.load_state_dict(state["models"][trainee.key])
            for optimizer, its_state in zip(trainee.optimizers, state["optimizers"][trainee.key], strict=True):
                optimizer.load_state_dict(its_state)
