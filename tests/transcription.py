"""Both methods written out line by line in float64: an opinion independent of the package.

`ProTranscription` follows Algorithm 2 of arXiv:2605.06316. A weight of more rows than columns is stepped on its
transpose, which transposes every role as Remark "Left projection" says. Nothing is batched, cached or rearranged, and
nothing is imported from the package.

`KLTranscription` follows its authors' implementation (yorkerlin/KL-Methods, `kl_opt.py`, commit a02e622) for a matrix,
without the options. Run beside that code in float64 it agreed to 1e-14 over 25 steps on 10 x 10, 8 x 20,
20 x 8 and 32 x 16, with gradients of size 1 and of size 1e-4, where the clips act.

Symbols: rows, cols: the weight's shape; m, n: its short and long side; r: rank of the tracked subspace.
A stored `s_X` is the clipped, undamped lambda_X^(-1/2).
"""

import math

import torch

VARIANTS = ("pro-klshampoo", "smok-hop", "subspace-only", "complement-only")


def qr_q(A):
    """Q of A = QR with R's diagonal positive, which makes it unique for A of full column rank."""
    Q, R = torch.linalg.qr(A)
    return Q * torch.where(torch.diagonal(R) < 0, -1.0, 1.0)


def newton_schulz(X, steps, coefficients):
    """X -> aX + bXX^T X + c(XX^T)^2 X, `steps` times from X / ||X||_F (P3), or by a list with (a, b, c) of each."""
    X = X / torch.linalg.matrix_norm(X)
    for a, b, c in coefficients if isinstance(coefficients, list) else [coefficients] * steps:
        X = a * X + b * X @ X.T @ X + c * X @ X.T @ X @ X.T @ X
    return X


def polar(X):
    """The exact polar factor, zero singular values giving zero."""
    P, sigma, Qt = torch.linalg.svd(X, full_matrices=False)
    return P[:, sigma > 1e-12 * sigma[0]] @ Qt[sigma > 1e-12 * sigma[0]]


def shrunk(W, D, share, cautious):
    """Weight decay; cautiously, only the elements that a step along -D does not grow."""
    if not cautious:
        return (1 - share) * W
    elements = zip(W.flatten().tolist(), D.flatten().tolist(), strict=True)
    return torch.tensor([w if w * d < 0 else (1 - share) * w for w, d in elements], dtype=W.dtype).view_as(W)


class Guard:
    """The bound on gradients that surprise, which the paper does not have, written out for one weight.

    `kappa` is the largest whitened size of a gradient and None the paper's form; `gain` is what a momentum amounts to
    under gradients of size 1 that never turn.
    """

    def __init__(self, kappa, beta2, gain):
        self.kappa, self.beta2, self.gain = kappa, beta2, gain
        self.count, self.c = 0, 1.0

    def look(self, size):
        """Take in the size of a gradient: sets c."""
        self.c, self.acted = 1.0, False
        if self.kappa is not None and size > self.kappa:
            self.c, self.acted = self.kappa / size, True

    def unit(self, lambda_0, G):
        """Return the unit of ceilings and damping after a gradient: at most 100 times its size, or a little smaller."""
        rms = float(G.square().mean().sqrt())
        return lambda_0 if self.kappa is None else min(lambda_0, max(self.beta2 * lambda_0, 100 * rms))

    def temper(self, a, sizes):
        """Lower the inverse root of each direction in which c G is beyond the threshold, as far as it is."""
        if self.kappa is None:
            return a
        self.acted |= bool((self.c * sizes > self.kappa).any())
        return torch.tensor(
            [x / max(1.0, self.c * float(size) / self.kappa) for x, size in zip(a, sizes, strict=True)]
        ).to(a)

    def hold(self, D, entries):
        """Bring a whitened part of the direction down to the norm that it may have."""
        most, norm = 2 * self.gain * math.sqrt(entries), float(torch.linalg.matrix_norm(D))
        if self.kappa is None or norm <= most:
            return D
        self.acted = True
        return most / norm * D

    def close(self):
        self.count += self.acted


