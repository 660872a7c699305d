"""The descent inequality of the idealised algorithm and the rate that follows, on a problem with known constants.

f(W) = sum phi((A W B - Y)_ij) with phi(x) = x^2 / 2 (1 + x^2): not convex, at least 0, and 0 is attained. |phi''| <= 1
gives f(W + X) <= f(W) + <grad f, X> + ||A X B||_F^2 / 2, and ||A X B||_F is at most ||A||_F ||X||_op ||B||_op and
||A||_op ||X||_op ||B||_F: f is smooth in the operator norm with the smaller of their squares. |phi'| < 1/3 bounds the
gradient. The theorem's C, Theta and sigma_kl may be any bounds that hold along the run; these are read off it.
"""

from typing import NamedTuple

import pytest
import torch

from tests.theory import identity_state, normal
from tests.transcription import idealised_step, polar

M, N, R = 4, 7, 2
K_RANK = min(M, N - R)
ALPHA, FLOOR = 0.3, 0.5
"""alpha_kl, and 1/C^2 of the clip."""
LEFT, RIGHT = normal(5, M, seed=1) / 2, normal(N, 6, seed=2) / 2
TARGET = LEFT @ normal(M, N, seed=3) @ RIGHT
SMOOTHNESS = min(
    float(torch.linalg.matrix_norm(a) * torch.linalg.matrix_norm(b, 2)) ** 2 for a, b in ((LEFT, RIGHT), (RIGHT, LEFT))
)


def loss(W):
    E = LEFT @ W @ RIGHT - TARGET
    return float((E.square() / (2 * (1 + E.square()))).sum())


def gradient(W):
    E = LEFT @ W @ RIGHT - TARGET
    return LEFT.mT @ (E / (1 + E.square()).square()) @ RIGHT.mT


def start():
    """Weight and state; the state's eigenbases are those of its factors."""
    U = torch.linalg.qr(normal(N, R, seed=4))[0]
    return torch.zeros(M, N, dtype=torch.float64), identity_state(U, M)


def algorithm_1(W, G, state, lr, c_a, floor=FLOOR):
    """`idealised_step` with a refresh at every step, which keeps Q_S orthogonal, and the clip."""
    W, state = idealised_step(W, G, state, lr=lr, beta2=0.9, alpha_kl=ALPHA, c_a=c_a, refresh=True)
    return W, state | {key: state[key].clamp(min=floor) for key in ("lambda_L", "lambda_S", "mu")}


class Roots(NamedTuple):
    """The parts of a state that the update reads: L^-1/2, S^-1/2, U and I - U U^T."""

    L: torch.Tensor
    S: torch.Tensor
    U: torch.Tensor
    P_perp: torch.Tensor

    @staticmethod
    def of(state):
        U = state["U"]
        L, S = (Q @ values.rsqrt().diag() @ Q.mT for Q, values in
                ((state["Q_L"], state["lambda_L"]), (state["Q_S"], state["lambda_S"])))  # fmt: skip
        return Roots(L, S, U, torch.eye(N, dtype=torch.float64) - U @ U.mT)

    def update(self, G, c_a):
        """Delta W of eq. update."""
        return -ALPHA * self.L @ G @ self.U @ self.S @ self.U.mT - c_a * polar(self.L @ G @ self.P_perp)

    def subspace_size(self, G):
        """||L^-1/2 G U S^-1/2||_op^2, whose bound is sigma_kl^2."""
        return float(torch.linalg.matrix_norm(self.L @ G @ self.U @ self.S, 2)) ** 2


class Constants(NamedTuple):
    """C and Theta that hold for a state."""

    C: float
    theta: float

    @staticmethod
    def of(state):
        values = torch.cat([state["lambda_L"], state["lambda_S"], state["mu"][None]])
        return Constants(float(values.min()) ** -0.5, float(values.max()))


def descent_bound(grad, roots, constants, lr, c_a, subspace_size, sigma_F=0.0):
    """Right-hand side of eq. polar_descent."""
    complement = float(torch.linalg.matrix_norm(roots.L @ grad @ roots.P_perp, "nuc"))
    values, Q = torch.linalg.eigh(roots.L)
    subspace = float((Q @ values.sqrt().diag() @ Q.mT @ grad @ roots.U).square().sum())  # L^-1/4 on the left
    first = c_a / constants.C * complement + ALPHA / constants.theta**0.5 * subspace
    return -lr * first + 2 * lr * c_a * K_RANK**0.5 * sigma_F + lr**2 * SMOOTHNESS * (c_a**2 + ALPHA**2 * subspace_size)


def stationarity(grad, U, constants, c_a):
    """The measure on the left of eq. polar_conv."""
    P_perp = torch.eye(N, dtype=torch.float64) - U @ U.mT
    complement = float(torch.linalg.matrix_norm(grad @ P_perp, "nuc"))
    C, theta = constants
    return c_a / (C * theta**0.5) * complement + ALPHA / theta * float((grad @ U).square().sum())


