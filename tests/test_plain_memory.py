"""Weights and gradients that are no plain memory: stepped as what they stand for, or refused by name, unmoved.

The kernels go by addresses, where a lazily negated tensor has the opposite values and a wrapper nothing.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from tests.inputs import BACKENDS, KL, PRO, assert_nothing_moved, everything, normal, same_bits, step, weight

METHODS = [(PRO, {"rank": 3}), (KL, {})]
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the weights are on the CPU")
ALL_BACKENDS = [*BACKENDS, pytest.param("triton", marks=[ON_CPU, pytest.mark.slow])]


def built(cls, kwargs, backend, calls=2, **settings):
    weights = [weight(4, 6), weight(6, 4, seed=1), weight(5, seed=2)]
    groups = [{"params": [("fine", weights[0]), ("odd", weights[1])], "backend": backend, **settings}]
    groups.append({"params": [("bias", weights[2])], "algorithm": "adamw", "lr": 0.1})
    optimizer = cls(groups, **kwargs)
    for call in range(calls):
        step(optimizer, weights, gradients(weights, call))
    return optimizer, weights


def gradients(weights, call):
    return [normal(*p.shape, seed=10 * call + i, dtype=p.dtype) for i, p in enumerate(weights)]


def imaginary(G):
    """G as autograd gives it: the gradient of an imaginary part whose conjugate was taken."""
    w = torch.zeros_like(G, requires_grad=True)
    product = torch.complex(torch.zeros_like(G), w).conj() * torch.complex(torch.zeros_like(G), G)
    (g,) = torch.autograd.grad(product.real.sum(), w)
    assert g.is_neg() and torch.equal(g, G)
    return g


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("lazy", [lambda G: torch._neg_view(-G), imaginary], ids=["by hand", "by autograd"])
@pytest.mark.parametrize("shape", ["matrix", "pieces"])
def test_a_lazily_negated_gradient_steps_as_its_values_do(cls, kwargs, backend, lazy, shape):
    settings = {} if shape == "matrix" else {"split": 2}
    (one, weights), (two, twins) = (built(cls, kwargs, backend, calls=0, **settings) for _ in range(2))
    for call in range(4):
        for p, q, G in zip(weights, twins, gradients(weights, call), strict=True):
            p.grad, q.grad = G, lazy(G) if call % 2 else G.clone()  # one that had been plain, too
        one.step()
        two.step()
        assert all(map(same_bits, weights, twins)), call
        assert all(q.grad.is_neg() for q in twins) or call % 2 == 0  # the gradient is the caller's


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def fake(t):
    with FakeTensorMode() as mode:
        return mode.from_tensor(t)


def functional(t):
    kept = []
    torch.func.functionalize(lambda x: kept.append(x) or x + 1)(t)
    return kept[0]


class Logged(torch.Tensor):
    """Has memory of its own, and yet says by itself what an operation is."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


