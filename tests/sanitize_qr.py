"""A small set of calls for compute-sanitizer: ``compute-sanitizer --tool racecheck python -m tests.sanitize_qr``.

Every kernel runs: one block and several, sums, shifts, and Householder's QR in shared and in global memory. The
products are PyTorch's, as Triton's would be compiled while the sanitizer looks on.
"""

import torch

from prokl.algorithm.algebra import Algebra
from prokl.backends import cuda_qr
from tests.qr_bounds import assert_is_qr
from tests.qr_forms import pieces
from tests.qr_problems import draw

CALLS = [
    ("qr", "random", (2, 60, 20)),
    ("qr", "condition 1e+06", (2, 2100, 20)),  # a sum of Gram matrices
    ("qr", "zero column", (2, 300, 100)),  # in global memory
    ("qr", "zero", (1, 140, 131)),
    ("tracking", "condition 1e+04, moving", (2, 200, 130)),
    ("tracking", "rank-deficient, fresh", (2, 90, 12)),
    ("refresh", "condition 1e+04, moving", (2, 140, 140)),
    ("refresh", "rank-deficient, fresh", (2, 20, 20)),
    ("refresh", "rank-deficient, fresh", (2, 150, 150)),
]


PRODUCTS = Algebra(host_readable=False)
FUNCTIONS = {
    "qr": lambda A: cuda_qr._factorised(PRODUCTS, A, None),
    "tracking": lambda *inputs: cuda_qr.track(PRODUCTS, *pieces(*inputs)),
    "refresh": lambda L: cuda_qr.semidefinite_qr(PRODUCTS, L),
}


def main(device: str = "cuda") -> None:
    for dtype in (torch.float32, torch.float64):
        for operation, name, size in CALLS:
            inputs = draw(operation, name, size, dtype)
            function = FUNCTIONS[operation]
            Q = function(*(t.to(device) for t in inputs)).Q
            assert_is_qr(operation, inputs, Q.cpu())
            function(*(t.to(device) / 0 for t in inputs))  # not finite
            print(operation, name, size, dtype, "is a QR", flush=True)


if __name__ == "__main__":
    main()
