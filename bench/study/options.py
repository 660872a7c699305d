"""What the commands that train take; every wrong value ends in one line with the remedy."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from bench import rows
from bench.command import UsageError, at_least, cores, some
from bench.study.scales import PAPER, Scale


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of what trains methods beside each other."""

    seeds: tuple[int, ...] = (0,)  # One run for each
    data: Path | None = None  # Text or token shards; if not given, Python's standard library, as bytes
    out: Path  # Results folder
    steps: int | None = None  # Of every run; what is given from here on stands in place of the model's
    batch: int | None = None  # Sequences a step
    evaluations: int | None = None  # Of the validation loss, along a run
    eval_windows: int | None = None  # Validation contexts
    micro_batch: int | None = None  # Sequences in one forward pass on one device

    def __post_init__(self) -> None:
        at_least(0, seeds=self.seeds)
        at_least(1, **self.given)
        some(seeds=self.seeds)

    @property
    def given(self) -> dict[str, int]:
        """Values in place of the model's own."""
        names = ("steps", "batch", "evaluations", "eval_windows", "micro_batch")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Options(Training):
    """Make one of the paper's tables, with its models and the hyper-parameters that it selected.

    What was trained is kept in OUT/runs and not trained again. Ctrl-C keeps what was done; the same command goes on.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    out: Path = Path("runs/experiments")  # Results folder
    model: str = ""  # Only models whose name begins so: gpt2, llama, gpt2-350m
    device: Literal["cpu", "cuda"] = "cuda"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({scale.config.family for scale in self.scales}) > 1:
            raise UsageError("the paper has other data for each family; give --model gpt2 or llama, with its --data")
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        for scale in self.scales:
            if scale.batch % processes:  # some of its sequences would not be trained on
                raise UsageError(
                    f"a batch of {scale.batch} sequences, as {scale.name} has, is no multiple of WORLD_SIZE = "
                    f"{processes}, the processes that share it; give another --batch"
                )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("no GPU is visible to torch; give --device cpu")

    @cached_property
    def scales(self) -> tuple[Scale, ...]:
        """The models, with what was given in place of their own.

        Raises:
            UsageError: no model's name begins as was asked.
        """
        if chosen := [scale for scale in PAPER if scale.name.startswith(self.model)]:
            return tuple(replace(scale, **self.given) for scale in chosen)
        names = ", ".join(scale.name for scale in PAPER)
        raise UsageError(f"--model {self.model} is the beginning of no model; there are {names}")


@dataclass(frozen=True, kw_only=True)
class WorkedOff:
    """Options of what goes on with the recorded rows."""

    out: Path = rows.RESULTS  # Folder of the results files
    folder: Path = Path("runs/study")  # Of checkpoints and of what has ended
    jobs: int = cores()  # Runs at a time, each on one thread

    def __post_init__(self) -> None:
        at_least(1, jobs=self.jobs)