class Transcription:
    """The base of both methods for one weight: settings, whose defaults are the paper's, and the guard."""

    def __init__(
        self,
        W,
        *,
        lr,
        weight_decay=0.0,
        momentum=0.95,
        beta2=0.95,
        eps=1e-8,
        precondition_frequency=10,
        init_eigenvalue=0.1,
        clip_threshold=None,
        cautious_weight_decay=False,
        adjust_lr_fn="original",
    ):
        self.W = W.to(torch.float64).clone()
        self.rows, self.cols = self.W.shape
        self.lr, self.weight_decay, self.momentum, self.beta2 = lr, weight_decay, momentum, beta2
        self.eps, self.tau, self.init_eigenvalue = eps, precondition_frequency, init_eigenvalue
        self.cautious, self.matched = cautious_weight_decay, adjust_lr_fn == "match_rms_adamw"
        self.guard = Guard(clip_threshold, beta2, 1.0)
        self.t = None

    def _begin(self, lambda_0):
        """Start at eigenvalues of lambda_0, a number or, if "auto", what is given."""
        self._measure_in(lambda_0 if self.init_eigenvalue == "auto" else self.init_eigenvalue)
        self.M, self.t = torch.zeros_like(self.oriented), 0
        return self.lambda_0**-0.5

    def _measure_in(self, lambda_0):
        """Take the start value as the unit of eigenvalues, ceilings and damping; of a number the unit is 1."""
        self.lambda_0 = lambda_0
        self.unit = lambda_0 if self.init_eigenvalue == "auto" else 1.0

    def ceiling(self, size):
        """max(10, min(size, 4000)), the form of all ceilings of the eigenvalue clipping, in these units."""
        return max(10, min(size, 4000)) / math.sqrt(self.unit)

    def _ema_inverse_sqrt(self, s, new, C):
        """EMA of the undamped lambda = s^-2, then the clip."""
        return (self.beta2 * s**-2 + (1 - self.beta2) * new).rsqrt().clamp(max=C)

    def counts(self):
        """The state's scalars under the optimizer's keys."""
        scalars = {"clipped": float(self.guard.count)}
        if self.init_eigenvalue == "auto":
            scalars["lambda_0"] = self.lambda_0
        return {key: torch.tensor(value, dtype=torch.float64) for key, value in scalars.items()}


