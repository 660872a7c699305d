"""Records what the QRs of a training run are given: ``python -m bench.capture_factors [--out FILE.npz]``.

The run is the default job of :mod:`bench.pretrain` with Pro-KLShampoo, as far as step 100 after the initialising one,
on one thread. What it records are the inputs of the three QRs of the step, bit for bit, of few weights at few steps,
so that the file stays small enough to be kept with the tests. Another machine or version gives slightly other bits.

The file holds float32 arrays named "STEP WEIGHT INPUT", such as "20 blocks.0.q_proj.weight V", and "about", which
says in JSON how it was made.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import prokl
from bench import pretrain
from bench.command import command
from bench.rows import commit
from bench.training.run import Run
from bench.training.settings import Settings
from bench.training.sources import Source, open_source
from prokl.ops import TORCH

DEFAULT = Path(__file__).parent.parent / "tests" / "data" / "captured_factors.npz"
SEED = 0


@dataclass(frozen=True)
class Entry:
    """A primitive of the step that is a QR: the names of its inputs, and of the state that its result becomes."""

    inputs: tuple[str, ...]
    state: str


ENTRIES = {
    "tracking_qr": Entry(("V", "K", "U"), "U"),
    "refresh_basis": Entry(("L", "Q_L"), "Q_L"),
    "refresh_coordinates": Entry(("S", "Q_S"), "Q_S"),
}
Plan = Mapping[tuple[str, str], Sequence[int]]
"""(weight, primitive) -> steps after the initialising one; refreshes are at multiples of ten."""

# Of 192 x 192 and 192 x 768; o_proj and down_proj are those whose V had the largest conditions among their shapes.
SQUARE, WORST, LONG = "blocks.0.q_proj.weight", "blocks.3.o_proj.weight", "blocks.2.down_proj.weight"
PLAN: Plan = {
    (SQUARE, "tracking_qr"): (1, 20, 60, 100),
    (WORST, "tracking_qr"): (1, 20, 60, 100),
    (LONG, "tracking_qr"): (1, 100),
    (WORST, "refresh_basis"): (10,),
    (LONG, "refresh_basis"): (100,),
    (SQUARE, "refresh_coordinates"): (10, 60, 100),
    (WORST, "refresh_coordinates"): (10, 60, 100),
    (LONG, "refresh_coordinates"): (10, 60, 100),
}


@dataclass
class Calls:
    """The QRs of one step."""

    made: list[tuple[str, tuple[Tensor, ...], Tensor]] = field(default_factory=list)

    def recorded(self, name: str) -> Callable[..., Tensor]:
        """The entry of PyTorch's table, which leaves its inputs and result here."""
        entry = getattr(TORCH, name)

        def call(*inputs: Tensor) -> Tensor:
            before = tuple(t.clone() for t in inputs)  # bases are state, which the step writes in place afterwards
            Q: Tensor = entry(*inputs)
            self.made.append((name, before, Q))
            return Q

        return call

    def inputs_of(self, name: str, result: Tensor) -> tuple[Tensor, ...]:
        """What ``result`` was made of, which is unlike every other matrix of the bucket."""
        for called, inputs, Q in self.made:
            for b in range(len(Q)):
                if called == name and torch.equal(Q[b], result):
                    return tuple(t[b] for t in inputs)
        raise LookupError(f"no {name} of this step gave the state")


def capture(settings: Settings, text: Source, plan: Plan) -> dict[str, np.ndarray]:
    """Train with Pro-KLShampoo until the last step of the plan; the arrays of the file without "about"."""
    calls, found = Calls(), {}
    table = replace(TORCH, **{name: calls.recorded(name) for name in ENTRIES})
    run = Run(settings, SEED, text)
    (trainee,) = run.trainees
    (optimizer,) = trainee.optimizers
    weights = dict(trainee.model.named_parameters())
    for step in range(max(max(steps) for steps in plan.values()) + 1):
        calls.made.clear()
        with mock.patch("prokl.base.select", lambda *_: table):
            run.advance()
        for (weight, name), steps in plan.items():
            if step in steps:
                entry = ENTRIES[name]
                inputs = calls.inputs_of(name, optimizer.state[weights[weight]][entry.state])
                found |= {
                    f"{step} {weight} {letter}": t.numpy() for letter, t in zip(entry.inputs, inputs, strict=True)
                }
    return found


def about(settings: Settings, text: Source) -> dict[str, Any]:
    """Return how the file was made."""
    (hyper,) = settings.hyper.values()
    return {
        "command": "python -m bench.capture_factors",
        "prokl": prokl.__version__,
        "commit": commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "corpus": text.name,
        "corpus_sha256": text.sha256,
        "seed": SEED,
        **asdict(hyper),
        **settings.plan(),
    }


@command
def main(argv: Sequence[str]) -> int:
    """Record and write; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.capture_factors", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT, metavar="NPZ", help=f"default: the tests' {DEFAULT.name}")
    out = parser.parse_args(argv).out
    # One validation is over at once, and none is looked at.
    settings = pretrain.Options(optimizers=("pro-klshampoo",), threads=1, eval_windows=1).settings(curve=False)
    text = open_source(None, settings.context)
    torch.set_num_threads(settings.threads)
    arrays = capture(settings, text, PLAN)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, about=json.dumps(about(settings, text)), **arrays)
    print(f"{len(arrays)} arrays of {text.name} are in {out}, {out.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
