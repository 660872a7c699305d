"""Operations and bytes of every kernel that a step launches, from the arguments of the launch.

:mod:`bench.counts` says what a step has to do, this module what its launches do: whole tiles where a matrix
ends inside of one, the lower tiles of a symmetric result alone, in the arithmetic that the kernel was told. Everything
elementwise in a kernel counts as bytes only.

Dimension key: M, N sides of a result, K depth, R rank, as the kernels name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Pointer(Protocol):
    """What is known of a tensor that a launch was given."""

    @property
    def dtype(self) -> torch.dtype:
        """Return its dtype."""
        ...

    @property
    def storage(self) -> int:
        """Return a number of its memory, which the same launch's views of the same tensor share."""
        ...


Arguments = Mapping[str, Any]
"""Of a launch, by the names of the kernel's parameters: pointers, numbers and constants."""


@dataclass(frozen=True)
class Work:
    """What one launch does.

    Attributes:
        bytes: every tensor read once and every one written once; what tiles read again comes from the L2 cache.
        programs: of the grid.
        flops: operations as computed, by the arithmetic they are done in: "bf16", "tf32x3", "fp32" (no tensor cores),
            "bf16x3" and "bf16x2" of two pairs and of one, with " chained" where halves are split in registers. An
            operation of those is one of the product that comes out, not of the several that it is made of.
        products: operations of the same products as :class:`bench.counts.Term` counts them: no tile's edge,
            no halves.
    """

    bytes: float
    programs: int = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    products: float = 0.0


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def path_of(operand: Any, precision: str, pairs: int = 0) -> str:
    """Return the arithmetic of a product, of whose factors so many are pairs: that of float32 ones is its precision."""
    if pairs:
        return f"{operand}x{1 + pairs}"
    return str(operand) if str(operand) != "fp32" else "fp32" if precision == "ieee" else precision


def _moved(*tensors: tuple[Pointer, float]) -> float:
    """Add up the bytes of (tensor, elements), those of one memory once; the elements of a pair are those of both."""
    largest: dict[int, float] = {}
    for pointer, elements in tensors:
        size = elements * pointer.dtype.itemsize
        largest[pointer.storage] = max(size, largest.get(pointer.storage, 0.0))
    return sum(largest.values())


def _planes(pair: bool) -> int:
    """Return how many numbers in memory an element is: hi and lo, or itself."""
    return 2 if pair else 1


def _product(a: Arguments, programs: int) -> Work:
    M, N, K = a["M"], a["N"], a["K"]
    tiles_n = ceil_div(N, a["TILE_N"])
    batch = programs // (ceil_div(M, a["TILE_M"]) * tiles_n)
    read = [(a["A_ptr"], _planes(a["A_LO"]) * batch * M * K), (a["B_ptr"], _planes(a["B_LO"]) * batch * K * N)]
    if a["HAS_C"]:
        read.append((a["C_ptr"], batch * M * N))
    energies = {0: 0, 1: programs, 2: batch * tiles_n * M}[int(a["ENERGY"])]
    written = [(a["energy_ptr"], energies)]
    if a["ENERGY"] != 2:  # of which the rows' energies alone are stored
        written.append((a["D_ptr"], _planes(a["D_LO"]) * batch * M * N))
    depth = ceil_div(K, a["TILE_K"]) * a["TILE_K"]
    path = path_of(a["OPERAND"], a["PRECISION"], a["A_LO"] + a["B_LO"])
    return Work(
        _moved(*read) + _moved(*written),
        programs,
        {path: 2.0 * programs * a["TILE_M"] * a["TILE_N"] * depth},
        2.0 * batch * M * N * K,
    )


def _symmetric_product(a: Arguments, programs: int) -> Work:
    M, K, tile = a["M"], a["K"], a["TILE"]
    side = ceil_div(M, tile)
    triangle = side * (side + 1) // 2
    batch = programs // triangle
    size = _planes(a["LO"]) * batch * M * K
    last = M - (side - 1) * tile
    lower = batch * (M * M + (side - 1) * tile**2 + last**2) // 2  # elements of the lower tiles
    read = [(a["A_ptr"], size), (a["B_ptr"], size)]
    read += [(a[f"{name}_ptr"], lower) for name in ("C", "E") if a[f"HAS_{name}"]]
    depth = ceil_div(K, a["TILE_K"]) * a["TILE_K"]
    return Work(
        _moved(*read) + _moved((a["D_ptr"], (_planes(a["D_LO"]) + a["SECOND"]) * batch * M * M)),
        programs,
        {path_of(a["OPERAND"], a["PRECISION"], 2 * a["LO"]): 2.0 * programs * tile**2 * depth},
        2.0 * batch * M * M * K,
    )


