"""The gate before every timing: results are compared with float64 first, and nothing wrong is timed."""

from collections.abc import Sequence

import torch
from torch import Tensor

FACTOR = 4
"""Largest ratio of a form's error to that of the plain form in the same dtype and precision, both against float64.
Sums in another order and TF32 in three parts make up to about twice the error, whole steps 0.5 to 1.2 times it
(measured on a CPU); a wrong index or a lost part makes thousands of times it. Where Newton-Schulz is in half precision
its rounding hides what is smaller.

Of a balanced form the plain one is PyTorch's of the same pairs. A pair loses up to 2^-17 of a number, and a product of
two up to 2^-16 of its terms besides; of normal numbers that is 2^-18.5 each in norm, and 2^-17.8 of a product, tens of
times what float32 loses. Both forms lose it, in the same halves, so that their ratio is that of forms in float32."""
CUT_OFF = 16
"""The same of results in float32 on a GPU, whose sums tensor cores cut off, all one way. Energies of rows made 5.6
times the error on an H200, from products 768 deep."""


def distance(x: Tensor, truth: Tensor) -> float:
    """Return how far ``x`` is from ``truth``, relative to it in norm; nan where a shape differs or x is not finite."""
    if x.shape != truth.shape:
        return float("nan")
    return (torch.linalg.vector_norm(x.double() - truth) / torch.linalg.vector_norm(truth)).item()


def complaint(found: Sequence[Tensor], usual: Sequence[Tensor], truth: Sequence[Tensor]) -> str:
    """Say what is wrong with results, given the plain form's in the same dtypes and in float64; "" if nothing is."""
    for x, y, t in zip(found, usual, truth, strict=True):
        factor = CUT_OFF if x.dtype == torch.float32 and x.is_cuda else FACTOR
        error, allowed = distance(x, t), factor * (distance(y, t) + torch.finfo(x.dtype).eps)
        if not error <= allowed:  # nan is wrong
            return f"error {error:.1e} in {str(x.dtype).removeprefix('torch.')}, may be {allowed:.1e}"
    return ""


def disagreement(found: Sequence[Tensor], truth: Sequence[Tensor], most: float) -> str:
    """Say by how much two forms in float64, where one confirms the other, are more than ``most`` apart; "" if not."""
    apart = [distance(x, t) for x, t in zip(found, truth, strict=True)]
    wrong = [a for a in apart if not a <= most]
    return f"{wrong[0]:.1e} from the reference in float64, may be {most:g}" if wrong else ""
