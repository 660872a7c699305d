"""Vectors, odd sizes, convolutions and weights that are not contiguous, stored (in, out) or hold several matrices."""

import copy
import math

import pytest
import torch

from tests.inputs import BACKENDS, METHODS, NAN, PATHS, PRO, TAU, normal, same_bits, step, weight
from tests.training import contents, differences, refused, train

SHAPES = [
    (1, 7), (7, 1), (2, 2), (7, 13), (31, 2), (2, 3, 1), (3, 1, 4), (1, 4, 6), (4, 3, 2, 2), (8, 1, 1, 1),
    (1, 2, 3, 2), (4, 2, 2, 3, 2),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_work_on_both_paths_alike(method, shape):
    cls, kwargs = method
    m, n = sorted((shape[-2], shape[-1]) if len(shape) == 3 else (shape[0], math.prod(shape[1:])))
    # KL-Shampoo's R has at most m more dimensions a step: refreshed sooner, its null space is left to rounding.
    tau = TAU if cls is PRO else max(TAU, n // m)
    final = {}
    for backend in BACKENDS:
        w = weight(*shape, dtype=torch.float64)
        train(cls([w], backend=backend, precondition_frequency=tau, **kwargs), range(tau + 5))
        final[backend] = w.detach()
    moved = (final["reference"] - weight(*shape, dtype=torch.float64).detach()).norm()
    assert moved > 1e-5
    # Paths agree to 1e-13; Newton-Schulz multiplies the rounding of small singular values by 3.4 an iteration.
    assert (final["torch"] - final["reference"]).norm() < 1e-9 * moved


LAYOUTS = {
    "transposed": ((6, 4), lambda t: t.mT.contiguous().mT),
    "every other column": ((2, 4, 6), lambda t: torch.stack([t, t + 1], dim=-1).flatten(-2)[..., ::2]),
    "offset view": ((4, 3, 2, 2), lambda t: torch.cat([torch.ones(3, dtype=t.dtype), t.flatten()])[3:].view(t.shape)),
    "channels last": ((4, 3, 2, 2), lambda t: t.to(memory_format=torch.channels_last)),
    "channels last, 3-D": ((4, 3, 2, 2, 2), lambda t: t.to(memory_format=torch.channels_last_3d)),
}


@pytest.mark.parametrize("shape, arranged", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("path", BACKENDS)
def test_memory_layout_of_weight_and_gradient_does_not_matter(method, path, arranged, shape):
    cls, kwargs = method
    final = []
    for arrange in (torch.Tensor.contiguous, arranged):
        w = torch.nn.Parameter(arrange(weight(*shape).detach()))
        strides = w.stride()
        optimizer = cls([w], backend=path, **kwargs)
        for t in range(5):
            w.grad = arrange(normal(*shape, seed=t))
            optimizer.step()
        assert w.stride() == strides
        final.append(contents(optimizer))
    assert differences(*final) == set()


def test_a_sliced_weight_leaves_the_rest_of_its_storage_alone(method, path):
    cls, kwargs = method
    whole = normal(8, 12)
    before = whole.clone()
    w = torch.nn.Parameter(whole[2:6, ::2])
    train(cls([w], backend=path, **kwargs), range(3))
    inside = torch.zeros(8, 12, dtype=torch.bool)
    inside[2:6, ::2] = True
    assert torch.equal(whole[~inside], before[~inside])
    assert not torch.equal(whole[inside], before[inside])


# Weights stored (in, out), and weights that hold several


CALLS = 5  # with a refresh among them


def optimizer(method, backend, *groups):
    cls, kwargs = method
    return cls([*groups], weight_decay=0.1, precondition_frequency=TAU, backend=backend, **kwargs)


def named(weights, **keys):
    return {"params": [(str(i), p) for i, p in enumerate(weights)], **keys}


ORIENTED = ((6, 9), (9, 6), (7, 7), (2, 5, 8), (2, 6, 6))


def test_a_weight_stored_in_out_is_stepped_as_its_transpose(method, path):
    plain = [weight(*shape, seed=i) for i, shape in enumerate(ORIENTED)]
    stored = [torch.nn.Parameter(p.detach().mT.contiguous()) for p in plain]
    ours = optimizer(method, path, {"params": plain})
    theirs = optimizer(method, path, {"params": stored, "transposed": True})
    for call in range(CALLS):
        train(ours, [call])
        step(theirs, stored, [p.grad.mT.contiguous() for p in plain])
    for p, q in zip(plain, stored, strict=True):
        assert same_bits(p, q.mT)
        assert all(same_bits(ours.state[p][key], theirs.state[q][key]) for key in ("M_Q", "L_Q", "Q_L", "clipped"))


def test_a_transposed_convolution_maps_each_input_to_a_patch():
    # (in, out, k, k) flattened is (in, out k k), the transpose of that map: rows are 8 k k = 72, columns 4.
    p = weight(4, 8, 3, 3, seed=1)
    q = torch.nn.Parameter(p.detach().reshape(4, 72).mT.clone())
    optimizers = PRO([{"params": [p], "transposed": True}], rank=2), PRO([q], rank=2)
    for call in range(CALLS):
        train(optimizers[0], [call])
        step(optimizers[1], [q], [p.grad.reshape(4, 72).mT])
    assert same_bits(p.detach().reshape(4, 72).mT, q)


# fused weight, its group's keys, the shapes of its pieces
FUSED = {
    "three equal": ((18, 8), {"split": 3}, 3 * [(6, 8)]),
    "sizes": ((14, 8), {"split": (8, 3, 3)}, [(8, 8), (3, 8), (3, 8)]),
    "stored (in, out)": ((8, 14), {"split": (8, 3, 3), "transposed": True}, [(8, 8), (3, 8), (3, 8)]),
    "a stack": ((2, 10, 7), {"split": 2}, 2 * [(2, 5, 7)]),
    "a stack stored (in, out)": ((2, 7, 10), {"split": (4, 6), "transposed": True}, [(2, 4, 7), (2, 6, 7)]),
}


def parts(t, keys, shapes):
    along = t.mT if keys.get("transposed") else t
    return list(along.split([shape[-2] for shape in shapes], dim=-2))


# Every form on every path, and every method on two of them.
TURNS = [
    (*form, method, PATHS[(i + j) % len(PATHS)])
    for i, form in enumerate(FUSED.values())
    for j, method in enumerate(METHODS)
]
# In kernels both methods, each in two forms.
TURNS += [
    pytest.param(*form, method, "triton", marks=pytest.mark.slow)
    for i, form in enumerate(list(FUSED.values())[1:5])
    for method in [("pro-klshampoo", "klshampoo")[i % 2]]
]


@pytest.mark.parametrize("shape, keys, shapes, method, path", TURNS, indirect=["method", "path"])
def test_pieces_of_a_fused_weight_step_as_weights(shape, keys, shapes, method, path):
    whole, other = weight(*shape, seed=3), weight(*shapes[0], seed=4)
    own = [torch.nn.Parameter(t.clone()) for t in parts(whole.detach(), keys, shapes)]
    other_too = torch.nn.Parameter(other.detach().clone())
    ours = optimizer(
        method, path, named([whole, other], **{k: [v, (None, False)[k != "split"]] for k, v in keys.items()})
    )
    theirs = optimizer(method, path, {"params": [*own, other_too]})
    for call in range(CALLS):
        train(ours, [call])
        step(theirs, [*own, other_too], [*parts(whole.grad, keys, shapes), other.grad])
    for piece, p in zip(parts(whole.detach(), keys, shapes), own, strict=True):
        assert same_bits(piece, p)
    assert same_bits(other, other_too)
    for i, p in enumerate(own):
        mine = {key.removesuffix(f".{i}"): v for key, v in ours.state[whole].items() if key.endswith(f".{i}")}
        assert mine.keys() == theirs.state[p].keys()
        assert same_bits(mine["M_Q"], theirs.state[p]["M_Q"])


def test_a_piece_is_batched_with_other_weights_of_its_shape():
    opt = train(PRO([named([weight(18, 8), weight(6, 8)], split=[3, None])], rank=3), [0])
    (bucket,) = opt.engine.buckets
    assert bucket.layout.count == 4


def test_a_non_finite_piece_of_a_gradient_leaves_its_piece(method, path):
    p = weight(18, 8)
    opt = train(optimizer(method, path, {"params": [p], "split": 3}), range(3))
    (before,), g = contents(opt), normal(18, 8, seed=50)
    g[7, 2] = NAN
    step(opt, [p], [g])
    (after,) = contents(opt)
    assert same_bits(before["W"][6:12], after["W"][6:12]) and same_bits(before["M_Q.1"], after["M_Q.1"])
    assert not torch.equal(before["W"][:6], after["W"][:6]) and not torch.equal(before["W"][12:], after["W"][12:])
    assert opt.skipped() == {"parameter 0 of group 0": 1}


@pytest.mark.parametrize(
    "shape, keys, message",
    {
        "split that does not divide": ((18, 8), {"split": 4}, r"split=4 .*output dimension 18"),
        "sizes that do not add up": ((18, 8), {"split": (8, 3)}, r"split=\(8, 3\) .*output dimension 18"),
        "a size of zero": ((18, 8), {"split": (18, 0)}, r"split=\(18, 0\)"),
        "a bool": ((18, 8), {"split": True}, "split=True"),
        "of the other side": ((18, 8), {"split": 9, "transposed": True}, "output dimension 8"),
        "pieces of one element": ((3, 1), {"split": 3}, "a piece would be 1x1"),
        "a convolution": ((6, 2, 3, 3), {"split": 2}, "convolution"),
        "transposed is no bool": ((18, 8), {"transposed": "in, out"}, "transposed='in, out'"),
        "a list of another length": ((18, 8), {"split": [3, 3]}, "one entry for each of the group's 1 weights"),
    }.values(),
)
def test_a_layout_that_does_not_fit_is_refused_by_name(shape, keys, message):
    with pytest.raises(ValueError, match=message):
        PRO([named([weight(*shape)], **keys)])


def test_a_list_for_unnamed_weights_is_refused():
    with pytest.raises(ValueError, match="trainers reorder weights without names"):
        PRO([{"params": [weight(18, 8)], "split": [3]}])


def test_a_list_that_two_groups_are_given_is_not_shared():
    lists = {"split": [3, None]}
    first, second = ([weight(18, 8, seed=s), weight(6, 9, seed=s + 1)] for s in (0, 2))
    opt = PRO([named(first, **lists)], rank=3)
    opt.add_param_group({"params": [("c", second[0]), ("d", second[1])], **lists})
    del opt.param_groups[0]["params"][0], opt.param_groups[0]["split"][0], opt.param_groups[0]["param_names"][0]
    train(opt, [0])
    assert opt.param_groups[1]["split"] == lists["split"] == [3, None]


@pytest.mark.parametrize("saved, here", [(3, None), (None, 3), (3, 2)])
def test_the_state_of_another_split_is_refused(saved, here):
    opt, other = (PRO([{"params": [weight(18, 8)], "split": split}], rank=3) for split in (saved, here))
    state = copy.deepcopy(train(opt, [0]).state_dict())
    state["param_groups"] = other.state_dict()["param_groups"]
    with refused(other, r"parameter 0 of group 0.* where ProKLShampoo needs"):
        other.load_state_dict(state)


def test_a_weight_reshaped_under_its_state_is_named_first():
    p, q = weight(8, 8), weight(8, 12, seed=1)
    opt = train(PRO([p, q], rank=3), range(3))
    p.data, p.grad = p.data[:4].clone(), None
    with refused(opt, r"shape=\(4, 8\).* parameter 0 .*made with shape=\(8, 8\).*optimizer.state.pop"):
        train(opt, [3])
    opt.state.pop(p)
    train(opt, [3])
    assert opt.state[p]["step"] == 0 and opt.state[p]["M_Q"].shape == (4, 8)