class ProTranscription(Transcription):
    """Algorithm 2 (practical) for one weight; `step(G)` is one call of the optimizer with gradient G."""

    def __init__(
        self,
        W,
        *,
        rank=128,
        alpha_kl=0.01,
        ns_steps=5,
        ns_coefficients=(3.4445, -4.7750, 2.0315),
        variant="pro-klshampoo",
        **settings,
    ):
        self.tall = W.shape[0] > W.shape[1]
        super().__init__(W, **settings)
        self.m, self.n = self.oriented.shape
        self.r = min(rank, self.m, self.n - 1)
        if alpha_kl == "auto":  # sqrt(low high), low = 1/sqrt(m (n - r)) and high = sqrt(k) low
            alpha_kl = min(self.m, self.n - self.r) ** 0.25 / (self.m * (self.n - self.r)) ** 0.5
        self.alpha = 1.0 if variant == "smok-hop" else alpha_kl
        self.ns_steps, self.ns_coefficients, self.variant = ns_steps, ns_coefficients, variant
        if variant != "smok-hop":
            self.guard.gain = 1 / (1 - self.momentum)

    @property
    def W(self):
        """The weight as it is; ``oriented`` has its short side first."""
        return self.oriented.T if self.tall else self.oriented

    @W.setter
    def W(self, W):
        self.oriented = W.T if self.tall else W

    def step(self, G):
        G = (G.T if self.tall else G).to(torch.float64)
        if self.t is None:
            if bool((G != 0).any()):
                self.initialise(G)
            return
        self.t += 1
        if self.guard.kappa is not None and not G.any():
            self._refresh()
            return
        self.guard.look(self._whitened_size(G))
        self._step(self.guard.c * G)
        self._refresh()
        self.guard.close()
        if self.init_eigenvalue == "auto":
            self._measure_in(self.guard.unit(self.lambda_0, G))

    def _whitened_size(self, G):
        """The larger rms of L^-1/2 G R^-1/2 in the subspace and outside it, R = U S U^T + mu (I - U U^T)."""
        a_L, a_S = torch.diag(self.damped(self.s_short)), torch.diag(self.damped(self.s_S))
        outside = torch.eye(self.n, dtype=torch.float64) - self.U @ self.U.T
        root_R = self.U @ self.Q_S @ a_S @ self.Q_S.T @ self.U.T + self.damped(self.s_mu) * outside
        # Between refreshes Q_S is no orthogonal basis: the part inside is measured in its coordinates.
        inside = a_L @ self.Q_short.T @ G @ self.U @ self.Q_S @ a_S
        beside = a_L @ self.Q_short.T @ G @ root_R @ outside
        self.row_sizes = ((inside.square().sum(dim=1) + beside.square().sum(dim=1)) / self.n).sqrt()
        self.column_sizes = inside.square().mean(dim=0).sqrt()
        return float(max(inside.square().mean(), beside.square().sum() / (self.m * (self.n - self.r))) ** 0.5)

    def _refresh(self):
        """(5) periodic eigenbasis refresh; after an "auto" start, also at 2, 4, 8 and so on below tau."""
        doublings = [2**k for k in range(1, 20) if 2**k < self.tau] if self.init_eigenvalue == "auto" else []
        if self.t % self.tau == 0 or self.t in doublings:
            self.Q_short, self.Q_S = qr_q(self.short @ self.Q_short), qr_q(self.S @ self.Q_S)

    def _roots_of_the_direction(self):
        short = self.guard.temper(self.damped(self.s_short), self.row_sizes)
        return torch.diag(short), torch.diag(self.guard.temper(self.damped(self.s_S), self.column_sizes))

    def initialise(self, G):
        """The first gradient sets the state and moves nothing."""
        start = self._begin(float(G.square().mean().sqrt()))
        X, _, Yt = torch.linalg.svd(G, full_matrices=False)
        self.U, self.Q_short = Yt.T[:, : self.r], X
        G_sub = G @ self.U
        self.short = (1 - self.beta2) / self.r * G_sub @ G_sub.T / self.unit
        self.S = (1 - self.beta2) / self.m * G_sub.T @ G_sub / self.unit
        self.Q_S = torch.eye(self.r, dtype=torch.float64)
        self.s_short = torch.full((self.m,), start, dtype=torch.float64)
        self.s_S = torch.full((self.r,), start, dtype=torch.float64)
        self.s_mu = torch.tensor(start, dtype=torch.float64)

    def damped(self, s):
        """1 / (sqrt(lambda) + eps) from s = lambda^(-1/2)."""
        return s / (1 + self.eps * math.sqrt(self.unit) * s)

    def _look_ahead(self, G):
        """Line 1; Smok-Hop: the EMA in place of Nesterov."""
        if self.variant == "smok-hop":
            self.M = self.momentum * self.M + (1 - self.momentum) * G
            return self.M
        self.M = self.momentum * self.M + G
        return G + self.momentum * self.M

    def _residual_direction(self, G_hat, G_hat_perp, whitened):
        """Line 4, and what Smok-Hop and the subspace-only ablation put in its place."""
        if self.variant == "subspace-only":
            return torch.zeros_like(whitened)
        if self.variant == "smok-hop":
            return self.guard.hold(self.damped(self.s_mu) * whitened, self.m * (self.n - self.r))
        noise = 100 * torch.finfo(torch.float64).eps * torch.linalg.matrix_norm(G_hat)
        if torch.linalg.matrix_norm(G_hat_perp) <= noise:
            return torch.zeros_like(whitened)
        c_a = 1.0 if self.matched else math.sqrt(max(1.0, self.rows / self.cols))
        return newton_schulz(whitened, self.ns_steps, self.ns_coefficients) * c_a

    def _move(self, D_res, D_sub):
        """Lines 5 and 6."""
        D_sub = (
            torch.zeros_like(D_sub) if self.variant == "complement-only" else self.guard.hold(D_sub, self.m * self.r)
        )
        self.direction = D_res + self.alpha * D_sub
        if self.matched:  # an EMA of independent gradients of size 1, or torch's factor of an orthogonal update
            ema = math.sqrt((1 - self.momentum) / (1 + self.momentum))
            self.direction *= 0.2 / ema if self.variant == "smok-hop" else 0.2 * math.sqrt(self.n)
        W = shrunk(self.oriented, self.direction, self.lr * self.weight_decay, self.cautious)
        self.oriented = W - self.lr * self.direction

    def _step(self, G):
        m, n, r, beta2, U = self.m, self.n, self.r, self.beta2, self.U
        Q_L, Q_S = self.Q_short, self.Q_S
        # (1) momentum and projection
        G_hat = self._look_ahead(G)
        G_hat_par = G_hat @ U
        G_hat_perp = G_hat - G_hat_par @ U.T
        # (2) update direction
        D_L, D_S = self._roots_of_the_direction()
        D_sub = Q_L @ D_L @ Q_L.T @ G_hat_par @ Q_S @ D_S @ Q_S.T @ U.T
        D_res = self._residual_direction(G_hat, G_hat_perp, Q_L @ D_L @ Q_L.T @ G_hat_perp)
        self._move(D_res, D_sub)
        # (3) statistics of the raw gradient
        D_L, D_S = torch.diag(self.damped(self.s_short)), torch.diag(self.damped(self.s_S))
        G_til = G @ U
        G_perp = G - G_til @ U.T
        ldiag = (Q_L.T @ G_til @ Q_S @ D_S).square().mean(dim=1)
        rdiag = (D_L @ Q_L.T @ G_til @ Q_S).square().mean(dim=0)
        e_res = torch.diagonal(Q_L.T @ G_perp @ G_perp.T @ Q_L)
        inv_mu = self.damped(self.s_mu) ** 2
        self.s_short = self._ema_inverse_sqrt(self.s_short, (r * ldiag + inv_mu * e_res) / n, self.ceiling(m))
        self.s_S = self._ema_inverse_sqrt(self.s_S, rdiag, self.ceiling(n))
        D_L, D_S = torch.diag(self.damped(self.s_short)), torch.diag(self.damped(self.s_S))
        tail = (e_res * torch.diagonal(D_L) ** 2).sum() / (m * (n - r))
        self.s_mu = self._ema_inverse_sqrt(self.s_mu, tail, self.ceiling(n))
        inv_mu = self.damped(self.s_mu) ** 2
        X = G_til @ Q_S @ D_S
        self.short = beta2 * self.short + (1 - beta2) / n * (X @ X.T + inv_mu * G_perp @ G_perp.T)
        Y = D_L @ Q_L.T @ G_til
        self.S = beta2 * self.S + (1 - beta2) / m * Y.T @ Y
        # (4) subspace tracking
        U_new = qr_q(beta2 * U @ self.S + (1 - beta2) / m * G.T @ Q_L @ D_L @ D_L @ Q_L.T @ G @ U)
        T_rot = U.T @ U_new
        self.S, self.Q_S, self.U = T_rot.T @ self.S @ T_rot, T_rot.T @ Q_S, U_new

    def oriented_state(self):
        """The state under the optimizer's keys, short side first."""
        return {
            "M": self.M,
            "U": self.U,
            "L": self.short,
            "S": self.S,
            "Q_L": self.Q_short,
            "Q_S": self.Q_S,
            "inv_sqrt_lambda_L": self.s_short,
            "inv_sqrt_lambda_S": self.s_S,
            "inv_sqrt_mu": self.s_mu,
            **self.counts(),
        }