def _project(a: Arguments, programs: int) -> Work:
    M, N, R = a["M"], a["N"], a["R"]
    batch = programs // (ceil_div(M, a["TILE_M"]) * ceil_div(R, a["TILE_R"]))
    depth = ceil_div(N, a["TILE_N"]) * a["TILE_N"]
    U = _planes(a["U_LO"]) * batch * N * R
    read = _moved((a["G_ptr"], batch * M * N), (a["M_ptr"], batch * M * N), (a["U_ptr"], U))
    flops: dict[str, float] = {}
    for factor in (a["G_ptr"], a["M_ptr"]):
        path = path_of(a["OPERAND"], a["PRECISION"])
        if a["U_LO"]:  # what stands beside U is split as it is read, unless it is bfloat16
            path = path_of(a["OPERAND"], "", 1 if factor.dtype == torch.bfloat16 else 2) + " chained"
        flops[path] = flops.get(path, 0.0) + 2.0 * programs * a["TILE_M"] * a["TILE_R"] * depth
    return Work(
        read + _moved((a["GU_ptr"], (2 if a["U_LO"] else 1) * batch * M * R), (a["MU_ptr"], batch * M * R)),
        programs,
        flops,
        4.0 * batch * M * N * R,
    )


def _momentum(a: Arguments, programs: int) -> Work:
    M, N, R = a["M"], a["N"], a["R"]
    batch = programs // (ceil_div(M, a["TILE_M"]) * ceil_div(N, a["TILE_N"]))
    size, planes = batch * M * N, _planes(a["LO"])
    moved = _moved((a["G_ptr"], size), (a["M_ptr"], size)) + _moved((a["M_ptr"], size))
    if not a["HAT"]:
        return Work(moved, programs)
    moved += _moved((a["G_par_ptr"], planes * batch * M * R), (a["U_ptr"], planes * batch * N * R))
    moved += _moved((a["G_hat_perp_ptr"], planes * size), (a["size2_ptr"], programs), (a["whole2_ptr"], programs))
    depth = ceil_div(R, a["TILE_R"]) * a["TILE_R"]
    path = path_of(a["OPERAND"], a["PRECISION"], 2 * a["LO"])
    return Work(
        moved,
        programs,
        {path: 2.0 * programs * a["TILE_M"] * a["TILE_N"] * depth},
        2.0 * size * R,
    )


def _precondition(a: Arguments, programs: int) -> Work:
    M, R = a["M"], a["R"]
    batch = programs // ceil_div(M, a["TILE_M"])
    read = _moved((a["P_ptr"], batch * M * M), (a["G_par_ptr"], batch * M * R), (a["Q_S_ptr"], batch * R * R))
    # P G_par, then into the eigenbasis and back, a block of eigenvectors at a time; the counts form S^-1/2 instead.
    depth = ceil_div(M, a["TILE_K"]) * a["TILE_K"] + 2 * ceil_div(R, a["TILE_Q"]) * a["TILE_Q"]
    return Work(
        read + _moved((a["out_ptr"], batch * M * R)),
        programs,
        {path_of(a["DTYPE"], a["PRECISION"]): 2.0 * programs * a["TILE_M"] * a["TILE_R"] * depth},
        2.0 * batch * (M * M * R + 2 * M * R * R),
    )


def _apply(a: Arguments, programs: int) -> Work:
    M, N, R = a["M"], a["N"], a["R"]
    batch = programs // (ceil_div(M, a["TILE_M"]) * ceil_div(N, a["TILE_N"]))
    tile = 2.0 * programs * a["TILE_M"] * a["TILE_N"]
    moved = batch * M * N * (2.0 * a["ITEM"] + (8.0 if a["HAS_MASTER"] else 0.0))
    flops: dict[str, float] = {}
    products = 0.0
    if a["HAS_X"]:
        moved += _moved((a["X_ptr"], batch * M * N))
    if a["HAS_Q"]:
        moved += _moved((a["Q_ptr"], batch * M * M))
        products += 2.0 * batch * M * M * N
        flops[path_of(a["OPERAND"], a["PRECISION"])] = tile * ceil_div(M, a["TILE_K"]) * a["TILE_K"]
    if a["HAS_LOW_RANK"]:
        moved += _moved((a["left_ptr"], batch * M * R), (a["right_ptr"], batch * N * R))
        products += 2.0 * batch * M * N * R
        path = path_of(a["OPERAND_LOW_RANK"], a["PRECISION_LOW_RANK"])
        flops[path] = flops.get(path, 0.0) + tile * ceil_div(R, a["TILE_R"]) * a["TILE_R"]
    return Work(moved, programs, flops, products)


