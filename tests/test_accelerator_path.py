"""The path of devices whose values the host may not read has the same results and no host reads.

The path is chosen by ``is_host_readable``; saying no on a CPU runs it here. Tests of bad gradients on it are in
tests/test_bad_gradients.py.
"""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from prokl.engine.adamw import AdamWGroups
from tests.inputs import INF, NAN, ForbidHostReads, forbid_host_reads, normal, same_bits, step, weight
from tests.problems import VARIANTS, assert_runs_agree, gradient_stream, run
from tests.training import contents, differences

SHAPES = [(6, 10), (6, 10), (10, 6), (3, 6, 10), (8, 8), (12, 40)]
TAU = {"precondition_frequency": 3}
METHODS = [(ProKLShampoo, {"variant": v, "rank": 4, **TAU}) for v in VARIANTS] + [(KLShampoo, TAU)]


@pytest.fixture
def no_branching(monkeypatch):
    forbid_host_reads(monkeypatch)


READS = {
    "tolist": lambda t: t.tolist(),
    "of whole numbers": lambda t: t.long().tolist(),
    "item": lambda t: t.sum().item(),
    "a condition": lambda t: bool(t.any()),
    "cpu": lambda t: t.cpu(),
    "to the CPU": lambda t: t.to("cpu"),
    "numpy": lambda t: t.numpy(),
    "by a mask": lambda t: t[t > 0],
    "into a mask": lambda t: t.__setitem__(t > 0, 1.0),
    "nonzero": lambda t: t.nonzero(),
    "unique": lambda t: t.unique(),
    "masked_select": lambda t: t.masked_select(t > 0),
    "allclose": lambda t: torch.allclose(t, t),
    "repeats": lambda t: t.repeat_interleave(t.long()),
}


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_what_reads_a_device_is_seen_on_a_cpu(reads):
    with pytest.raises(AssertionError), ForbidHostReads():
        reads(torch.ones(3))


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_same_weights_and_state_in_float64(cls, kwargs, monkeypatch):
    def late(i, t):
        return (i == 1 and (t < 3 or t == 9)) or (i == 4 and t % 5 == 2)

    stream = gradient_stream(SHAPES, 12)
    for t, size in ((7, 1e5), (8, 1e-6), (10, 0.0)):  # bounded, tiny, none
        for i in (0, 3, 5):  # of a bucket some, the weight alone in its bucket, and a stack
            stream[t][i] *= size
    stream[9][0].fill_(NAN)  # beside one that is missing
    parameters, optimizer = plain = run(cls, stream, absent=late, **kwargs)
    forbid_host_reads(monkeypatch)
    assert_runs_agree(run(cls, stream, absent=late, **kwargs), plain, 1e-9)  # measured: 5e-14
    assert all(optimizer.state[parameters[i]]["clipped"].min() > 0 for i in (0, 3, 5))


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_no_host_read_once_every_weight_has_begun(cls, kwargs, no_branching):
    stream = gradient_stream(SHAPES, 8, dtype=torch.float32)
    parameters, optimizer = run(cls, stream[:1], dtype=torch.float32, **kwargs)
    for gradients in stream[1:]:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        with ForbidHostReads():
            optimizer.step()
    assert all(p.isfinite().all() for p in parameters)


def test_an_idle_expert_is_looked_at_in_every_tenth_step(no_branching):
    """After ten in each. It begins with its latest gradient, although it has none in the steps that are looked at.

    A run that is resumed meanwhile looks when the other does, and the other expert steps on.
    """
    looks, resumed = [], None
    for call in range(52):
        gradient = normal(2, 6, 10, seed=call) * torch.tensor([1.0, call >= 44 and call % 2 == 0]).view(2, 1, 1)
        if call == 0:
            p = weight(2, 6, 10)
            optimizer = ProKLShampoo([p], rank=4, **TAU)
        if call in (23, 47):
            q = torch.nn.Parameter(p.detach().clone())
            resumed = ProKLShampoo([q], rank=4, **TAU)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = p.detach().clone()
        p.grad = gradient
        try:
            with ForbidHostReads():
                optimizer.step()
        except AssertionError:  # nothing has moved yet
            optimizer.step()
            looks.append(call)
        if resumed is not None:
            step(resumed, [q], [gradient])
            assert same_bits(p, q) and torch.equal(*(o.state[w]["step"] for o, w in ((optimizer, p), (resumed, q))))
        moved = (p.detach() != before).flatten(1).any(dim=1).tolist()
        assert moved == [call > 0, call == 50]
        if call == 49:
            alone = weight(6, 10)
            begun = ProKLShampoo([alone], rank=4)
            step(begun, [alone], [normal(2, 6, 10, seed=48)[1]])
            own = optimizer.state[p]
            assert all(same_bits(own[k][1], v) for k, v in begun.state[alone].items() if k not in ("step", "skipped"))
    assert looks == [*range(10), 19, 29, 39, 49]
    assert optimizer.state[p]["step"].tolist() == [51, 2]


