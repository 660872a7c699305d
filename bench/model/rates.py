"""How long a launch takes on an H200 by two sets of rates. Modelled, not measured: no kernel here has run on one.

"brief" has one rate for each arithmetic, whatever the tile, and no processor ever idle: a lower bound. "tiles" is what
tiles of their size should reach, derived by hand from the code that Triton makes of them, in whole waves of programs;
it is believed within about a third. Both were fixed before the kernels that they were first used on were changed, but
for the rates of halves split in registers, which came with those.

* brief: two thirds of what a data sheet promises, 989 TFLOP/s in bfloat16, a third of 495 in tf32x3 and 67 without
  tensor cores; of memory nine tenths of 4.8 TB/s. A launch from a CUDA graph takes 2 us.
* tiles, tf32x3: an operand is split in registers and its parts are stored to shared memory inside the loop, so that
  each of the three products is waited for, and nothing overlaps but another program of the processor.
* tiles, bfloat16: operands come from the L2 cache at 7.2 TB/s, of which a tile of 128 x 128 makes 64 operations a
  byte, 460 TFLOP/s. Of operands that lie split in memory, three or two such products are counted as one.
* tiles, halves split in registers and chained (the projections): no tile reads more than once what it splits, but an
  instruction waits for the one before: two thirds of operands that lie split, between those and tf32x3.
"""

from bench.model.launch_counts import ceil_div
from bench.model.occupancy import programs_per_processor
from bench.model.trace import EXTENSION, Event

PROCESSORS = 132
NODE = 2e-6
"""Seconds that a launch takes whatever it does."""
BRIEF = {"bf16": 700e12, "fp16": 700e12, "bf16x2": 350e12, "bf16x3": 233e12, "tf32x3": 110e12, "fp32": 45e12}
"""Operations a second by arithmetic; of a product in several parts, those of the product that comes out."""
BRIEF |= {f"{path} chained": BRIEF[path] for path in ("bf16x2", "bf16x3")}
BRIEF_BANDWIDTH = 4.3e12

L2_BANDWIDTH = 7.2e12
TILES_BANDWIDTH = 3.3e12
"""Of launches that read and write each element once: 77 % of the other set's."""
WHOLE, HALF, SHORT = 67.5e12, 55e12, 35e12
"""Of tf32x3, for tiles of 128 x 64 and more (60 to 75), of 64 x 64 (45 to 65), and of 32 rows, where the older
instructions of tensor cores are taken."""
SPLIT = {"bf16x2": 220e12, "bf16x3": 150e12}
"""Of operands that lie split in memory, for tiles of 128 x 128."""
CHAINED = {f"{path} chained": rate * 2 / 3 for path, rate in SPLIT.items()}
"""Of halves that are split in registers, for tiles of 128 x 64."""
SIMT = 40e12  # without tensor cores
WAVE = 2.5e-6
"""Seconds in which a wave of programs in half precision fills its pipeline at the start, and adds and stores at the
end: what takes the 460 TFLOP/s of the loop down to about 340 at a depth of 768. The other rates have it in them."""
FACTOR = 28e-6
"""Seconds of a block of threads that factors 128 columns: 16 steps of a tile on the diagonal by one thread, about 1900
cycles, and the rest of its column, about 1300."""


REFLECTION = 0.65e-6
"""Seconds of a reflection of a matrix of 128 x 128 in shared memory by a block of threads: about 1200 cycles, most of
them between its barriers. Q takes two for each column."""


def tile_rate(path: str, tile: tuple[int, int]) -> float:
    """Return operations a second of all processors in the loop of a product with this tile.

    Raises:
        KeyError: an arithmetic without a rate.
    """
    m, n = tile
    if path in ("bf16", "fp16"):
        return L2_BANDWIDTH * m * n / (m + n)
    if path in SPLIT:
        return SPLIT[path] * min(1.0, m * n / (m + n) / 64)
    if path in CHAINED:
        return CHAINED[path] * min(1.0, m * n / (128 * 64))
    return {"tf32x3": SHORT if min(tile) < 64 else WHOLE if m * n >= 128 * 64 else HALF, "fp32": SIMT}[path]


def brief(event: Event) -> float:
    """Return the seconds of a launch: arithmetic or memory, whichever takes longer, and the launch itself."""
    work = event.work
    return max(sum(flops / BRIEF[path] for path, flops in work.flops.items()), work.bytes / BRIEF_BANDWIDTH) + NODE


def tiles(event: Event) -> float:
    """Return the seconds of a launch by its tile, in whole waves of the programs that fit all processors."""
    work = event.work
    waves = ceil_div(work.programs, PROCESSORS)
    if event.kernel in (f"{EXTENSION}factor", f"{EXTENSION}corner") and work.flops:
        return FACTOR * waves + NODE
    if event.kernel == f"{EXTENSION}finish" and work.flops:
        return 2 * work.tile[1] * REFLECTION * waves + NODE
    arithmetic = 0.0
    if work.flops:
        at_once = PROCESSORS * (programs_per_processor(event.launch) if event.launch else 1)
        waves = ceil_div(work.programs, at_once)
        loop = sum(flops / tile_rate(path, work.tile) for path, flops in work.flops.items())
        ends = WAVE * waves if work.flops.keys() & {"bf16", "fp16"} else 0.0
        arithmetic = loop * waves * at_once / work.programs + ends
    return max(arithmetic, work.bytes / TILES_BANDWIDTH) + NODE
