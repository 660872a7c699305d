"""``cautious_weight_decay``: only elements that a step does not grow are decayed (arXiv:2510.12402), by the kernels.

tests/test_bounded_step.py holds the reference and the batched step to the transcription.
"""

import pytest
import torch

from prokl.kernels.apply import apply
from tests.inputs import normal
from tests.test_apply import DEVICE, GUARD
from tests.test_stack import FEW, Bucket

LR, DECAY = 0.25, 0.5


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_the_kernel_decays_as_written(dtype, after, cautious):
    bucket = Bucket(37, 70, dtype, FEW)
    W = bucket.dense().double()
    D = normal(*W.shape, seed=3, dtype=dtype).to(DEVICE)
    D[:, ::5] = 0  # neither sign: decays
    live = torch.arange(len(W), device=DEVICE) != 1
    D[~live] = torch.nan
    lr, decay = (torch.full((1,), value, dtype=torch.float64, device=DEVICE) for value in (LR, DECAY))
    options = {"decay_after": after, "cautious_decay": cautious, "active": live}
    apply(bucket.table, D, dtype=dtype, lr=lr, weight_decay=decay, **options)
    D, keep = D.double(), 1 - LR * DECAY
    on = W - LR * D if after else W
    expected = torch.where(D * on >= 0, keep * on, on) if cautious else keep * on
    expected = expected if after else expected - LR * D
    expected[~live], D[~live] = W[~live], 0.0
    # A step to about zero may come out on either side of it, where the decay is as small. Then one rounding.
    given, u = bucket.given(), torch.finfo(dtype).eps
    bound = u * expected.abs() + 4 * max(torch.finfo(torch.float64).eps, min(u, 2**-23)) * (W.abs() + D.abs())
    assert ((bucket.dense().double() - expected).abs() <= bound)[given].all()
    assert torch.equal(bucket.dense()[~live].double(), W[~live])
    assert (bucket.outside() == GUARD).all()