NOT_PLAIN = {
    "two": (lambda t: TwoTensor(t.clone(), t.clone()), "TwoTensor, which stands for other tensors"),
    "fake": (fake, "FakeTensor, which stands for other tensors"),
    "functional": (functional, "without memory of its own"),
    "freed": (freed, "without memory of its own"),
    "a class of its own": (
        lambda t: torch.Tensor._make_subclass(Logged, t.clone()),
        "Logged, which stands for other tensors",
    ),
}


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("make, says", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_a_gradient_without_memory_is_refused_by_name_before_anything_moves(cls, kwargs, backend, make, says, calls):
    optimizer, weights = built(cls, kwargs, backend, calls)
    given = gradients(weights, 5)
    for p, G in zip(weights, given, strict=True):
        p.grad = G
    weights[1].grad = make(given[1])
    before = everything(optimizer)
    with pytest.raises(ValueError, match=f"^odd has a gradient .*{says}.*plain tensor"):
        optimizer.step()
    if calls:
        assert_nothing_moved(before, optimizer)
    weights[1].grad = given[1]
    optimizer.step()
    other, twins = built(cls, kwargs, backend, calls)
    step(other, twins, given)
    assert all(map(same_bits, weights, twins))


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("make, says", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_a_gradient_without_memory_of_a_plain_adamw_weight_is_refused_before_anything_moves(cls, kwargs, make, says):
    optimizer, weights = built(cls, kwargs, None)
    given = gradients(weights, 5)
    for p, G in zip(weights, given, strict=True):
        p.grad = G
    weights[2].grad = make(given[2])
    before = everything(optimizer)
    with pytest.raises(ValueError, match=f"^bias has a gradient .*{says}.*plain tensor"):
        optimizer.step()
    assert_nothing_moved(before, optimizer)


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("make, says", NOT_PLAIN.values(), ids=NOT_PLAIN)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_weight_without_memory_is_refused_when_its_group_is_made(cls, kwargs, make, says, backend):
    optimizer, _ = built(cls, kwargs, backend)
    groups = repr(optimizer)
    odd = make(normal(4, 6)).requires_grad_()
    group = {"params": [("new", odd)]}
    for attempt in (lambda: cls([dict(group)], backend=backend), lambda: optimizer.add_param_group(group)):
        with pytest.raises(ValueError, match=f"^new is a tensor .*{says}.*AdamW group"):
            attempt()
    assert repr(optimizer) == groups


def test_a_weight_that_is_negated_in_name_alone_is_refused_with_the_way_out():
    W = torch.nn.Parameter(torch._neg_view(normal(4, 6)))
    with pytest.raises(ValueError, match=r"a negation that is still to do.*p\.resolve_neg\(\)"):
        PRO([W])
    PRO([torch.nn.Parameter(W.detach().resolve_neg())])


def swapped(p):
    torch.utils.swap_tensors(p, torch.nn.Parameter(TwoTensor(p.detach().clone(), p.detach().clone())))


def negated(p):
    p.data = torch._neg_view(-p.data)


def emptied(p):
    p.untyped_storage().resize_(0)


def expanded(p):
    p.data = p.data[:1].expand(p.shape)


LATER = {
    "swapped": (swapped, "TwoTensor"),
    "negated": (negated, "negation"),
    "expanded": (expanded, "several elements"),
}
LATER["freed"] = (emptied, "without memory")


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("change, says", LATER.values(), ids=LATER)
def test_a_weight_that_loses_its_memory_later_is_told_before_another_moves(cls, kwargs, backend, change, says):
    optimizer, weights = built(cls, kwargs, backend)
    others = [weights[0].detach().clone(), weights[2].detach().clone()]
    change(weights[1])
    for p, G in zip(weights, gradients(weights, 5), strict=True):
        p.grad = G
    with pytest.raises(ValueError, match=f"^odd (is|has) .*{says}"):
        optimizer.step()
    assert torch.equal(weights[0], others[0]) and torch.equal(weights[2], others[1])


def test_a_gradient_left_from_another_shape_of_its_weight_is_told_before_anything_moves():
    """The fused AdamW would read past the end of it."""
    optimizer, weights = built(PRO, {}, None, calls=0)
    for p, G in zip(weights, gradients(weights, 5), strict=True):
        p.grad = G
    for i, name in ((1, "odd"), (2, "bias")):
        whole = weights[i].data
        weights[i].data = torch.cat([whole, whole])
        before = everything(optimizer)
        with pytest.raises(ValueError, match=rf"^{name} .* and its gradient .* of shape .*zero_grad\(\)"):
            optimizer.step()
        assert_nothing_moved(before, optimizer)
        weights[i].data = whole


def test_a_complex_gradient_of_a_real_weight_is_refused():
    optimizer, weights = built(PRO, {}, None)
    for p, G in zip(weights, gradients(weights, 5), strict=True):
        p.grad = G
    weights[1].grad_dtype = None
    weights[1].grad = torch.complex(weights[1].grad, weights[1].grad)
    before = everything(optimizer)
    with pytest.raises(ValueError, match="^odd .* its gradient torch.complex64"):
        optimizer.step()
    assert_nothing_moved(before, optimizer)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_gradient_of_another_real_dtype_is_taken_in_the_weights(backend):
    (one, weights), (two, twins) = (built(PRO, {}, backend) for _ in range(2))
    for p, q, G in zip(weights[:2], twins[:2], gradients(weights, 5), strict=False):
        p.grad, q.grad_dtype = G, None
        q.grad = G.double()
    one.step()
    two.step()
    assert all(map(same_bits, weights, twins))


def test_a_wrapper_in_an_adamw_group_steps_as_under_torchs():
    """Whose operations it says by itself what they are."""
    wrapped = [torch.nn.Parameter(TwoTensor(normal(4, 6), normal(4, 6, seed=1))) for _ in range(2)]
    matrix = weight(4, 6)
    ours = PRO([{"params": [matrix]}, {"params": wrapped[:1], "algorithm": "adamw", "lr": 0.1, "betas": (0.9, 0.999)}])
    theirs = torch.optim.AdamW(wrapped[1:], lr=0.1, weight_decay=0.0)
    for call in range(3):
        matrix.grad = normal(4, 6, seed=call)
        for p in wrapped:
            p.grad = TwoTensor(normal(4, 6, seed=call), normal(4, 6, seed=10 + call))
        ours.step()
        theirs.step()
    assert same_bits(wrapped[0].a, wrapped[1].a) and same_bits(wrapped[0].b, wrapped[1].b)
    assert not torch.equal(wrapped[0].a, normal(4, 6))


@pytest.mark.parametrize("cls, kwargs", METHODS)
@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
def test_a_lazy_weight_is_refused_by_name_with_the_way_out(cls, kwargs, algorithm):
    lazy = torch.nn.LazyLinear(6)
    optimizer, _ = built(cls, kwargs, None)
    group = {"params": [("up", lazy.weight)], "algorithm": algorithm, "lr": 0.1}
    for attempt in (lambda: cls([group]), lambda: optimizer.add_param_group(dict(group))):
        with pytest.raises(ValueError, match="^up has no shape yet; run one forward pass through its lazy module"):
            attempt()
    lazy(torch.zeros(1, 4))
    optimizer.add_param_group(dict(group))
