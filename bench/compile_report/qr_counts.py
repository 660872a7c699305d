"""Launches of the CUDA extension and their operations and bytes, in float32, as ``csrc`` makes them.

All launches of a call take place, whichever matrices need them: the blocks of those that do not return at once. The
host decides nothing, so that their number follows from the sizes alone; what they do is counted for ordinary matrices,
which are not singular, settle after one pass of Cholesky QR and need no Householder unless they are small.

Dimension key: n rows, k columns.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.compile_report.launch_counts import Work, ceil_div

PATH = "fp32"
BLOCK = 128
"""Columns that a block of threads factors, and edge of its part of a product, in float32."""
ROWS = 64
"""Rows to a block of threads where nothing is multiplied."""

Launch = tuple[str, Work]
"""Kernel of ``csrc`` and what it does; nothing moves and nothing is multiplied where it has no work."""


def _launch(kernel: str, batch: int, elements: float, flops: float = 0.0, works: bool = True) -> Launch:
    if not works:
        return kernel, Work(0.0)
    return kernel, Work(4.0 * batch * elements, {PATH: batch * flops} if flops else {})


def _blocked(batch: int, k: int, invert: bool, works: bool) -> Iterator[Launch]:
    """Count the factorisation of k columns, more than BLOCK, and C^-T."""
    for j in range(0, k, BLOCK):
        width = min(BLOCK, k - j)
        rest = k - j - width
        yield _launch("corner", batch, 3 * width**2, 2 / 3 * width**3, works)
        if rest == 0:
            break
        rows = ceil_div(rest, BLOCK)
        blocks = rows * (rows + 1) // 2
        yield _launch("apply", batch, 2 * rest * BLOCK + BLOCK**2 / 2, 2.0 * rows * BLOCK**3, works)
        yield _launch("outer", batch, rest * BLOCK + rest**2, 2.0 * blocks * BLOCK**3, works)
    for i in range(BLOCK, k, BLOCK) if invert else ():
        width = min(BLOCK, k - i)
        depths = sum(range(BLOCK, i + 1, BLOCK)) + i // BLOCK * width  # a block's rows are read from the diagonal on
        yield _launch("inverse", batch, i**2 / 2 + 2 * i * width, 2.0 * BLOCK**2 * depths, works)


def factor(batch: int, k: int, parts: int = 1, settles: bool = False) -> Iterator[Launch]:
    """Count ``prokl::factor`` of Gram matrices (batch,k,k) in ``parts``, of columns to settle or not yet."""
    if k <= BLOCK:
        yield _launch("factor", batch, (parts + 1) * k**2, 0.0 if settles else 2 / 3 * k**3)
        return
    yield _launch("load", batch, (1.5 if settles else 1.0) * k**2)
    yield from _blocked(batch, k, True, not settles)


def semidefinite(batch: int, k: int, invert: bool) -> Iterator[Launch]:
    """Count ``prokl::semidefinite_inverse``, or else ``prokl::semidefinite_root``, of (batch,k,k)."""
    if k <= BLOCK:
        yield _launch("factor", batch, (3 if invert else 2) * k**2, 2 / 3 * k**3)
        return
    for works in (True, False):  # as it is, and with a shift
        yield _launch("load", batch, (4 if invert else 1.5) * k**2, works=works)
        yield from _blocked(batch, k, invert, works)


def finish(batch: int, n: int, k: int, parts: int) -> Iterator[Launch]:
    """Count ``prokl::finish`` of (batch,n,k): a look at Gram matrices in ``parts``; without any, Householder's QR."""
    if parts:
        if k > BLOCK:
            yield _launch("deviation", batch, parts * k**2)
        yield _launch("finish", batch, ceil_div(k, ROWS) if k > BLOCK else parts * k**2)
        return
    flops = {PATH: batch * (4.0 * n * k**2 - 4 / 3 * k**3)}
    yield "finish", Work(4.0 * batch * 2 * n * k, flops)