def _stack(a: Arguments, programs: int) -> Work:
    batch = programs // (ceil_div(a["M"], a["TILE_M"]) * ceil_div(a["N"], a["TILE_N"]))
    size = batch * a["M"] * a["N"]
    return Work(float(size * a["ITEM"]) + _moved((a["G_ptr"], size), (a["energy_ptr"], programs)), programs)


def _usable(a: Arguments, programs: int) -> Work:
    batch = programs * a["ROWS"]  # at most
    moved = _moved((a["energy_ptr"], batch * a["PARTS"]), (a["starts_ptr"], programs + 1))
    moved += _moved((a["finite_ptr"], batch), (a["usable_ptr"], batch)) + 2 * _moved((a["skipped_ptr"], programs))
    return Work(moved, programs)


def _store(a: Arguments, programs: int) -> Work:
    batch = programs // ceil_div(a["MOST"], a["TILE"])  # all are copied
    slots = zip(a["to_ptr"], a["value_ptr"], a["stride_value_b"], a["E"], strict=True)
    moved = sum(_moved((to, batch * E)) + _moved((value, batch * E if step else E)) for to, value, step, E in slots)
    return Work(moved + batch * a["COUNT"], programs)


def _split(a: Arguments, programs: int) -> Work:
    scales = (a["a_ptr"], a["COUNT"] / a["M"] if a["SCALED"] else 0)
    return Work(_moved((a["x_ptr"], a["COUNT"])) + _moved(scales) + _moved((a["both_ptr"], 2 * a["COUNT"])), programs)


def _split_two(a: Arguments, programs: int) -> Work:
    sizes = (("x", a["COUNT_X"]), ("y", a["COUNT_Y"]))
    read = _moved(*((a[f"{name}_ptr"], count) for name, count in sizes))
    return Work(read + _moved(*((a[f"of_{name}_ptr"], 2 * count) for name, count in sizes)), programs)


def _elements(a: Arguments, programs: int) -> float:
    return float(programs // (ceil_div(a["M"], a["TILE_M"]) * ceil_div(a["N"], a["TILE_N"])) * a["M"] * a["N"])


def _combine(a: Arguments, programs: int) -> Work:
    size = _elements(a, programs)
    read = _moved((a["x_ptr"], size), (a["y_ptr"], size))
    return Work(read + _moved((a["D_ptr"], _planes(a["PAIR"]) * size)), programs)


def _samples(a: Arguments, programs: int) -> Work:
    size = _elements(a, programs)
    read = _moved((a["GQ_ptr"], size), (a["QtG_ptr"], size))
    return Work(read + _moved(*((a[f"{name}_ptr"], size) for name in ("X", "Z", "whitened"))), programs)


def _cut(a: Arguments, programs: int) -> Work:
    size = programs * a["COUNT"]  # the second pass comes from the L2 cache
    return Work(_moved((a["t_ptr"], size)) + _moved((a["out_ptr"], size), (a["count_ptr"], programs)), programs)


def _inverse_norm(a: Arguments, programs: int) -> Work:
    read = _moved((a["energy_ptr"], programs * a["ENERGIES"]), (a["size_ptr"], programs * a["NORMS"]))
    read += _moved((a["full_size_ptr"], programs * a["NORMS"]))
    return Work(read + _moved((a["inverse_ptr"], programs)), programs)


def _admit(a: Arguments, programs: int) -> Work:
    M, R = programs * a["M"], programs * a["R"]
    read = _moved((a["A_ptr"], M * a["R"]), (a["e_res_ptr"], M * a["PARTS"]), (a["s_L_ptr"], M), (a["s_S_ptr"], R))
    read += _moved((a["QtG_ptr"], M * a["R"])) if a["BOUNDED"] else 0.0
    return Work(read + _moved((a["rows_ptr"], 3 * M), (a["columns_ptr"], 3 * R), (a["sums_ptr"], 4 * M)), programs)


KERNELS: dict[str, Callable[[Arguments, int], Work]] = {
    "product": _product,
    "symmetric_product": _symmetric_product,
    "project": _project,
    "momentum": _momentum,
    "precondition": _precondition,
    "apply": _apply,
    "stack": _stack,
    "usable": _usable,
    "store": _store,
    "split": _split,
    "split_two": _split_two,
    "admit": _admit,
    "combine": _combine,
    "samples": _samples,
    "cut": _cut,
    "inverse_norm": _inverse_norm,
}
"""By name, without ``_kernel``: the work of a launch, from its arguments and the number of its programs."""
