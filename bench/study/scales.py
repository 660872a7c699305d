"""The models of the experiments, with their ranks and run lengths."""

from pathlib import Path

from bench import presets
from bench.command import UsageError
from bench.models import CONFIGS, byte_gpt
from bench.training.run import Scale
from bench.training.sources import Source, open_source


def open_data(scale: Scale, data: Path | None) -> Source:
    """Return the data of a model, whose tokens it must know: of the paper's models token shards."""
    run = presets.RUNS.get(scale.name)
    if run and data is None:
        raise UsageError(
            f"{scale.name} trains on {run.data}; give its token shards with --data (python -m bench.c4 writes C4's)"
        )
    source = open_source(data, scale.config.context, scale.config.vocabulary if run else None)
    if run and source.vocabulary != scale.config.vocabulary:
        raise UsageError(f"--data {data} is no token shards, which {scale.name} needs; give .bin files")
    return source


def _paper(name: str, run: presets.RunLength) -> Scale:
    # 10,240 windows are 10.5M tokens, modded-nanogpt's validation, and what bench.c4 holds out.
    more = {"micro_batch": 32, "autocast": True, "state_dtype": "bfloat16"}
    return Scale(name, CONFIGS[name], (32, 64, 128), run.steps, 40, 10240, run.batch, **more)


DEMO = Scale("byte-gpt", byte_gpt(4, 192, 6, 128), (32,), 400, 10, 256, batch=8)  # the model that bench.pretrain trains
TINY = {name: Scale(name, CONFIGS[name], (4, 8, 16), 400, 10, 256, batch=4) for name in ("gpt2-tiny", "llama-tiny")}
"""Minutes of a core each."""
PAPER = tuple(_paper(name, run) for name, run in presets.RUNS.items())  # the paper's own runs, days on a GPU
