"""The command line of ``python -m bench.pretrain``: every wrong argument ends in one line with the remedy."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from bench.errors import UsageError
from bench.models import byte_gpt
from bench.training.contenders import CONTENDERS, DEFAULT_OPTIMIZERS
from bench.training.settings import Hyper, Job, Settings


class Parser(argparse.ArgumentParser):
    """Raises UsageError on what it cannot take."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def at_least(low: int) -> Callable[[str], int]:
    """For whole numbers from ``low`` on."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {low}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number > 0")
    return value


def eigenvalue(text: str) -> str | float:
    """A start of the eigenvalues: a number above 0, or "auto"."""
    try:
        return text if text == "auto" else positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


def make_folder(out: Path) -> None:
    """Makes the folder for results where it is not there.

    Raises:
        UsageError: If it cannot be made or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be made a folder: {error.strerror}; choose another") from None
    if not os.access(out, os.W_OK):
        raise UsageError(f"--out {out} cannot be written to; choose another")


def _optimizer(name: str) -> str:
    if name not in CONTENDERS:
        raise argparse.ArgumentTypeError(f"unknown optimizer {name!r}; choose from {', '.join(CONTENDERS)}")
    return name


def _rates(text: str) -> tuple[str, list[float]]:
    name, _, values = text.partition("=")
    if not values:
        raise argparse.ArgumentTypeError(f"{text!r} has no learning rate; write it as in muon=0.02")
    return _optimizer(name), [positive(value) for value in values.split(",")]


