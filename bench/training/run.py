"""One run: an optimizer trains a model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from bench import optimizers
from bench.models import ModelConfig, Transformer
from bench.optimizers import Hyper
from bench.training.schedules import SCHEDULE
from bench.training.sources import Batch, Source


@dataclass(frozen=True)
class Scale:
    """A model and how it is trained: beside optimizer, seed and data all that decides the numbers of a run."""

    name: str  # of the model
    config: ModelConfig  # of the model; a run has the vocabulary of its data
    ranks: tuple[int, ...]  # in the places of the paper's 32, 64 and 128
    steps: int
    evaluations: int  # along the run; there is one more at its end
    eval_windows: int
    batch: int  # sequences a step
    micro_batch: int | None = None  # sequences in one forward pass; None takes all of a step
    autocast: bool = False  # whether the model runs under bfloat16 autocast on a GPU
    state_dtype: str | None = None  # in which KL-Shampoo and Pro-KLShampoo keep their state; None is the weights' own

    @property
    def largest(self) -> int:
        """The rank of ablations; the paper's 128."""
        return max(self.ranks)


@dataclass
class Record:
    """The history of a run: plain numbers and tensors, so that it fits into a checkpoint."""

    losses: list[float] = field(default_factory=list)  # training loss of step 1, 2, ...
    model_seconds: list[float] = field(default_factory=list)  # forward and backward
    optimizer_seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    diverged_at: int | None = None  # the step whose loss was not finite
    state_bytes: int = 0
    # Fields of :class:`bench.training.compiled.Compiled` alone.
    host_seconds: list[float] = field(default_factory=list)  # that the host took for the optimizer's part of a step
    peak_bytes: int | None = None  # of the device's memory
    clipped: int | None = None  # bounded steps of all matrices together, of this package's optimizers

    def seconds(self, steps: int) -> float:
        """Return the time spent in training, evaluation aside, up to and with step ``steps``."""
        return sum(self.model_seconds[:steps]) + sum(self.optimizer_seconds[:steps])

    @property
    def final_loss(self) -> float:
        """The latest validation loss; nan for one that diverged or was never evaluated."""
        return self.validation[-1][1] if self.validation and self.diverged_at is None else math.nan


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor, autocast: bool) -> Tensor:
    """Return the mean cross-entropy in nats per token; with ``autocast`` the model is in bfloat16, the loss never."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=autocast):
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def drawn(scale: Scale, source: Source, seed: int) -> nn.Module:
    """Return the model of a scale, with the vocabulary of the data, where runs of this seed start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(replace(scale.config, vocabulary=source.vocabulary))


def backward(loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor, size: int) -> Tensor:
    """Add the gradient of a batch's mean loss, ``size`` sequences at a time; return the loss, ()."""
    total = torch.zeros((), device=inputs.device)
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        part = loss(x, y) * (len(x) / len(inputs))
        part.backward()
        total += part.detach()
    return total


def set_rates(optimizers: Sequence[Optimizer], peaks: Sequence[Sequence[float]], factor: float) -> None:
    """Give every group of the optimizers its peak rate times a factor."""
    for optimizer, own in zip(optimizers, peaks, strict=True):
        for group, peak in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = peak * factor


def state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """Return the bytes of all tensors of optimizers' state."""
    leaves = tree_leaves([dict(optimizer.state) for optimizer in optimizers])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


class Run:
    """One optimizer's training of a model. ``state_dict`` and ``load_state_dict`` continue it bit for bit.

    Runs of one scale, seed and source start from the same weights and see the same batches.
    """

    def __init__(self, scale: Scale, hyper: Hyper, seed: int, source: Source, device: str = "cpu") -> None:
        self.scale, self.name, self.seed, self.source = scale, hyper.method, seed, source
        self.device = torch.device(device)
        self.done = 0  # steps
        self.schedule = SCHEDULE[scale.config.family]
        self.size = scale.micro_batch or scale.batch
        batches = source.validation_batches(scale.eval_windows, self.size, scale.config.context)
        self.validation = [self._here(batch) for batch in batches]
        self.model = drawn(scale, source, seed).to(device)
        state_dtype = None if scale.state_dtype is None else getattr(torch, scale.state_dtype)
        self.optimizers = optimizers.build(self.model, hyper, state_dtype)
        self.peak_lrs = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.record = Record()

    def _here(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.device), targets.to(self.device)

    @property
    def finished(self) -> bool:
        """True if nothing is left to train."""
        return self.done >= self.scale.steps or self.record.diverged_at is not None

    def advance(self) -> None:
        """Train on one batch; evaluate where the plan says so."""
        s = self.scale
        if self.done == 0:
            self.evaluate()
        batch = self._here(self.source.training_batch(self.seed, self.done, s.batch, s.config.context))
        self.step(self.schedule(self.done, s.steps), *batch)
        self.done += 1
        if self.record.diverged_at is None and (self.done % max(1, s.steps // s.evaluations) == 0 or self.finished):
            self.evaluate()

    def step(self, factor: float, inputs: Tensor, targets: Tensor) -> None:
        """Train on one batch with the learning rates times a factor, or record divergence."""
        start = self._clock()
        self.model.zero_grad()
        value = backward(self.loss, inputs, targets, self.size).item()
        if not math.isfinite(value):
            self.record.diverged_at = self.done + 1
            return
        middle = self._clock()
        set_rates(self.optimizers, self.peak_lrs, factor)
        for optimizer in self.optimizers:
            optimizer.step()
        end = self._clock()
        self.record.losses.append(value)
        self.record.model_seconds.append(middle - start)
        self.record.optimizer_seconds.append(end - middle)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return :func:`mean_loss`."""
        return mean_loss(self.model, inputs, targets, self.scale.autocast and self.device.type == "cuda")

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    @torch.no_grad()
    def evaluate(self) -> None:
        """Record the mean validation loss per token, and the size of the optimizers' state."""
        total = sum(self.loss(*batch).item() * batch[1].numel() for batch in self.validation)
        value = total / sum(batch[1].numel() for batch in self.validation)
        if math.isfinite(value):
            self.record.validation.append((self.done, value))
        else:
            self.record.diverged_at = self.done
        self.record.state_bytes = state_bytes(self.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        record, model = asdict(self.record), self.model.state_dict()
        return {"done": self.done, "record": record, "model": model, "optimizers": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that ``state_dict`` gave under the same settings."""
        self.done, self.record = state["done"], Record(**state["record"])
        self.model.load_state_dict(state["model"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
