"""The command line of ``python -m bench.experiments``: every wrong argument ends in one line with the remedy."""

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.errors import UsageError
from bench.experiments.scales import AUTO, PAPER_START, SCALES, Scale
from bench.training.cli import Parser, at_least, cores, eigenvalue, positive

VARYING = ("sensitivity",)  # experiments that have starts of their own


@dataclass(frozen=True)
class Options:
    """What a command is to do; attributes as its options."""

    name: str
    scales: tuple[Scale, ...]
    seeds: tuple[int, ...]
    starts: tuple[str | float, ...]
    tune: bool
    jobs: int
    device: str
    data: Path | None
    out: Path
    checkpoint_seconds: float


def build_parser(names: dict[str, str]) -> argparse.ArgumentParser:
    """All options; ``names`` has every experiment with what it gives."""
    parser = Parser(
        prog="python -m bench.experiments",
        description="The paper's tables and figures. What was trained is kept in OUT/runs and not trained again, "
        "except by main, which compares times: a seed's contenders train together again where one of them is new.",
        epilog="Ctrl-C keeps what was done; the same command goes on. NAME is "
        + "; ".join(f"{name}: {what}" for name, what in names.items())
        + ".",
    )
    add = parser.add_argument
    add("name", choices=names, metavar="NAME", help=", ".join(names))
    add(
        "--scale",
        choices=SCALES,
        help="tiny: two cores; small: a GPU; paper: GPUs, days (default: tiny; where nothing trains, all there are)",
    )
    add("--model", metavar="NAME", help="only models whose name begins so: gpt2, llama, gpt2-350m (default: all)")
    add("--seeds", nargs="+", type=at_least(0), default=[0, 1, 2], metavar="N", help="default: 0 1 2; sweeps have one")
    add("--starts", nargs="+", type=eigenvalue, metavar="auto|X", help="of eigenvalues (default: auto 0.1; paper: 0.1)")
    add("--tune", action="store_true", help="at scale paper, sweep again instead of taking the paper's values")
    add("--jobs", type=at_least(1), metavar="N", help="runs at a time, each on one thread (default: the cores; GPU: 1)")
    add("--device", choices=("cpu", "cuda"), help="default: cpu at scale tiny, otherwise cuda")
    add("--data", type=Path, metavar="PATH", help="text or token shards (default: Python's standard library, as bytes)")
    add("--out", type=Path, default=Path("runs/experiments"), metavar="DIR", help="results (default: runs/experiments)")
    add("--steps", type=at_least(1), metavar="N", help="of every run, in place of the scale's")
    add("--batch", type=at_least(1), metavar="N", help="sequences a step, in place of the scale's")
    add("--micro-batch", type=at_least(1), metavar="N", help="sequences in one forward pass on one device")
    add("--eval-windows", type=at_least(1), metavar="N", help="validation contexts, in place of the scale's")
    add("--checkpoint-seconds", type=positive, default=60.0, metavar="S", help="between checkpoints (default: 60)")
    return parser


def parse(argv: Sequence[str], names: dict[str, str], still: Mapping[str, Sequence[str]]) -> Options:
    """Reads the command line.

    Args:
        argv: the words after the command.
        names: every experiment with what it gives.
        still: those that train nothing, so that neither data nor devices matter to them, with the scales they have.

    Raises:
        UsageError: For a wrong argument or combination, in one line with the remedy.
    """
    a = build_parser(names).parse_args(argv)
    trains = a.name not in still
    if not trains and a.scale not in (None, *still[a.name]):
        raise UsageError(f"{a.name} has nothing on --scale {a.scale}; give --scale {' or '.join(still[a.name])}")
    chosen = [a.scale] if a.scale else ["tiny"] if trains else still[a.name]
    having = [scale for name in chosen for scale in SCALES[name]]
    scales = [scale for scale in having if scale.name.startswith(a.model or "")]
    if not scales:
        have = ", ".join(scale.name for scale in having)
        where = f"--scale {' or '.join(chosen)}"
        raise UsageError(f"--model {a.model} is the beginning of no model of {where}; it has {have}")
    if a.starts and a.name in VARYING:
        raise UsageError(f"{a.name} varies the start itself; leave --starts out")
    if trains and len({scale.config.family for scale in scales}) > 1 and a.scale == "paper":
        raise UsageError("--scale paper has other data for each family; give --model gpt2 or llama, with its --data")
    given = {"steps": a.steps, "batch": a.batch, "micro_batch": a.micro_batch, "eval_windows": a.eval_windows}
    scales = [replace(scale, **{k: v for k, v in given.items() if v is not None}) for scale in scales]
    if len(set(a.seeds)) < len(a.seeds):
        raise UsageError(f"--seeds names one twice: {' '.join(map(str, a.seeds))}; give each once")
    if trains:
        _check_shares(scales)
    device = a.device or ("cpu" if chosen == ["tiny"] else "cuda")
    if trains and device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"no GPU is visible to torch for --scale {a.scale}; give --device cpu, or use --scale tiny")
    return Options(
        name=a.name,
        scales=tuple(scales),
        seeds=tuple(a.seeds),
        starts=tuple(a.starts or ((PAPER_START,) if a.scale == "paper" else (AUTO, PAPER_START))),
        tune=a.tune,
        jobs=_jobs(a.jobs, device),
        device=device,
        data=a.data,
        out=a.out,
        checkpoint_seconds=a.checkpoint_seconds,
    )


def _processes() -> int:
    """How many torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_shares(scales: Collection[Scale]) -> None:
    """Refuses a batch that the processes cannot share evenly, for some of its sequences would not be trained on."""
    count = _processes()
    for scale in scales:
        if scale.batch % count:
            below, above = scale.batch // count * count, (scale.batch // count + 1) * count
            choice = f"--batch {below} or {above}" if below else f"--batch {above}"
            raise UsageError(
                f"a batch of {scale.batch} sequences, as {scale.name} has, is no multiple of WORLD_SIZE = {count}, the "
                f"processes that share it; give {choice}, or start another number of processes"
            )


def _jobs(given: int | None, device: str) -> int:
    processes = _processes()
    alone = device == "cuda" or processes > 1
    if alone and (given or 1) > 1:
        where = "under torchrun" if processes > 1 else "on a GPU"
        raise UsageError(f"--jobs {given}: runs {where} go one after another; leave --jobs out")
    return given or (1 if alone else cores())
