"""The cases of batched QR: problems of their kind, every form is a QR of them, and what is none is found."""

import math

import pytest
import torch

from bench.costs import terms
from bench.micro.case import FP32, Sizes
from bench.micro.checks import Numbers, complaint
from bench.micro.qr_cases import BACKWARD, ORTHOGONALITY, REFRESH, TRACKING, deviations
from prokl.qr import householder_qr

SIZES = Sizes(3, 12, 40, 8)
CASES = [TRACKING, REFRESH, TRACKING.counterpart, REFRESH.counterpart]


def inputs(case, size=SIZES):
    return lambda: case.inputs(size, FP32, Numbers(torch.device("cpu")))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_form_is_a_qr_within_the_bounds(case):
    assert complaint(case, case.torch, inputs(case)) == complaint(case, case.plain, inputs(case)) == ""


@pytest.mark.parametrize("case", [TRACKING, REFRESH], ids=lambda case: case.name)
def test_the_extension_is_a_qr_within_the_bounds(case, extension_on_cpu):
    assert complaint(case, lambda i: case.call(i, None), inputs(case)) == ""


def test_the_extension_says_why_it_cannot_run():
    assert TRACKING.obstacle(torch.device("cpu")) and REFRESH.obstacle(torch.device("cpu"))


def gram(Q):
    return torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(Q.shape[-1], dtype=Q.dtype))


def test_problems_are_of_their_kind():
    V, K, U = (t.double() for t in inputs(TRACKING)().values())
    assert V.shape == U.shape == (3, 40, 8) and not torch.equal(V[0], V[1])
    assert torch.linalg.matrix_norm(K - U.mT @ V).max() < 1e-5 * torch.linalg.matrix_norm(K).max()
    L, Q_L, S, Q_S = (t.double() for t in inputs(REFRESH)().values())
    assert L.shape == (3, 12, 12) and S.shape == (3, 8, 8) and not torch.equal(L[0], L[1])
    for symmetric in (K, L, S):
        assert torch.equal(symmetric, symmetric.mT) and (torch.linalg.eigvalsh(symmetric) > 0).all()
    for A in (V, L @ Q_L, S @ Q_S):
        assert ((100 < torch.linalg.cond(A)) & (torch.linalg.cond(A) < 1e5)).all()
    assert gram(U).max() < 1e-5 and gram(Q_L).max() < 1e-5
    assert gram(Q_S).min() > 0.01  # between refreshes it is no basis
    assert [t.shape[1:] for t in inputs(REFRESH.counterpart)().values()] == [(12, 12)] * 2 + [(40, 40)] * 2


def test_the_floors_count_a_product_and_one_cholesky_pass_as_those_of_steps_do():
    def least(kind, m, n, r):
        return sum(t.least for t in terms("pro-klshampoo", "least", m, n, r) if t.kind == kind)

    tracking, refresh = (case.flops(SIZES) / SIZES.B for case in (TRACKING, REFRESH))
    assert tracking == pytest.approx(2 * 40 * 8**2 + 8**3 / 3, rel=1e-12)
    assert refresh == pytest.approx(sum(2 * k**3 + 2 * k**3 + k**3 / 3 for k in (12, 8)), rel=1e-12)
    products = 2 * 12**3 + 2 * 8**3
    assert tracking + refresh == pytest.approx(least("factorisation", 12, 40, 8) + products, rel=1e-12)


WRONG = {
    "orthogonality": lambda Q: 1.001 * Q,
    "backward error": lambda Q: Q.flip(-1),
    "diagonal": lambda Q: -Q,
    "orthogonality nan": lambda Q: Q * math.nan,
    "shape": lambda Q: Q[..., :-1],
}


@pytest.mark.parametrize("reason", WRONG)
@pytest.mark.parametrize("case", [TRACKING, REFRESH], ids=lambda case: case.name)
def test_what_is_no_qr_is_found(case, reason):
    def run(i):
        right = case.plain(i)
        return WRONG[reason](right) if case is TRACKING else [right[0], WRONG[reason](right[1])]

    found = complaint(case, run, inputs(case))
    assert reason in found and found.startswith("Q_S: " if case is REFRESH else "")


def test_the_worst_matrix_of_a_batch_counts_in_units_of_k_eps():
    g = torch.Generator().manual_seed(0)
    A = torch.randn(3, 20, 5, generator=g, dtype=torch.float64)
    Q = householder_qr(A)
    unit = 5 * torch.finfo(torch.float64).eps
    assert deviations(A, Q) == ""
    for factor, fine in ((0.9, True), (1.1, False)):
        # Q^T Q - I of one stretched column c is c^2 - 1 in one place.
        stretched = Q.clone()
        stretched[1, :, 2] *= 1 + factor * ORTHOGONALITY * unit / 2
        assert ("orthogonality" not in deviations(A, stretched)) == fine
        off = A.clone()
        # A change at right angles to Q's columns is no part of Q R.
        away = torch.linalg.svd(Q[2], full_matrices=True)[0][:, -1]
        off[2, :, 4] += factor * BACKWARD * unit * torch.linalg.matrix_norm(A[2]) * away
        assert ("backward" not in deviations(off, Q)) == fine
