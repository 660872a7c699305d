"""A divided step on paper: owners, state and messages of every rank by the package's own rules, without processes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch.distributed.tensor import Replicate, Shard

from bench.memory import TABLE
from bench.model.published import Published, Shape
from bench.shapes import ParameterSet
from prokl import ProKLShampoo
from prokl.algorithm.shapes import MatrixShape, effective_rank
from prokl.distributed.blocks import Block, blocks, chunk, homes, whole
from prokl.distributed.division import matrix_cost
from prokl.distributed.ownership import Weight, divide
from prokl.distributed.team import Team, nbytes
from prokl.distributed.transport import gathers
from prokl.distributed.weights import Divided
from prokl.engine.pieces import Piece

NODE = 8
"""GPUs of a node, which HSDP shards within."""
DTYPE = torch.bfloat16
"""Of weights and gradients."""
STATE = 4
"""Bytes of an element of the matrices' state; AdamW's is in the weights' dtype."""
Size = tuple[int, int]


@dataclass
class Seen:
    """A team as a prediction has it: no rank of it is here."""

    size: int
    index: int = -1


@dataclass
class Traffic:
    """Bytes that each rank sends and receives, on its node and between nodes, and in how many collectives.

    Attributes:
        sent, received: by rank, (on the node, between nodes).
    """

    world: int
    sent: list[list[int]] = field(init=False)
    received: list[list[int]] = field(init=False)
    collectives: int = 0

    def __post_init__(self) -> None:
        self.sent, self.received = ([[0, 0] for _ in range(self.world)] for _ in range(2))

    def add(self, sender: int, receiver: int, count: int) -> None:
        """Add a message; one to itself is none."""
        if sender != receiver:
            far = sender // NODE != receiver // NODE
            self.sent[sender][far] += count
            self.received[receiver][far] += count

    def collect(self, sizes: Mapping[int, int]) -> None:
        """Add what goes from each of some ranks to all of them.

        In a ring each node is entered by the wires of all of its ranks that take part, each with its share.
        """
        most, gathered = max(sizes.values()), gathers([*sizes.values()])
        everything = most * len(sizes) if gathered else sum(sizes.values())
        self.collectives = max(self.collectives, 1 if gathered else sum(size > 0 for size in sizes.values()))
        nodes = Counter(rank // NODE for rank in sizes)
        for rank, own in sizes.items():
            others = everything - (most if gathered else own)
            far = others * (len(nodes) - 1) // len(nodes) // nodes[rank // NODE]
            for way in (self.sent, self.received):
                way[rank][0] += others // nodes[rank // NODE] * (nodes[rank // NODE] - 1) if len(nodes) > 1 else others
                way[rank][1] += far


@dataclass
class Wave:
    """Matrices of one shape: how many each rank steps, what is sent before and after, and then to who has copies."""

    size: Size
    owned: list[int]
    lent: Traffic
    given: Traffic
    copied: Traffic

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """All of it."""
        return self.lent, self.given, self.copied


@dataclass
class Plan:
    """A divided step.

    Attributes:
        costs: counted operations of every rank. state: bytes of every rank. waves: in their order.
        adamw: what AdamW's weights send.
    """

    costs: list[float]
    state: list[int]
    waves: list[Wave]
    adamw: Traffic


def held(shape: Shape, world: int, launcher: str) -> list[Block]:
    """Return the block of a weight on every rank."""
    if launcher == "ddp":
        return [whole(shape)] * world
    if launcher == "hsdp":
        return list(blocks(shape, (world // NODE, NODE), (Replicate(), Shard(0))))
    return list(blocks(shape, (world,), (Shard(0),)))


def plan(model: Published, world: int, launcher: str, rank: int) -> Plan:
    """Divide a model's step among ranks.

    Args:
        model: whose weights. world: number of ranks. launcher: "ddp", "fsdp2" or "hsdp". rank: of the subspace.
    """
    shapes = model.matrices * model.layers
    weights = [_weight(shape, world, launcher, rank) for shape in shapes]
    costs = [0.0] * world
    parts = divide(weights, costs)
    found = Plan(costs, [_adamw_state(model, world, place, launcher) for place in range(world)], [], Traffic(world))
    waves: dict[Size, list[tuple[Shape, Any]]] = {}
    for shape, own in zip(shapes, parts, strict=True):
        m, n = _sides(shape)
        waves.setdefault((m, n), []).append((shape, own))
        for part in own:
            found.state[part.owner] += (part.stop - part.start) * state_bytes(m, n, rank)
    found.waves = [_wave(size, entries, world, launcher) for size, entries in waves.items()]
    if launcher == "ddp":
        found.adamw.collect(dict(enumerate(_rows_bytes(model, world))))
    return found


def state_bytes(m: int, n: int, rank: int) -> int:
    """Return the bytes of a matrix's state."""
    return STATE * sum(TABLE["pro-klshampoo"](m, n, effective_rank(rank, m, n)).values())


def sets(waves: Sequence[Wave], place: int) -> ParameterSet:
    """Return what a rank steps of some waves."""
    own = tuple((wave.owned[place], *wave.size) for wave in waves if wave.owned[place])
    return ParameterSet("owned", own, ())


def _sides(shape: Shape) -> Size:
    return min(shape[-2:]), max(shape[-2:])


@cache
def _weight(shape: Shape, world: int, launcher: str, rank: int) -> Weight:
    weight, stacked = torch.empty(shape, device="meta"), len(shape) == 3
    piece = Piece(weight, "", MatrixShape.of(weight))
    group = ProKLShampoo([torch.nn.Parameter(torch.zeros(2, 2))], rank=rank).param_groups[0]
    found = homes(shape, stacked, held(shape, world, launcher))
    return Weight(shape[0] if stacked else 1, matrix_cost(piece, ProKLShampoo.method, group), found)


def _wave(size: Size, entries: Sequence[tuple[Shape, Any]], world: int, launcher: str) -> Wave:
    wave = Wave(size, [0] * world, *(Traffic(world) for _ in range(3)))
    together: dict[tuple[int, ...], dict[int, int]] = {}  # of each group of ranks with copies, what each of them sends
    for shape, parts in entries:
        weight = torch.empty(shape, dtype=DTYPE, device="meta")
        own = Divided(weight, cast(Team, Seen(world)), parts, held(shape, world, launcher), len(shape) == 3)
        for part in parts:
            wave.owned[part.owner] += part.stop - part.start
        for block, part, sender, holders in own.routes():
            size_of = nbytes(block.shape, DTYPE)
            if len(holders) > 1:
                together.setdefault(holders, dict.fromkeys(holders, 0))[sender] += size_of
            if sender != part.owner:
                wave.lent.add(sender, part.owner, 2 * size_of)  # the weight with its gradient
                wave.given.add(part.owner, sender, size_of)
                wave.lent.collectives = wave.given.collectives = 1
    for sizes in together.values():
        (wave.given if launcher == "ddp" else wave.copied).collect(sizes)
    return wave


def _rows_bytes(model: Published, world: int) -> list[int]:
    return [
        sum(nbytes((len(range(*chunk(0, shape[0], world, place))), *shape[1:]), DTYPE) for shape in model.adamw)
        for place in range(world)
    ]


def _adamw_state(model: Published, world: int, place: int, launcher: str) -> int:
    """Return the bytes of two moments of a rank's rows, which HSDP's replicas repeat."""
    ranks, index = (NODE, place % NODE) if launcher == "hsdp" else (world, place)
    rows = ((len(range(*chunk(0, shape[0], ranks, index))), *shape[1:]) for shape in model.adamw)
    return 2 * DTYPE.itemsize * sum(torch.Size(shape).numel() for shape in rows)