def relative_error(actual, expected):
    """||actual - expected||_F / ||expected||_F."""
    expected = expected.to(torch.float64)
    return float((actual.to(torch.float64) - expected).norm() / expected.norm())


def column_signs(actual, expected):
    """Return, by key, the signs by which the columns of each basis in `actual` differ from `expected`.

    They are those of the first gradient's singular vectors, which are free. A QR whose R has a positive
    diagonal carries them along unchanged.
    """
    keys = [key for key in ("U", "Q_L", "Q_S", "Q_R") if key in expected]
    signs = {key: torch.where((actual[key] * expected[key]).sum(dim=0) < 0, -1.0, 1.0) for key in keys}
    if "U" in signs:
        signs["Q_S"] = signs["U"]  # Q_S starts at the identity in the coordinates that U gives
    return signs


def with_signs(actual, signs):
    """Return `actual` with its bases' columns multiplied by `signs`, S in the coordinates of that U."""
    turned = {key: value * signs[key] if key in signs else value for key, value in actual.items()}
    if "U" in signs:
        turned["S"] = signs["U"][:, None] * actual["S"] * signs["U"]
        turned["Q_S"] = signs["U"][:, None] * turned["Q_S"]
    return turned


class KLTranscription(Transcription):
    """KL-Shampoo for one weight as its authors implemented it; nothing is oriented.

    The eigenbases are those of the thin SVD of the first gradient. The longer side's is completed to a basis
    of the whole space, in a way that they leave open: `initialise` can take the completed one from its caller.
    """

    oriented = property(lambda self: self.W)

    def initialise(self, G, long_basis=None):
        G = G.to(torch.float64)
        start = self._begin(float(G.square().mean().sqrt()))
        X, _, Yt = torch.linalg.svd(G, full_matrices=True)
        self.Q_L, self.Q_R = X, Yt.T
        if long_basis is not None and self.rows < self.cols:
            self.Q_R = long_basis.to(torch.float64).clone()
        elif long_basis is not None and self.rows > self.cols:
            self.Q_L = long_basis.to(torch.float64).clone()
        self.L = (1 - self.beta2) / self.cols * G @ G.T / self.unit
        self.R = (1 - self.beta2) / self.rows * G.T @ G / self.unit
        self.s_L = torch.full((self.rows,), start, dtype=torch.float64)
        self.s_R = torch.full((self.cols,), start, dtype=torch.float64)

    def step(self, G):
        G, Q_L, Q_R = G.to(torch.float64), self.Q_L, self.Q_R
        self.t += 1
        if self.guard.kappa is not None and not G.any():
            self._refresh()
            return
        s = torch.outer(self.s_L, self.s_R)
        squares = (Q_L.T @ G @ Q_R * s).square()
        self.guard.look(float(squares.mean().sqrt()))
        s_L = self.guard.temper(self.s_L, squares.mean(dim=1).sqrt())
        s = torch.outer(s_L, self.guard.temper(self.s_R, squares.mean(dim=0).sqrt()))
        raw, G = G, self.guard.c * G
        self.M = torch.lerp(self.M, G, 1 - self.momentum)
        whitened = (Q_L.T @ self.M @ Q_R) * (s / (1 + self.eps * self.unit * s))
        self.direction = Q_L @ self.guard.hold(whitened, self.M.numel()) @ Q_R.T
        if self.matched:
            self.direction *= 0.2 / math.sqrt((1 - self.momentum) / (1 + self.momentum))
        self._learn(G)
        self._refresh()
        self.W = self.W - self.lr * self.direction
        self.W = shrunk(self.W, self.direction, self.lr * self.weight_decay, self.cautious)
        self.guard.close()
        if self.init_eigenvalue == "auto":
            self._measure_in(self.guard.unit(self.lambda_0, raw))

    def _learn(self, G):
        """EMAs of both factors and spectra."""
        beta2, Q_L, Q_R = self.beta2, self.Q_L, self.Q_R
        X = G @ Q_R @ torch.diag(self.s_R)
        Y = G.T @ Q_L @ torch.diag(self.s_L)
        self.L = beta2 * self.L + (1 - beta2) / self.cols * X @ X.T
        self.R = beta2 * self.R + (1 - beta2) / self.rows * Y @ Y.T
        A = Q_L.T @ G @ Q_R
        left = (A * self.s_R[None, :]).square().mean(dim=1)
        right = (A * self.s_L[:, None]).square().mean(dim=0)  # Jacobi: with the old lambda_L
        self.s_L = self._ema_inverse_sqrt(self.s_L, left, self.ceiling(self.rows))
        self.s_R = self._ema_inverse_sqrt(self.s_R, right, self.ceiling(self.cols))

    def _refresh(self):
        if self.t % self.tau == 0:
            self.Q_L, self.Q_R = qr_q(self.L @ self.Q_L), qr_q(self.R @ self.Q_R)

    def oriented_state(self):
        """The state under the optimizer's keys, short side first."""
        sides = {
            "L": self.L,
            "R": self.R,
            "Q_L": self.Q_L,
            "Q_R": self.Q_R,
            "inv_sqrt_lambda_L": self.s_L,
            "inv_sqrt_lambda_R": self.s_R,
        }
        state = {"M": self.M, **sides}
        if self.rows > self.cols:
            state = {key[:-1] + {"L": "R", "R": "L"}[key[-1]]: value for key, value in sides.items()}
            state["M"] = self.M.T
        return state | self.counts()