def cores() -> int:
    """The cores that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_parser() -> argparse.ArgumentParser:
    """All options with their defaults."""
    parser = Parser(
        prog="python -m bench.pretrain",
        description="Train a small byte-level GPT with several optimizers on the same batches and weights.",
        epilog="Ctrl-C keeps what was done; the same command with --resume goes on bit for bit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    names = ", ".join(CONTENDERS)

    add = parser.add_argument_group("optimizers").add_argument
    add(
        "--optimizers",
        nargs="+",
        type=_optimizer,
        default=list(DEFAULT_OPTIMIZERS),
        metavar="NAME",
        help=names,
    )
    add("--lr", action="append", type=_rates, metavar="NAME=LR", help="a learning rate; repeatable")
    add("--adamw-lr", type=positive, default=CONTENDERS["adamw"].lr, metavar="LR", help=_ADAMW_LR)
    add("--rank", type=at_least(1), default=32, metavar="R", help="of Pro-KLShampoo's subspace")
    add("--alpha-kl", type=positive, default=0.01, metavar="A", help="Pro-KLShampoo's mixing weight")
    add("--init-eigenvalue", type=eigenvalue, default="auto", metavar="auto|X", help="the paper's is 0.1")
    add(
        "--sweep",
        action="append",
        type=_rates,
        metavar="NAME=LR,LR",
        help="only NAME, once per learning rate",
    )

    add = parser.add_argument_group("run").add_argument
    add("--steps", type=at_least(1), default=400, metavar="N", help="optimizer steps")
    add("--seeds", "--seed", nargs="+", type=at_least(0), default=[0], metavar="N", help="one run for each")
    add("--threads", type=at_least(1), default=cores(), metavar="N", help="CPU threads")
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="a text file or a folder, in place of Python's standard library",
    )
    add("--out", type=Path, metavar="DIR", help="results folder (default: runs/pretrain or runs/sweep-NAME)")
    add("--resume", action="store_true", default=False, help="go on from the checkpoint in --out")
    add("--overwrite", action="store_true", default=False, help="drop an unfinished or other run in --out")
    add("--eval-every", type=at_least(1), metavar="N", help="steps (default: a tenth of --steps)")
    add("--eval-windows", type=at_least(1), default=256, metavar="N", help="validation contexts")
    add("--checkpoint-seconds", type=positive, default=60.0, metavar="S", help="time between checkpoints")

    add = parser.add_argument_group("model").add_argument
    add("--layers", type=at_least(1), default=4, metavar="N", help="transformer layers")
    add("--width", type=at_least(1), default=192, metavar="N", help="of the residual stream")
    add("--heads", type=at_least(1), default=6, metavar="N", help="attention heads")
    add("--context", type=at_least(1), default=128, metavar="N", help="bytes per sequence")
    add("--batch", type=at_least(1), default=8, metavar="N", help="sequences per step")
    return parser


_ADAMW_LR = "of AdamW, and of embedding, head and norms under every optimizer"


def parse(argv: Sequence[str]) -> Job:
    """Reads the command line.

    Raises:
        UsageError: For a wrong argument or combination, in one line with the remedy.
    """
    a = build_parser().parse_args(argv)
    sweep = getattr(a, "sweep", None)
    _check_combinations(a, sweep)
    lr = _sweep_rates(*sweep[0]) if sweep else _rates_by_name(a.optimizers, a.adamw_lr, getattr(a, "lr", []))
    settings = Settings(
        hyper={
            key: Hyper(
                method=key.partition("@")[0],
                lr=rate,
                adamw_lr=a.adamw_lr,
                rank=a.rank,
                alpha_kl=a.alpha_kl,
                init_eigenvalue=a.init_eigenvalue,
            )
            for key, rate in lr.items()
        },
        model=byte_gpt(a.layers, a.width, a.heads, a.context),
        steps=a.steps,
        eval_every=getattr(a, "eval_every", max(1, a.steps // 10)),
        eval_windows=a.eval_windows,
        batch=a.batch,
        threads=a.threads,
    )
    return Job(
        settings=settings,
        seeds=tuple(a.seeds),
        data=getattr(a, "data", None),
        out=getattr(a, "out", Path("runs", f"sweep-{sweep[0][0]}" if sweep else "pretrain")),
        resume=a.resume,
        overwrite=a.overwrite,
        checkpoint_seconds=a.checkpoint_seconds,
        sweep=bool(sweep),
    )


def _check_combinations(a: argparse.Namespace, sweep: list[tuple[str, list[float]]] | None) -> None:
    if a.width % (2 * a.heads):
        nearest = 2 * a.heads * max(1, a.width // (2 * a.heads))
        raise UsageError(
            f"--width {a.width} is not a multiple of 2 * --heads = {2 * a.heads}, and rotary positions pair "
            f"a head's entries; try --width {nearest}"
        )
    if a.resume and a.overwrite:
        raise UsageError("--resume and --overwrite exclude each other; give one of them")
    for option, values in (("optimizers", a.optimizers), ("seeds", a.seeds)):
        if len(set(values)) < len(values):
            raise UsageError(f"--{option} names one twice: {' '.join(map(str, values))}; give each once")
    if sweep and len(sweep) > 1:
        raise UsageError("--sweep takes one optimizer at a time; run the others afterwards")
    if sweep and hasattr(a, "lr"):
        raise UsageError("--sweep brings its own learning rates; leave --lr out")


def _sweep_rates(name: str, rates: list[float]) -> dict[str, float]:
    if len(set(rates)) < len(rates):
        raise UsageError(f"--sweep {name} names a learning rate twice: {rates}; give each once")
    return {f"{name}@{rate:g}": rate for rate in rates}


def _rates_by_name(names: list[str], adamw_lr: float, given: list[tuple[str, list[float]]]) -> dict[str, float]:
    lr = {name: adamw_lr if name == "adamw" else CONTENDERS[name].lr for name in names}
    for name, rates in given:
        if name not in lr:
            raise UsageError(f"--lr {name}=... but {name} does not run; add it to --optimizers")
        if len(rates) > 1:
            raise UsageError(f"--lr {name} takes one value; several are for --sweep {name}=LR,LR")
        lr[name] = rates[0]
    return lr
