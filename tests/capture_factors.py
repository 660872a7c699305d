"""Records what the QRs of a training run are given: ``python -m tests.capture_factors`` writes the file in data.

The run is the default job of :mod:`bench.pretrain` with Pro-KLShampoo, as far as step 100 after the initialising one,
on one thread. What it records are the inputs of the three QRs of the step, bit for bit, of few weights at few steps,
so that the file stays small. Another machine or version gives slightly other bits.

The file holds float32 arrays named "STEP WEIGHT INPUT", such as "20 blocks.0.q_proj.weight V", and "about", which
says in JSON how it was made.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import prokl
from bench import pretrain
from bench.rows import commit
from bench.training.run import Run, Settings
from bench.training.sources import Source, open_source
from prokl.backends.torch_ops import TorchStages

DATA = Path(__file__).parent / "data" / "captured_factors.npz"
SEED = 0
INPUTS = {"tracking_qr": ("V", "K", "U"), "refresh_basis": ("L", "Q_L"), "refresh_coordinates": ("S", "Q_S")}
"""Of the operations that are QRs; the last one names the state that the result becomes."""
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

Calls = list[tuple[str, tuple[Tensor, ...], Tensor]]
"""The QRs of one step: operation, inputs, result."""


def recording(calls: Calls) -> ExitStack:
    """Return the context in which PyTorch's QRs leave inputs and result in ``calls``."""
    stack = ExitStack()
    for name in INPUTS:
        qr = getattr(TorchStages, name)

        def call(self, *inputs, name=name, qr=qr):
            before = tuple(t.clone() for t in inputs)  # bases are state, which the step writes in place afterwards
            calls.append((name, before, qr(self, *inputs)))
            return calls[-1][2]

        stack.enter_context(mock.patch.object(TorchStages, name, call))
    return stack


def inputs_of(calls: Calls, name: str, result: Tensor) -> tuple[Tensor, ...]:
    """Return what ``result`` was made of, which is unlike every other matrix of the bucket."""
    for called, inputs, Q in calls:
        for b in range(len(Q)):
            if called == name and torch.equal(Q[b], result):
                return tuple(t[b] for t in inputs)
    raise LookupError(f"no {name} of this step gave the state")


def capture(settings: Settings, text: Source, plan: Plan) -> dict[str, np.ndarray]:
    """Train with Pro-KLShampoo until the last step of the plan; return the arrays of the file without "about"."""
    run, found = Run(settings, SEED, text), {}
    (trainee,) = run.trainees
    (optimizer,) = trainee.optimizers
    weights = dict(trainee.model.named_parameters())
    for step in range(max(max(steps) for steps in plan.values()) + 1):
        calls: Calls = []
        with recording(calls):
            run.advance()
        for (weight, name), steps in plan.items():
            if step in steps:
                inputs = inputs_of(calls, name, optimizer.state[weights[weight]][INPUTS[name][-1]])
                for letter, t in zip(INPUTS[name], inputs, strict=True):
                    found[f"{step} {weight} {letter}"] = t.numpy()
    return found


if __name__ == "__main__":
    # One validation is over at once, and none is looked at.
    settings = pretrain.Options(optimizers=("pro-klshampoo",), threads=1, eval_windows=1).settings(curve=False)
    text = open_source(None, settings.context)
    torch.set_num_threads(settings.threads)
    arrays = capture(settings, text, PLAN)
    (hyper,) = settings.hyper.values()
    about = {"command": "python -m tests.capture_factors", "prokl": prokl.__version__, "commit": commit()}
    about |= {"torch": torch.__version__, "python": platform.python_version(), "seed": SEED}
    about |= {"corpus": text.name, "corpus_sha256": text.sha256} | asdict(hyper) | settings.plan()
    np.savez_compressed(DATA, about=json.dumps(about), **arrays)
    print(f"{len(arrays)} arrays of {text.name} are in {DATA}, {DATA.stat().st_size / 1e6:.2f} MB")
