"""Products as tensor cores make them of float32: three of TF32 parts, in sums that are truncated, not rounded."""

import torch

from prokl.backends.torch_ops import TorchPrimitives

DEPTH, STEP = 32, 8
"""Depths after which a sum of the three is added to the whole, and after which it is truncated."""


def tf32(x):
    """Rounded to ten bits behind the first."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def truncated(x):
    """Float64 numbers cut to float32 towards zero."""
    y = x.float()
    return torch.where(y.double().abs() > x.abs(), torch.nextafter(y, torch.zeros_like(y)), y)


def product(A, B):
    A, B = A.contiguous(), B.contiguous()
    A_hi, B_hi = tf32(A), tf32(B)
    parts = ((tf32(A - A_hi), B_hi), (A_hi, tf32(B - B_hi)), (A_hi, B_hi))
    whole = torch.zeros(*A.shape[:-1], B.shape[-1])
    for k in range(0, A.shape[-1], DEPTH):
        block = torch.zeros_like(whole)
        for left, right in parts:
            for q in range(k, min(A.shape[-1], k + DEPTH), STEP):
                more = left[..., q : q + STEP].double() @ right[..., q : q + STEP, :].double()
                block = truncated(block.double() + more)
        whole = whole + block
    return whole


class TensorCores(TorchPrimitives):
    """PyTorch's primitives over such products."""

    def product(self, left, right, /, *, C=None, alpha=1.0, beta=1.0):
        D = product(left, right) * (alpha[:, None, None] if isinstance(alpha, torch.Tensor) else alpha)
        return D if C is None else D + beta * C

    def symmetric_product(self, A, /, **kwargs):
        return self.product(A, A.mT, **kwargs)

    def congruence(self, L, Q):
        A = product(L, Q)
        return product(Q.mT, A), A
