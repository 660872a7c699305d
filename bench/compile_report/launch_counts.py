"""Operations and bytes of every kernel that a step launches, from the arguments of the launch.

:mod:`bench.counts` says what a step has to do, this module what its launches do: whole tiles where a matrix
ends inside of one, the lower tiles of a symmetric result alone, in the arithmetic that the kernel was told. Everything
elementwise in a kernel counts as bytes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Arguments = Mapping[str, Any]
"""Of a launch, by the names of the kernel's parameters: pointers, which know their bytes, numbers and constants."""


@dataclass(frozen=True)
class Work:
    """What one launch does.

    Attributes:
        bytes: every tensor read once and every one written once; what tiles read again comes from the L2 cache.
        flops: operations as computed, by the arithmetic they are done in: "bf16", "tf32x3", "fp32" (no tensor cores),
            "bf16x3" and "bf16x2" of two pairs and of one, with " chained" where halves are split in registers. An
            operation of those is one of the product that comes out, not of the several that it is made of.
        products: operations of the same products as :class:`bench.counts.Term` counts them: no tile's edge,
            no halves.
    """

    bytes: float
    flops: Mapping[str, float] = field(default_factory=dict)
    products: float = 0.0


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


MOVED = {
    "product": ("A*A_LO B*B_LO C?HAS_C", "D?STORED*D_LO energy?ENERGY"),
    "symmetric_product": ("A*LO B*LO C?HAS_C E?HAS_E", "D*D_LO second?SECOND"),
    "project": ("G M U*U_LO", "GU MU both?U_LO*U_LO"),
    "momentum": ("G M G_par?HAT*LO U?HAT*LO", "M G_hat_perp?HAT*LO size2?HAT whole2?HAT"),
    "precondition": ("P G_par Q_S", "out"),
    "apply": ("X?HAS_X Q?HAS_Q left?HAS_LOW_RANK right?HAS_LOW_RANK", ""),
    "stack": ("", "G energy"),
    "usable": ("energy starts skipped", "finite usable skipped"),
    "store": ("value mask?COUNT", "to"),
    "split": ("x a?SCALED", "both"),
    "split_two": ("x y", "of_x of_y"),
    "admit": ("A e_res s_L s_S QtG?BOUNDED sums", "rows columns sums"),
    "combine": ("x y", "D*PAIR"),
    "samples": ("GQ QtG", "X Z whitened"),
    "cut": ("t", "out count"),
    "inverse_norm": ("energy size full_size", "inverse"),
}
"""By kernel, without ``_kernel``: what it reads and what it writes; ``?`` where a constant is set, ``*`` twice where
another is, as a pair has two halves. Of one memory the largest counts. Scales of matrices are too few to count."""


def _bytes(a: Arguments, names: str, above: int = 0) -> float:
    """Add up what is moved of these; ``above`` elements are not read of what a symmetric product adds, C and E."""
    largest: dict[tuple[int, int], float] = {}
    for word in names.split():
        word, _, doubled = word.partition("*")
        name, _, given = word.partition("?")
        if given and not a[given]:
            continue
        pointers = a[f"{name}_ptr"]
        for i, pointer in enumerate(pointers if isinstance(pointers, tuple) else (pointers,)):
            size = pointer.nbytes * (2 if doubled and a[doubled] else 1)
            size -= above * pointer.dtype.itemsize if name in ("C", "E") else 0
            largest[pointer.storage, i] = max(size, largest.get((pointer.storage, i), 0.0))
    return sum(largest.values())


def path_of(operand: Any, precision: str, pairs: int = 0) -> str:
    """Return the arithmetic of a product, of whose factors so many are pairs: that of float32 ones is its precision."""
    if pairs:
        return f"{operand}x{1 + pairs}"
    return str(operand) if str(operand) != "fp32" else "fp32" if precision == "ieee" else precision


def _loops(kernel: str, a: Arguments) -> Iterator[tuple[str, str, str]]:
    """Yield the loops of a launch over tiles of factors: rows, columns and depth, their tiles, and the arithmetic."""
    operand, precision = a.get("OPERAND", a.get("DTYPE")), a.get("PRECISION", "")
    if kernel == "product":
        yield "MNK", "MNK", path_of(operand, precision, a["A_LO"] + a["B_LO"])
    elif kernel == "project":
        for factor in (a["G_ptr"], a["M_ptr"]):
            path = path_of(operand, precision)
            if a["U_LO"]:  # what stands beside U is split as it is read, unless it is bfloat16
                path = path_of(operand, "", 1 if factor.dtype == torch.bfloat16 else 2) + " chained"
            yield "MRN", "MRN", path
    elif kernel == "momentum" and a["HAT"]:
        yield "MNR", "MNR", path_of(operand, precision, 2 * a["LO"])
    elif kernel == "precondition":
        # P G_par, then into the eigenbasis and back, a block of eigenvectors at a time; the counts form S^-1/2 instead.
        for sizes, tiles in (("MRM", "MRK"), ("MRR", "MRQ"), ("MRR", "MRQ")):
            yield sizes, tiles, path_of(operand, precision)
    elif kernel == "apply":
        if a["HAS_Q"]:
            yield "MNM", "MNK", path_of(operand, precision)
        if a["HAS_LOW_RANK"]:
            yield "MNR", "MNR", path_of(a["OPERAND_LOW_RANK"], a["PRECISION_LOW_RANK"])


def _symmetric(a: Arguments, programs: int) -> Work:
    M, K, tile = a["M"], a["K"], a["TILE"]
    side = ceil_div(M, tile)
    batch, last = programs // (side * (side + 1) // 2), M - (side - 1) * tile
    above = batch * (M * M - (side - 1) * tile**2 - last**2) // 2  # elements of the upper tiles, which are not read
    moved = sum(_bytes(a, names, above) for names in MOVED["symmetric_product"])
    flops = 2.0 * programs * tile**2 * ceil_div(K, a["TILE_K"]) * a["TILE_K"]
    path = path_of(a["OPERAND"], a["PRECISION"], 2 * a["LO"])
    return Work(moved, {path: flops}, 2.0 * batch * M * M * K)


def work(kernel: str, a: Arguments, programs: int) -> Work:
    """Return the work of a launch of so many programs."""
    if kernel == "symmetric_product":
        return _symmetric(a, programs)
    if kernel == "product":
        a = {**a, "STORED": a["ENERGY"] != 2}  # 2: of which the rows' energies alone are stored
    flops: dict[str, float] = {}
    moved, products = sum(_bytes(a, names) for names in MOVED[kernel]), 0.0
    if kernel in ("apply", "stack"):  # which reach weights and gradients by their addresses
        size = programs // (ceil_div(a["M"], a["TILE_M"]) * ceil_div(a["N"], a["TILE_N"])) * a["M"] * a["N"]
        moved += size * (a["ITEM"] if kernel == "stack" else 2.0 * a["ITEM"] + 8.0 * a["HAS_MASTER"])
    for sizes, tiles, path in _loops(kernel, a):
        m, n, k = (a[name] for name in sizes)
        tile_m, tile_n, tile_k = (a[f"TILE_{letter}"] for letter in tiles)
        flops[path] = flops.get(path, 0.0) + 2.0 * programs * tile_m * tile_n * ceil_div(k, tile_k) * tile_k
        products += 2.0 * (programs // (ceil_div(m, tile_m) * ceil_div(n, tile_n))) * m * n * k
    return Work(moved, flops, products)
