"""Products as tensor cores make them: of TF32 or bfloat16 parts, in float32 sums that are cut off, not rounded."""

import torch

from prokl.algorithm.algebra import Algebra, Projected
from prokl.backends.torch_pairs import PairedAlgebra
from prokl.pair import Pair, parts

TF32, BF16 = 8, 16
"""Depths of one instruction, after which the sum is cut off."""
DEPTH = 32
"""Depth of the tiles of a product, after which a sum of float32's parts is added to the whole."""


def tf32(x):
    """Rounded to ten bits behind the first."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def truncated(x):
    """Float64 numbers cut to float32 towards zero."""
    y = x.float()
    return torch.where(y.double().abs() > x.abs(), torch.nextafter(y, torch.zeros_like(y)), y)


def three(A, B):
    """The products of TF32 parts that stand for A B, in the compiler's order."""
    A, B = A.contiguous(), B.contiguous()
    A_hi, B_hi = tf32(A), tf32(B)
    return [(tf32(A - A_hi), B_hi), (A_hi, tf32(B - B_hi)), (A_hi, B_hi)]


def accumulated(whole, factors, step):
    """Add products to a sum as tensor cores do, one after another, each a step at a time."""
    for left, right in factors:
        for k in range(0, left.shape[-1], step):
            more = left[..., k : k + step].double() @ right[..., k : k + step, :].double()
            whole = truncated(whole.double() + more)
    return whole


def summed(factors, step, depth):
    """Add up products, all of so much depth at a time from zero, which is rounded to the whole then."""
    left, right = factors[0]
    whole = torch.zeros(*left.shape[:-1], right.shape[-1])
    for k in range(0, left.shape[-1], depth):
        block = [(a[..., k : k + depth], b[..., k : k + depth, :]) for a, b in factors]
        whole = whole + accumulated(torch.zeros_like(whole), block, step)
    return whole


def product(A, B, depth=DEPTH):
    """A B of float32 or of a pair and what stands beside it."""
    if isinstance(A, Pair) or isinstance(B, Pair):
        return summed(parts(A, B), BF16, depth)
    return summed(three(A, B), TF32, depth)


def dot(self, a, b, d, precision, _):
    """Multiply in place of the create_dot of Triton's interpreter: bfloat16 numbers as such, others as TF32.

    The halves of a pair are float32 there.
    """
    x, y, z = (torch.from_numpy(t.data) for t in (a, b, d))
    halves = all(not (t.view(torch.int32) & 0xFFFF).any() for t in (x, y))
    z = accumulated(z, [(x, y)], BF16) if halves else accumulated(z, [(tf32(x), tf32(y))], TF32)
    return type(d)(z.numpy(), d.dtype.scalar)


class TensorCores(Algebra):
    """PyTorch's operations over such products."""

    def product(self, left, right, /, *, C=None, alpha=1.0, beta=1.0):
        # One loop over the depth for each part of a pair.
        D = product(left, right, left.shape[-1] if isinstance(left, Pair) or isinstance(right, Pair) else DEPTH)
        D = D * (alpha[:, None, None] if isinstance(alpha, torch.Tensor) else alpha)
        return D if C is None else D + beta * C

    def symmetric_product(self, A, /, **kwargs):
        return self.product(A, A.mT, **kwargs)

    def projections(self, G, M, U, Q_S):
        from prokl.kernels.project import choose_tile

        paired = isinstance(U, Pair)
        depth = choose_tile(U.shape[-1], torch.float32, paired=paired).k
        G, M = (product(Pair.split(X) if paired else X, U, depth) for X in (G, M))
        return Projected(G, M, self.product(G, Q_S), self.product(M, Q_S), self.operand(G))


class PairedTensorCores(TensorCores, PairedAlgebra):
    """The same with pairs."""
