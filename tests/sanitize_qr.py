"""A small set of calls for compute-sanitizer: ``compute-sanitizer --tool racecheck python -m tests.sanitize_qr``.

Every kernel runs: one block and several, splits, shifts, the tree of leaves and the fallback in global memory.
"""

import torch

from prokl.backends import cuda_qr
from tests.qr_bounds import assert_is_qr
from tests.qr_problems import CLASSES

CALLS = [
    ("qr", "random", (2, 300, 20)),
    ("qr", "zero column", (2, 600, 9)),  # leaves and their tree
    ("qr", "zero", (1, 140, 131)),  # wider than a leaf
    ("tracking", "condition 1e+04, moving", (2, 200, 130)),
    ("tracking", "rank-deficient, fresh", (2, 90, 12)),
    ("semidefinite", "condition 1e+04, moving", (2, 140, 140)),
    ("semidefinite", "rank-deficient, fresh", (2, 20, 20)),
]


def main(device: str = "cuda") -> None:
    functions = {"qr": cuda_qr.qr, "tracking": cuda_qr.tracking_qr, "semidefinite": cuda_qr.semidefinite_qr}
    for dtype in (torch.float32, torch.float64):
        for operation, name, size in CALLS:
            inputs = CLASSES[operation][name](*size, dtype, torch.Generator().manual_seed(0))
            Q = functions[operation](*(t.to(device) for t in inputs)).Q
            assert_is_qr(operation, inputs, Q.cpu())
            functions[operation](*(t.to(device) / 0 for t in inputs))  # not finite
            print(operation, name, size, dtype, "is a QR", flush=True)


if __name__ == "__main__":
    main()
