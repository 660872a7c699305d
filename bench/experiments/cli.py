"""The command line of ``python -m bench.experiments``: every wrong argument ends in one line with the remedy."""

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.errors import UsageError
from bench.experiments.scales import AUTO, PAPER_START, SCALES, Scale
from bench.experiments.tables import VARIED
from bench.training.cli import Parser, at_least, cores, eigenvalue, positive

TRAINING = "seeds starts tune jobs device data steps batch micro_batch eval_windows checkpoint_seconds".split()
"""Options that mean nothing where nothing is trained."""


@dataclass(frozen=True)
class Offer:
    """The experiments that there are.

    Attributes:
        names: with what each gives.
        still: those that train nothing, with the scales they have.
        varying: those that vary one thing at a time, the start too.
        single: those that train once, from one start on one seed, and look more than once.
    """

    names: Mapping[str, str]
    still: Mapping[str, Sequence[str]]
    varying: Collection[str]
    single: Collection[str]


@dataclass(frozen=True)
class Options:
    """What a command is to do; attributes as its options."""

    name: str
    scales: tuple[Scale, ...]
    seeds: tuple[int, ...]
    starts: tuple[str | float, ...]
    vary: tuple[str, ...]
    tune: bool
    jobs: int
    device: str
    data: Path | None
    out: Path
    checkpoint_seconds: float


def build_parser(names: Mapping[str, str]) -> argparse.ArgumentParser:
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
    add("--seeds", nargs="+", type=at_least(0), metavar="N", help="default: 0 1 2; sweeps and spectra have the first")
    add(
        "--starts",
        nargs="+",
        type=eigenvalue,
        metavar="auto|X",
        help="of eigenvalues (default: auto 0.1; paper: 0.1); spectra and phi have one, default the first",
    )
    add("--vary", nargs="+", choices=VARIED, help=f"what sensitivity varies (default: {' '.join(VARIED)})")
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


def parse(argv: Sequence[str], offer: Offer) -> Options:
    """Reads the command line.

    Args:
        argv: the words after the command.
        offer: the experiments.

    Raises:
        UsageError: For a wrong argument or combination, in one line with the remedy.
    """
    parser = build_parser(offer.names)
    a = parser.parse_args(argv)
    trains = a.name not in offer.still
    own_scales = offer.still.get(a.name, ())
    if not trains and a.scale not in (None, *own_scales):
        raise UsageError(f"{a.name} has nothing on --scale {a.scale}; give --scale {' or '.join(own_scales)}")
    chosen = [a.scale] if a.scale else ["tiny"] if trains else own_scales
    having = [scale for name in chosen for scale in SCALES[name]]
    scales = [scale for scale in having if scale.name.startswith(a.model or "")]
    if not scales:
        have = ", ".join(scale.name for scale in having)
        where = f"--scale {' or '.join(chosen)}"
        raise UsageError(f"--model {a.model} is the beginning of no model of {where}; it has {have}")
    _check_meaning(a, parser, offer)
    if trains and len({scale.config.family for scale in scales}) > 1 and a.scale == "paper":
        raise UsageError("--scale paper has other data for each family; give --model gpt2 or llama, with its --data")
    given = {"steps": a.steps, "batch": a.batch, "micro_batch": a.micro_batch, "eval_windows": a.eval_windows}
    scales = [replace(scale, **{k: v for k, v in given.items() if v is not None}) for scale in scales]
    seeds = a.seeds or [0, 1, 2]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds names one twice: {' '.join(map(str, seeds))}; give each once")
    if trains:
        _check_shares(scales)
    device = a.device or ("cpu" if chosen == ["tiny"] else "cuda")
    of = f"--device {a.device}" if a.device else f"--scale {a.scale}"
    if trains and device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"no GPU is visible to torch for {of}; give --device cpu")
    return Options(
        name=a.name,
        scales=tuple(scales),
        seeds=tuple(seeds),
        starts=tuple(dict.fromkeys(a.starts or ((PAPER_START,) if a.scale == "paper" else (AUTO, PAPER_START)))),
        vary=tuple(a.vary or VARIED),
        tune=a.tune,
        jobs=_jobs(a.jobs, device),
        device=device,
        data=a.data,
        out=a.out,
        checkpoint_seconds=a.checkpoint_seconds,
    )


def _check_meaning(a: argparse.Namespace, parser: argparse.ArgumentParser, offer: Offer) -> None:
    """Refuses options that the experiment would ignore."""
    given = [name for name in TRAINING if getattr(a, name) != parser.get_default(name)]
    if a.name in offer.still and given:
        options = " ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{a.name} trains nothing; leave {options} out")
    if a.starts and a.name in offer.varying:
        raise UsageError(f"{a.name} varies the start itself; leave --starts out")
    if a.vary and a.name not in offer.varying:
        raise UsageError(f"{a.name} varies nothing; leave --vary out")
    if a.name in offer.single:
        if len(a.starts or ()) > 1 or len(a.seeds or ()) > 1:
            raise UsageError(f"{a.name} trains once; give one of --starts and one of --seeds")
        if a.steps == 1:
            raise UsageError(f"--steps 1: {a.name} looks at several steps; give at least 2")


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