def test_idle_weights_are_looked_at_together(no_branching):
    """However far apart their first gradients were."""
    weights, looks = [weight(6, 10, seed=i) for i in range(4)], []
    optimizer = ProKLShampoo(weights, rank=4, **TAU)
    for call in range(45):
        for i, p in enumerate(weights):
            p.grad = normal(6, 10, seed=call) if i == 0 else torch.zeros(6, 10) if call >= 3 * i else None
        try:
            with ForbidHostReads():
                optimizer.step()
        except AssertionError:
            optimizer.step()
            looks.append(call)
    assert looks == [0, *range(3, 19), 22, 32, 42]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("amsgrad, lr", [(False, 0.1), (True, torch.tensor(0.1))], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 2e19])
def test_fused_adamw_stays_where_a_gradient_is_not_finite(no_branching, value, amsgrad, lr, apart):
    """Without a host read. All of a device stays, and by ranks each weight alone; the count names the bad one."""
    weights = {"matrix": weight(4, 6), "bad": weight(5), "half": weight(7, dtype=torch.bfloat16), "good": weight(3)}
    own = {"algorithm": "adamw", "lr": lr, "weight_decay": 0.1, "fused": True, "amsgrad": amsgrad}
    named = [*weights.items()]
    groups = [{"params": named[:1]}, {"params": named[1:3], **own}, {"params": [named[3], ("none", weight(0))], **own}]
    optimizer = ProKLShampoo(groups, rank=2)
    optimizer.engine.adamw.apart = apart
    for call in range(6):
        before = contents(optimizer)
        for i, (name, p) in enumerate(named):
            p.grad = normal(*p.shape, seed=10 * call + i, dtype=p.dtype)
            if call in (2, 3) and name == "bad":
                p.grad[2] = value
        with nullcontext() if call == 0 or isinstance(lr, torch.Tensor) else ForbidHostReads():  # lr is checked
            optimizer.step()
        moved = {i for i, key in differences(before, optimizer) if i in (1, 2, 3)} if call else {1, 2, 3}
        assert moved == ({1, 2, 3} if call not in (2, 3) else {2, 3} if apart else set())
    steps = {name: float(optimizer.state[p]["step"]) for name, p in named[1:]}
    assert steps == {"bad": 4.0, "half": 6.0 if apart else 4.0, "good": 6.0 if apart else 4.0}
    assert optimizer.skipped() == {"matrix": 0, "bad": 2}


def test_counts_of_fused_adamw_follow_their_weights_device():
    """Meta stands for it."""
    adamw, weights = AdamWGroups(), [weight(5).to("meta"), weight(3).to("meta")]
    adamw.skipped = {weights[0]: 2}  # as counted on a CPU
    for w in weights:
        w.grad = torch.empty_like(w)
    found = adamw.look({torch.device("meta"): {w: w.grad for w in weights}})
    assert {t.device for t in (*found.values(), *adamw.skipped.values())} == {weights[0].device}


@pytest.mark.parametrize("fused", [False, True])
def test_large_finite_gradients_step_adamw(fused, monkeypatch):
    """Those whose squares float16 does not hold, or the sum of whose squares float32 does not."""
    weights = [weight(4096, dtype=torch.float16), weight(2), weight(1000), weight(2, dtype=torch.float64)]
    group = {"params": weights, "algorithm": "adamw", "lr": 0.1, "eps": 1e-3, "fused": fused}
    sizes = 6e4, 1.3e19, 1e18, 1e25
    given = [normal(4, 6), *(torch.full_like(w, size) for w, size in zip(weights, sizes, strict=True))]
    if fused:
        forbid_host_reads(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ProKLShampoo([{"params": [weight(4, 6)]}, group], rank=2)
        step(optimizer, [w for g in optimizer.param_groups for w in g["params"]], given)
    assert [float(optimizer.state[w]["step"]) for w in weights] == [1.0] * 4
    assert not any("of group 1" in name for name in optimizer.skipped())


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"foreach": False}], ids=str)
def test_adamw_that_is_not_fused_does_as_pytorchs_does(no_branching, flags):
    p = weight(5)
    own = {"algorithm": "adamw", "lr": 0.1, **flags}
    optimizer = ProKLShampoo([{"params": [weight(4, 6)]}, {"params": [p], **own}], rank=2)
    p.grad = torch.full((5,), NAN)
    optimizer.step()
    assert p.isnan().all() and "parameter 0 of group 1" not in optimizer.skipped()
