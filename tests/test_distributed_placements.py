"""However weights lie on the ranks, they are stepped as in one process; what cannot be stepped is refused."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate

import prokl
from prokl import KLShampoo, ProKLShampoo, diagnostics
from tests.distributed.placements import (
    MATRICES,
    VECTORS,
    assert_close,
    give,
    mesh_of,
    message,
    optimizer_of,
    train,
    value,
    weights_of,
    whole,
)
from tests.distributed.pool import pools  # noqa: F401  (a fixture)
from tests.distributed.traffic import Traffic

STEPS = 12


def alone(cls):
    weights = weights_of("alone")
    train(weights, optimizer_of("alone", weights, cls), 0, STEPS)
    return whole(weights)


@pytest.fixture(scope="module")
def expected():
    return {cls: alone(cls) for cls in (ProKLShampoo, KLShampoo)}


def on_ranks(cls, how):
    """Train; return the weights, whole, and the bytes that this rank receives in the last step."""
    weights = weights_of(how)
    optimizer = optimizer_of(how, weights, cls)
    train(weights, optimizer, 0, STEPS - 1)
    with Traffic() as traffic:
        train(weights, optimizer, STEPS - 1, STEPS)
    return whole(weights), traffic.received


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cls", "how"),
    [
        (4, ProKLShampoo, "fsdp"),
        (4, KLShampoo, "fsdp"),
        (4, ProKLShampoo, "columns"),
        (4, ProKLShampoo, "replicas"),
        (4, ProKLShampoo, "ddp"),
        (2, ProKLShampoo, "mixed"),
        (4, ProKLShampoo, "mixed, divided"),
        (4, ProKLShampoo, "hsdp"),
        (4, ProKLShampoo, "rows and columns"),
        (4, ProKLShampoo, "rows of rows"),
    ],
)
def test_weights_placed_in_any_way_are_stepped_as_in_one_process(world, cls, how, pools, expected):  # noqa: F811
    found = pools[world].run(on_ranks, cls, how)
    for weights, received in found:
        assert_close(weights, expected[cls])
        assert received > 0
        for name, weight in weights.items():  # ranks agree to the bit
            assert np.array_equal(weight, found[0][0][name]), name


def state_of_ranks(how):
    """Return the elements of state that this rank has, by key; but no counts, which several ranks may have."""
    weights = weights_of(how)
    optimizer = optimizer_of(how, weights)
    train(weights, optimizer, 0, 1)
    found = {}
    for own in optimizer.engine.state.values():
        for key, t in own.items():
            if isinstance(t, torch.Tensor) and key.partition(".")[0] not in ("step", "skipped"):
                found[key] = found.get(key, 0) + t.numel()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_ranks_have_state_of_their_own_and_together_all_of_it_once(how, pools):  # noqa: F811
    every = state_of_ranks("alone")
    found = pools[4].run(state_of_ranks, how)
    for key, elements in every.items():
        # AdamW's weight without a dimension is stepped by all four.
        extra = 3 if key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") else 0
        assert sum(own.get(key, 0) for own in found) == elements + extra, key
    sizes = [sum(own.values()) for own in found]
    assert max(sizes) <= 0.4 * sum(every.values())  # a quarter, but for matrices of which there are few


def keys_shown(own):
    """Return the keys of every weight's state after a step, before which it held what is somebody's own."""
    weights = weights_of("ddp")
    optimizer = optimizer_of("ddp", weights)
    for p in weights.values():
        optimizer.state[p].update(own)
    train(weights, optimizer, 0, 1)
    return {name: set(optimizer.state[weights[name]]) - own.keys() for name in MATRICES}


def test_a_state_that_was_looked_up_or_written_to_before_the_first_step_is_shown_on_every_rank(pools):  # noqa: F811
    shown = pools[2].run(keys_shown, {})
    assert all(shown[0].values()) and shown[0] == shown[1]
    assert pools[2].run(keys_shown, {"mark": 1}) == shown


@pytest.mark.slow
def test_without_a_group_plain_weights_are_every_ranks_own_and_nothing_is_sent(pools, expected):  # noqa: F811
    for weights, received in pools[2].run(on_ranks, ProKLShampoo, "plain"):
        assert received == 0
        for name, weight in weights.items():
            assert np.array_equal(weight, expected[ProKLShampoo][name])


def gradients_placed_otherwise():
    weights = weights_of("fsdp")
    optimizer = optimizer_of("fsdp", weights)
    for call in range(STEPS):
        give(weights, call, place=[Replicate()] if call % 2 else None)
        optimizer.step()
    return whole(weights)


def test_a_gradient_that_is_placed_otherwise_than_its_weight_is_placed_as_it(pools, expected):  # noqa: F811
    for weights in pools[2].run(gradients_placed_otherwise):
        assert_close(weights, expected[ProKLShampoo])


def experts_at_home():
    """Return the bytes that come where each rank has whole experts, and the shape of what it owns."""
    experts = weights_of("fsdp", {"experts": MATRICES["experts"]})
    optimizer = optimizer_of("fsdp", experts)
    train(experts, optimizer, 0, 2)
    with Traffic() as traffic:
        train(experts, optimizer, 2, 3)
    (state,) = optimizer.engine.state.values()
    return traffic.received, tuple(state["M"].shape)


def test_experts_that_lie_on_their_ranks_are_owned_there_and_nothing_is_sent(pools):  # noqa: F811
    assert pools[2].run(experts_at_home) == [(0, (3, 8, 10))] * 2


# On two ranks, and of whole 16 bytes on each.
EVEN = {"square": (8, 8), "square2": (8, 8), "wide": (8, 20), "table": (12, 4), "bias": (8,)}
BYTES = {name: 8 * math.prod(shape) for name, shape in EVEN.items()}


def step_bytes(how):
    """Return what this rank sends and receives in a step, and the bytes of the weights that it owns."""
    weights = weights_of(how, EVEN)
    optimizer = optimizer_of(how, weights)
    train(weights, optimizer, 0, 1)  # which divides the weights
    with Traffic() as traffic:
        train(weights, optimizer, 1, 2)
    owned = sum(w.stand_in.nbytes for w in optimizer._division.divided() if w.stand_in is not None)
    return traffic.sent, traffic.received, owned


def test_each_plain_weight_goes_once_to_every_rank_that_does_not_own_it(pools):  # noqa: F811
    found = pools[2].run(step_bytes, "ddp")
    every = sum(BYTES.values())
    assert sum(owned for *_, owned in found) == every
    assert [(sent, received) for sent, received, _ in found] == [(owned, every - owned) for *_, owned in found]


def test_half_of_a_sharded_matrix_lies_elsewhere_and_of_adamw_nothing_moves(pools):  # noqa: F811
    found = pools[2].run(step_bytes, "fsdp")  # a gradient and a weight come, the stepped weight goes back
    matrices = sum(BYTES[name] for name in EVEN if name in MATRICES)
    assert sum(owned for *_, owned in found) == matrices
    assert sum(sent for sent, *_ in found) == sum(received for _, received, _ in found) == 3 * matrices / 2


def asked_of_one_rank():
    """Ask the first rank alone, while the others wait for nothing; return what it said."""
    weights = weights_of("mixed, divided")
    optimizer = optimizer_of("mixed, divided", weights)
    train(weights, optimizer, 0, 3)
    if dist.get_rank():
        return None
    found = [optimizer.state_dict(), optimizer.skipped(), optimizer.clipped(), diagnostics.scalars(optimizer)]
    return [len(found[0]["state"]), *found[1:]]


def test_one_rank_may_be_asked_alone(pools):  # noqa: F811
    first, second = pools[2].run(asked_of_one_rank)
    entries, skipped, clipped, scalars = first
    assert second is None
    assert entries == len(MATRICES) + len(VECTORS)
    assert skipped and not any(skipped.values()) and clipped.keys() == skipped.keys()
    assert scalars and all(np.isfinite(figure) for figure in scalars.values())


def sharded_model_with_ignored():
    """Train an FSDP2 model of which one weight is ignored, so plain: without a group, and divided."""
    found = []
    for group in (None, dist.group.WORLD):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).double()
        fully_shard(net, ignored_params={net[1].weight})
        weights = dict(net.named_parameters())
        assert [isinstance(p, DTensor) for p in weights.values()] == [True, False]
        train(weights, prokl.ProKLShampoo(weights.items(), rank=3, process_group=group), 0, 4)
        found.append(whole(weights))
    return found


def test_plain_weights_in_a_sharded_model_are_stepped_by_all_or_divided(pools):  # noqa: F811
    first, second = pools[2].run(sharded_model_with_ignored)
    for every, divided in (first, second):
        assert_close(divided, every)
    for one, other in zip(first, second, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def refusals():
    """Return what is said of everything that is refused."""
    mesh, world, found = mesh_of(1), dist.group.WORLD, {}
    partial = nn.Parameter(DTensor.from_local(value((4, 4), 1), mesh, [Partial()], run_check=False))
    found["partial"] = message(prokl.ProKLShampoo, [partial])
    plain = nn.Parameter(value((4, 6), 1))
    adamw = {"params": [partial], "algorithm": "adamw", "lr": 0.1}
    found["partial of AdamW"] = message(prokl.ProKLShampoo, [{"params": [plain]}, adamw])
    found["group"] = message(prokl.ProKLShampoo, [plain], process_group=4)
    divided = prokl.ProKLShampoo([plain], rank=2, process_group=world)
    found["copy"] = message(copy.deepcopy, divided)
    found["pickle"] = message(pickle.dumps, divided)
    net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)).double()
    zero = ZeroRedundancyOptimizer(net.parameters(), prokl.ProKLShampoo, lr=0.02, rank=2)
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        for p in net.parameters():
            p.grad = value(p.shape, p.numel())
        zero.step()
    found["moved by ZeRO"] = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]

    class Divided(prokl.ProKLShampoo):
        def __init__(self, params, **settings):
            super().__init__(params, process_group=world, **settings)

    zero = ZeroRedundancyOptimizer(net.parameters(), Divided, lr=0.02, rank=2)
    found["ZeRO"] = message(zero.step)
    flat = FullyShardedDataParallel(copy.deepcopy(net), use_orig_params=True, device_id=torch.device("cpu"))
    found["FSDP1"] = message(prokl.ProKLShampoo, flat.parameters())
    return found


def test_what_cannot_be_divided_is_refused_with_the_remedy(pools):  # noqa: F811
    expected = {
        "partial": ("ValueError", "placement Partial(sum)", "redistribute"),
        "partial of AdamW": ("ValueError", "placement Partial(sum)", "redistribute"),
        "group": ("TypeError", "got int", "torch.distributed.group.WORLD"),
        "copy": ("RuntimeError", "state_dict()"),
        "pickle": ("RuntimeError", "state_dict()"),
        "ZeRO": ("RuntimeError", "ZeroRedundancyOptimizer", "without process_group="),
        "FSDP1": ("ValueError", "fully_shard"),
    }
    for said in pools[2].run(refusals):
        assert said.pop("moved by ZeRO") == [True, True]
        assert said.keys() == expected.keys()
        for what, (error, *words) in expected.items():
            kind, text = said[what]
            assert kind == error and all(word in text for word in words), (what, text)


def test_a_process_group_is_asked_for_its_kind_without_any_rank():
    with pytest.raises(TypeError, match="process_group must be .* got str 'dp': pass torch.distributed.group.WORLD"):
        prokl.KLShampoo([], process_group="dp")
