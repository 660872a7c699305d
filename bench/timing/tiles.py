"""Times the large kernels of a balanced step with other tiles than theirs, on a GPU: whether it prefers them.

Each stands beside its own choice, at a set's largest rank. A tile that the device cannot take gets a row that says why.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch

from bench import clock, rows
from bench.micro.case import Case, Sizes, numbers
from bench.micro.kernels import KERNELS
from bench.shapes import ParameterSet
from prokl.algorithm.shapes import effective_rank
from prokl.backends.select import select
from prokl.kernels.launch import Tile

DEEP = Tile(128, 128, 32, 4, 4), Tile(128, 128, 128, 4, 2)
WIDE = Tile(128, 256, 64, 8, 3), Tile(256, 128, 64, 8, 3)
TRIED: dict[str, tuple[Tile, ...]] = {
    "symmetric X": DEEP,
    "polynomial": DEEP,
    "symmetric L in bfloat16": DEEP,
    "product Q^T G of pairs": WIDE,
    "residual of pairs": WIDE,
    "projections of pairs": (Tile(64, 64, 64, 4, 3), Tile(128, 64, 32, 8, 3)),
    "momentum, pro-klshampoo and Gram matrix of pairs": (Tile(64, 64, 32, 4, 4), Tile(64, 64, 128, 4, 2)),
    "apply X scale left right active low rank in half": (Tile(64, 64, 64, 4, 3), Tile(32, 64, 64, 4, 2)),
}
"""Tiles by case, which compile for sm_90 without a spill."""


def measure(
    s: ParameterSet, device: torch.device, seconds: float, timer: Callable[..., list[float]] = clock.call_seconds
) -> Iterator[rows.Row]:
    """Yield a row for every kernel, bucket and tile; ``ratio`` is to the kernel's own choice."""
    cases = {case.name: case for case in KERNELS}
    for name, tried in TRIED.items():
        for (m, n), count in s.oriented.items():
            sizes, own = Sizes(count, m, n, effective_rank(s.ranks[-1], m, n)), None
            for tile in (None, *tried):
                row = {"model": s.name, "kernel": name, "value": "its own" if tile is None else _text(tile)}
                row |= {"rank": sizes.r, "metric": "time", "unit": "ms", "shapes": f"{count}x{m}x{n}"}
                try:
                    took = timer(_call(cases[name], sizes, tile, device), device, seconds)
                except Exception as error:  # Triton's, of shared memory or registers
                    if tile is None:
                        raise  # nothing would be what the others are compared with
                    yield row | {"note": f"{type(error).__name__}: {error}".partition("\n")[0]}
                    continue
                found = {key: 1e3 * value for key, value in rows.quartiles(took).items()}
                own = own or found["median"]
                yield row | found | {"rounds": len(took), "ratio": found["median"] / own}


def _call(case: Case, sizes: Sizes, tile: Tile | None, device: torch.device) -> Callable[[], Any]:
    """Return the call of a case whose kernel takes this tile."""
    d = case.timed[0]
    run = case.bind(case.inputs(sizes, d, numbers(device)), select("triton", device, case.precision).ops)

    def call() -> Any:
        with patch.object(case.module, "choose_tile", lambda *_, **__: tile) if tile else nullcontext():
            return run()

    return call


def _text(tile: Tile) -> str:
    return f"{tile.m}x{tile.n}x{tile.k}, {tile.warps} warps, {tile.stages} stages"
