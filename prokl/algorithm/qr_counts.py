"""Launches of the CUDA extension's QR and their operations and bytes, in float32, in the order of ``csrc/qr.cuh``.

All launches of a call take place, whichever matrices need them: the blocks of those that do not return at once. The
host decides nothing, so that their number follows from the sizes alone; what they do is counted for matrices that take
``passes`` passes of Cholesky QR, no shift and no Householder. By default these are the passes that factors captured
from training take at most.

Dimension key: n rows, k columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prokl.algorithm.launch_counts import Work, ceil_div

PATH = "fp32"
BLOCK = 128
"""Columns that a block of threads factors, and edge of its part of a product, in float32."""
ROWS = 64
"""Rows to a block of threads where nothing is multiplied."""
PASSES = 4
"""Passes that are launched."""
SETTLED = 0
"""Passes that an orthonormal matrix takes, as a basis before its refresh."""
SPLIT_ROWS, MOST_ROWS = 256, 4096
"""Rows of a Gram matrix that one block of threads sums, for one block of columns and at most."""
LEAF = 2 * BLOCK
"""Rows of a leaf of Householder's QR."""
SHARED = 227 * 1024
"""Bytes of shared memory that a block may have on compute capability 9.0."""

Launch = tuple[str, Work]
"""Kernel of ``csrc``, or "memset", and what it does; nothing moves and nothing is multiplied where it has no work."""


def _lower(blocks: int) -> int:
    return blocks * (blocks + 1) // 2


@dataclass(frozen=True)
class _Solver:
    """``Solver`` of ``csrc/qr.cuh``, launch by launch."""

    batch: int
    n: int
    k: int

    def _launch(self, kernel: str, blocks: int, elements: float, flops: float = 0.0, works: bool = True) -> Launch:
        if not works:
            return kernel, Work(0.0, self.batch * blocks)
        done = {PATH: self.batch * flops} if flops else {}
        return kernel, Work(4.0 * self.batch * elements, self.batch * blocks, done)

    def begin(self) -> Iterator[Launch]:
        for elements in (1, self.k, 1):
            yield "memset", Work(4.0 * self.batch * elements)
        yield self._launch("exponents", ceil_div(self.k, 32) * ceil_div(self.n, ROWS), self.n * self.k)
        yield self._launch("scale", 1, 2 * self.k)

    def _load(self, works: bool) -> Launch:
        return self._launch("load", ceil_div(self.k, ROWS), 1.5 * self.k**2, works=works)

    def factor_or_shift(self, invert: bool) -> Iterator[Launch]:
        yield self._load(True)
        yield from self._factor(invert, True)
        yield self._launch("shift", 1, 0, works=False)
        yield self._load(False)
        yield from self._factor(invert, False)

    def _factor(self, invert: bool, works: bool) -> Iterator[Launch]:
        for j in range(0, self.k, BLOCK):
            width = min(BLOCK, self.k - j)
            rest = self.k - j - width
            yield self._launch("factor", 1, 3 * width**2, 2 / 3 * width**3, works)
            if rest == 0:
                break
            yield self.apply(rest, BLOCK, works)
            blocks = _lower(ceil_div(rest, BLOCK))
            yield self._launch("outer", blocks, rest * BLOCK + rest**2, 2.0 * blocks * BLOCK**3, works)
        for i in range(BLOCK, self.k, BLOCK) if invert else ():
            width = min(BLOCK, self.k - i)
            depths = sum(range(BLOCK, i + 1, BLOCK))  # a block's rows are read from the diagonal on
            moved = i**2 / 2 + 2 * i * width
            yield self._launch("outer", i // BLOCK, moved, 2.0 * BLOCK**2 * depths, works)
            yield self.apply(i, width, works)

    def apply(self, n: int, k: int, works: bool) -> Launch:
        rows = ceil_div(n, BLOCK)
        depths = sum(min(k, column + BLOCK) for column in range(0, k, BLOCK))  # the factor is upper triangular
        return self._launch("apply", rows, 2 * n * k + k**2 / 2, 2.0 * rows * BLOCK**2 * depths, works)

    def prepare(self, works: bool) -> Launch:
        return self._launch("prepare", ceil_div(self.n, ROWS), 2 * self.n * self.k, works=works)

    def _gram(self, lower: bool, works: bool) -> Iterator[Launch]:
        edge = ceil_div(self.k, BLOCK)
        blocks = _lower(edge)
        split_rows = min(MOST_ROWS, SPLIT_ROWS * blocks)
        splits = ceil_div(self.n, split_rows)
        # A row of blocks of a lower triangular matrix begins at its diagonal.
        rows = sum((i + 1) * (self.n - i * BLOCK if lower else self.n) for i in range(edge))
        partial = splits * blocks * BLOCK**2 if splits > 1 else 0
        out = partial or self.k**2 / 2
        yield self._launch("gram", blocks * splits, self.n * self.k + out, 2.0 * BLOCK**2 * rows, works)
        if splits > 1:
            yield self._launch("sum_splits", blocks, partial + self.k**2 / 2, works=works)

    def _judge(self, works: bool) -> Launch:
        return self._launch("judge", 1, _lower(ceil_div(self.k, BLOCK)), works=works)

    def passes(self, done: int, lower: bool) -> Iterator[Launch]:
        for i in range(PASSES):
            yield from self._gram(lower and i == 0, i <= done)
            yield self._judge(i <= done)
            yield from self._factor(True, i < done)
            yield self.apply(self.n, self.k, i < done)
        yield from self._gram(False, done == PASSES)
        yield self._judge(done == PASSES)

    def fall_back(self) -> Iterator[Launch]:
        yield self.prepare(False)
        yield from self._tsqr(self.n)
        yield from self._gram(False, False)
        yield self._judge(False)

    def _tsqr(self, n: int) -> Iterator[Launch]:
        shared = 4 * (n * (self.k | 1) + 8 * 128 + 8 + 2 * self.k)
        if self.k > BLOCK or n <= LEAF or shared <= SHARED:
            yield self._launch("householder", 1, 0, works=False)
            return
        runs = ceil_div(n, LEAF)
        yield self._launch("householder", runs, 0, works=False)
        yield from self._tsqr(runs * self.k)
        yield self._launch("apply", runs * ceil_div(ceil_div(n, runs), BLOCK), 0, works=False)

    def conclude(self) -> Launch:
        return self._launch("conclude", ceil_div(self.n, ROWS), 0, works=False)


def qr(batch: int, n: int, k: int, passes: int = 2) -> list[Launch]:
    """Count ``prokl.cuda_qr.qr`` of (batch,n,k)."""
    s = _Solver(batch, n, k)
    return [*s.begin(), s.prepare(True), *s.passes(passes, False), *s.fall_back(), s.conclude()]


def tracking_qr(batch: int, n: int, k: int, passes: int = 1) -> list[Launch]:
    """Count ``prokl.cuda_qr.tracking_qr`` of V (batch,n,k)."""
    s = _Solver(batch, n, k)
    ready = [*s.begin(), *s.factor_or_shift(True), s.prepare(True), s.apply(n, k, True)]
    return [*ready, *s.passes(passes, False), *s.fall_back(), s.conclude()]


def semidefinite_qr(batch: int, k: int, passes: int = 1) -> list[Launch]:
    """Count ``prokl.cuda_qr.semidefinite_qr`` of (batch,k,k)."""
    s = _Solver(batch, k, k)
    return [*s.begin(), *s.factor_or_shift(False), *s.passes(passes, True), *s.fall_back(), s.conclude()]
