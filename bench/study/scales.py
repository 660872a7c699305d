"""The models of the experiments, with their ranks and run lengths."""

from dataclasses import dataclass, replace
from pathlib import Path

from bench import presets
from bench.command import UsageError
from bench.models import CONFIGS, ModelConfig, byte_gpt
from bench.optimizers import Hyper
from bench.training.run import Settings
from bench.training.sources import Source, open_source


@dataclass(frozen=True)
class Scale:
    """One model's experiment."""

    name: str  # of the model
    config: ModelConfig  # of the model; data of another vocabulary overrule its own where it is a scaled-down one
    ranks: tuple[int, ...]  # in the places of the paper's 32, 64 and 128
    steps: int
    evaluations: int
    eval_windows: int
    batch: int
    micro_batch: int | None = None  # sequences in one forward pass at most; None is all of a step's
    # whether a seed's trainees take turns step by step, which makes their times comparable on a machine that
    # does other things too; otherwise one after another, so that one model at a time is in memory
    together: bool = True
    autocast: bool = False
    state_dtype: str | None = None
    threads: int = 1  # of a process that trains

    @property
    def largest(self) -> int:
        """The rank of ablations; the paper's 128."""
        return max(self.ranks)

    @property
    def is_paper(self) -> bool:
        """True if this is a model of the paper, whose data are token shards."""
        return self.name in presets.RUNS

    def open(self, data: Path | None) -> Source:
        """Return the data, whose tokens the model must know.

        Raises:
            UsageError: there is none, or it is of another kind.
        """
        if self.is_paper and data is None:
            raise UsageError(
                f"{self.name} trains on {presets.RUNS[self.name].data}; give its token shards with --data "
                "(python -m bench.c4 writes C4's)"
            )
        source = open_source(data, self.config.context, self.config.vocabulary if self.is_paper else None)
        if self.is_paper and source.vocabulary != self.config.vocabulary:
            raise UsageError(f"--data {data} is no token shards, which {self.name} needs; give .bin files")
        return source

    def settings(self, hyper: dict[str, Hyper], vocabulary: int, device: str, curve: bool) -> Settings:
        """Return a run of these, evaluated along the way or only at the end."""
        return Settings(
            hyper=hyper,
            model=replace(self.config, vocabulary=vocabulary),
            steps=self.steps,
            eval_every=max(1, self.steps // self.evaluations) if curve else self.steps,
            eval_windows=self.eval_windows,
            batch=self.batch,
            threads=self.threads,
            micro_batch=self.micro_batch,
            device=device,
            autocast=self.autocast and device != "cpu",
            state_dtype=self.state_dtype,
        )


def _paper(name: str, run: presets.RunLength) -> Scale:
    # 10,240 windows are 10.5M tokens, modded-nanogpt's validation, and what bench.c4 holds out.
    more = {"micro_batch": 32, "together": False, "autocast": True, "state_dtype": "bfloat16"}
    return Scale(name, CONFIGS[name], (32, 64, 128), run.steps, 40, 10240, run.batch, **more)


DEMO = Scale("byte-gpt", byte_gpt(4, 192, 6, 128), (32,), 400, 10, 256, batch=8)
"""What bench.pretrain trains."""
TINY = {name: Scale(name, CONFIGS[name], (4, 8, 16), 400, 10, 256, batch=4) for name in ("gpt2-tiny", "llama-tiny")}
"""Minutes of a core each."""
PAPER = tuple(_paper(name, run) for name, run in presets.RUNS.items())
"""The paper's own runs, days on several GPUs."""
