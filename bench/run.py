"""One seed's run: every contender trains its own copy of the same model, interleaved step by step."""

import copy
import math
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import corpus as text
from bench.contenders import contender_of
from bench.model import GPT
from bench.settings import Settings
from bench.spectra import eigenvalues, state_bytes


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


def learning_rate_scale(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then linear decay that would reach 0 at step ``steps``."""
    warmup = max(1, steps // 10)
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


class Lane:
    """One contender in training."""

    def __init__(self, key: str, model: nn.Module, settings: Settings) -> None:
        self.key = key
        self.model = model
        self.optimizers = contender_of(key).build(model, settings.lr[key], settings)
        self.peak_lrs = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.record = Record()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def step(self, step: int, scale: float, inputs: Tensor, targets: Tensor) -> None:
        """Trains on one batch, or records that the contender diverged."""
        start = perf_counter()
        loss = self.loss(inputs, targets)
        value = loss.item()
        if not math.isfinite(value):
            self.record.diverged_at = step
            return
        self.model.zero_grad()
        loss.backward()
        middle = perf_counter()
        for optimizer, peaks in zip(self.optimizers, self.peak_lrs, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale
            optimizer.step()
        end = perf_counter()
        self.record.losses.append(value)
        self.record.model_seconds.append(middle - start)
        self.record.optimizer_seconds.append(end - middle)

    @torch.no_grad()
    def evaluate(self, step: int, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Records the mean validation loss per byte after ``step`` steps."""
        total = sum(self.loss(*batch).item() * batch[1].numel() for batch in batches)
        value = total / sum(batch[1].numel() for batch in batches)
        if math.isfinite(value):
            self.record.validation.append((step, value))
        else:
            self.record.diverged_at = step

    def snapshot(self) -> Record:
        """The record, with the optimizer state's size and spectra as they are now."""
        if not self.optimizers:  # a finished run's checkpoint has them in the record already
            return self.record
        self.record.state_bytes = state_bytes(self.optimizers)
        self.record.spectra = eigenvalues(self.model, self.optimizers)
        return self.record


class Run:
    """All contenders on one seed. ``state_dict`` and ``load_state_dict`` continue it bit for bit."""

    def __init__(self, settings: Settings, seed: int, corpus: text.Corpus) -> None:
        self.settings = settings
        self.seed = seed
        self.corpus = corpus
        self.done = 0  # steps that every live contender has finished
        self.validation = text.validation_batches(corpus, settings.eval_windows, settings.batch, settings.context)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            initial = GPT(settings.layers, settings.width, settings.heads, settings.context)
        self.lanes = [Lane(key, copy.deepcopy(initial), settings) for key in settings.optimizers]

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
        inputs, targets = text.training_batch(self.corpus, self.seed, self.done, s.batch, s.context)
        scale = learning_rate_scale(self.done, s.steps)
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
            "records": {key: asdict(record) for key, record in self.records().items()},
            "models": {lane.key: lane.model.state_dict() for lane in self.lanes},
            "optimizers": {
                lane.key: None if self.finished else [o.state_dict() for o in lane.optimizers] for lane in self.lanes
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state that ``state_dict`` gave under the same settings."""
        self.done = state["done"]
        for lane in self.lanes:
            lane.record = Record(**state["records"][lane.key])
            lane.model.load_state_dict(state["models"][lane.key])
            saved = state["optimizers"][lane.key]
            if saved is None:
                lane.optimizers = []
            for optimizer, its_state in zip(lane.optimizers, saved or [], strict=True):
                optimizer.load_state_dict(its_state)