def test_descent_the_problem_is_smooth_with_that_constant():
    ratios = []
    for seed in range(300):
        W, X = 2 * normal(M, N, seed=seed), normal(M, N, seed=1000 + seed)
        if seed % 2:  # the direction that stretches most: a polar factor, near the target, where phi'' = 1
            X = polar(LEFT.mT @ LEFT @ X @ RIGHT @ RIGHT.mT)
            W = torch.linalg.lstsq(LEFT, TARGET).solution @ torch.linalg.pinv(RIGHT)
        X = 0.01 * X
        rest = loss(W + X) - loss(W) - float((gradient(W) * X).sum())
        ratios.append(2 * rest / float(torch.linalg.matrix_norm(X, 2)) ** 2)
    assert SMOOTHNESS / 3 < max(ratios) <= SMOOTHNESS


@pytest.mark.parametrize("c_a", [1.0, 1.5])
@pytest.mark.parametrize("lr", [0.02, 0.2])
def test_descent_every_step_descends_as_the_proposition_says(lr, c_a):
    """Exact gradients, in the printed order: the update is made with the state that has just seen the gradient."""
    W, state = start()
    for t in range(200):
        grad, before = gradient(W), loss(W)
        W, state = algorithm_1(W, grad, state, 0.0, c_a)
        roots = Roots.of(state)
        W = W + lr * roots.update(grad, c_a)
        bound = descent_bound(grad, roots, Constants.of(state), lr, c_a, roots.subspace_size(grad))
        assert loss(W) - before <= bound + 1e-13
        if t == 0 and lr == 0.02:  # not for being loose: it promises more than half of what the step achieves
            assert bound < (loss(W) - before) / 2


def test_descent_the_update_made_here_is_algorithm_1s():
    """The tests take the update apart from the state, to put the clip in between; here there is none."""
    W, state = start()
    for _ in range(10):
        grad = gradient(W)
        after, new = algorithm_1(W, grad, state, 0.1, 1.5, floor=0.0)
        assert (W + 0.1 * Roots.of(new).update(grad, 1.5) - after).norm() < 1e-13
        W, state = after, new


def noises(t, sigma_F):
    """Four equally likely noises of mean zero and Frobenius norm sigma_F."""
    found = []
    for seed in (2 * t, 2 * t + 1):
        X = normal(M, N, seed=5000 + seed)
        X = sigma_F / X.norm() * X
        found += [X, -X]
    return found


@pytest.mark.parametrize("sigma_F", [0.01, 0.3])
def test_descent_the_expected_step_descends_as_proposed(sigma_F):
    """The expectation is a mean over four noises. The state is that of before the gradient, as the proof needs it."""
    lr, c_a = 0.05, 1.0
    W, state = start()
    for t in range(100):
        grad, before, roots = gradient(W), loss(W), Roots.of(state)
        draws = [grad + noise for noise in noises(t, sigma_F)]
        expected = sum(loss(W + lr * roots.update(G, c_a)) for G in draws) / 4 - before
        size = sum(roots.subspace_size(G) for G in draws) / 4
        assert expected <= descent_bound(grad, roots, Constants.of(state), lr, c_a, size, sigma_F) + 1e-13
        W = W + lr * roots.update(draws[t % 4], c_a)
        _, state = algorithm_1(W, draws[t % 4], state, 0.0, c_a)


def run(T, lr, c_a, sigma_F=0.0):
    """The theorem's algorithm: gradients and subspaces of all steps, and the constants that hold along the run."""
    W, state = start()
    seen, C, theta, size = [], 0.0, 0.0, 0.0
    for t in range(T):
        grad, roots, constants = gradient(W), Roots.of(state), Constants.of(state)
        C, theta = max(C, constants.C), max(theta, constants.theta)
        draws = [grad + noise for noise in noises(t, sigma_F)] if sigma_F else [grad]
        size = max(size, sum(roots.subspace_size(G) for G in draws) / len(draws))
        seen.append((grad, roots.U))
        G = draws[t * t % len(draws)]
        W = W + lr * roots.update(G, c_a)
        _, state = algorithm_1(W, G, state, 0.0, c_a)
    return seen, Constants(C, theta), size


@pytest.mark.slow
@pytest.mark.parametrize("c_a", [1.0, 1.5])
@pytest.mark.parametrize("sigma_F", [0.0, 0.02])
def test_descent_the_mean_stationarity_falls_as_the_theorem_says(sigma_F, c_a):
    """Runs have T, 4 T and 16 T steps, each with its own step size; the bound's first part halves each time.

    sigma_kl^2 is taken as 13 (any bound will do) and held against the run. With noise one sampled path stands for the
    expectation.
    """
    size = 13.0
    K = c_a**2 + ALPHA**2 * size
    start_loss = loss(start()[0])
    means = []
    for T in (60, 240, 960):
        lr = (start_loss / (T * SMOOTHNESS * K)) ** 0.5
        seen, constants, found = run(T, lr, c_a, sigma_F)
        assert found <= size
        measures = [stationarity(grad, U, constants, c_a) for grad, U in seen]
        bound = 2 * (start_loss * SMOOTHNESS * K / T) ** 0.5 + 2 * c_a * K_RANK**0.5 * sigma_F
        means.append(sum(measures) / T)
        assert means[-1] <= bound
    if not sigma_F:
        assert measures[0] > bound  # the last bound says something: it lies below where the run began
        assert means[2] < means[1] / 1.5 < means[0] / 2  # and the mean does fall
