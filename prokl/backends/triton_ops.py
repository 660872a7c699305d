"""The primitives of the batched step as Triton launches, and the reading and writing of a bucket through tables.

Products of float32 are split into three of TF32 (``tf32x3``), about as exact as float32 and several times as fast on
a GPU; torch's own TF32 switches touch none of them.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prokl.algorithm.evidence import PATIENCE, QUIET, TRUSTED
from prokl.algorithm.primitives import Admitted, Direction, Primitives, Residual, Roots, State
from prokl.algorithm.settings import Hyper
from prokl.algorithm.shapes import ceiling
from prokl.backends import cuda_qr, qr
from prokl.backends.io import Gathered, Layout, Member, Rates, Slot
from prokl.backends.pointers import PointerTable, RateTable
from prokl.backends.rounding import Rounding
from prokl.kernels.admit import Bound, admit
from prokl.kernels.apply import apply
from prokl.kernels.combine import combine, samples
from prokl.kernels.momentum import momentum as launch_momentum
from prokl.kernels.norms import cut, inverse_norm
from prokl.kernels.precondition import can_use_precondition, precondition
from prokl.kernels.product import product, product_pair, row_energies
from prokl.kernels.project import project
from prokl.kernels.split import split, split_two
from prokl.kernels.stack import stack
from prokl.kernels.store import store
from prokl.kernels.symmetric_forms import coordinates_ema, factor_ema, gram, shifted_polynomial
from prokl.kernels.symmetric_product import symmetric_polynomial, symmetric_product, symmetric_product_pair
from prokl.kernels.usable import usable
from prokl.pair import Operand, Pair, residual_noise

CUBLAS: frozenset[tuple[int, int, int]] = frozenset()
"""(m, k, n) of the products of bfloat16 matrices, those of Newton-Schulz that are not symmetric, that go to torch's
``baddbmm``: by shape alone, so that every rank and every resumed run do the same. It is empty until ``product Q X`` of
the microbenchmarks, which times both, has been run on a GPU."""


def by_cublas(
    left: Operand, right: Operand, C: Tensor | None, alpha: float | Tensor, beta: float | Tensor
) -> Tensor | None:
    """Return alpha left right + beta C where :data:`CUBLAS` has the shape; None elsewhere, and for scales by matrix."""
    if (left.shape[-2], left.shape[-1], right.shape[-1]) not in CUBLAS:
        return None
    if isinstance(left, Pair) or isinstance(right, Pair) or isinstance(alpha, Tensor) or isinstance(beta, Tensor):
        return None
    if any(t.dtype != torch.bfloat16 for t in (left, right, C) if t is not None):
        return None
    return alpha * torch.bmm(left, right) if C is None else torch.baddbmm(C, left, right, alpha=alpha, beta=beta)


class TritonPrimitives(Primitives):
    """Fused kernels; QR by the CUDA extension, or by the same methods in PyTorch where that does not run.

    Args:
        use_cuda_qr: True if the extension runs on this device.
        host_readable: True if reading a value on the host costs nothing (an interpreting CPU).
        balanced: True if the large products of float32 are those of pairs.
    """

    name = "triton"
    # The launchers are the entries: they take a tile and a precision besides.
    symmetric_product = staticmethod(symmetric_product)
    symmetric_polynomial = staticmethod(symmetric_polynomial)
    shifted_polynomial = staticmethod(shifted_polynomial)
    factor_ema = staticmethod(factor_ema)
    coordinates_ema = staticmethod(coordinates_ema)
    project = staticmethod(project)
    cut = staticmethod(cut)

    def __init__(self, use_cuda_qr: bool, host_readable: bool, balanced: bool = False) -> None:
        self.use_cuda_qr, self.host_readable, self.balanced = use_cuda_qr, host_readable, balanced

    def admit(self, A: Tensor, QtG: Tensor, e_res: Tensor, state: State, h: Hyper, n: int) -> Admitted:
        """Decide about gradients and do the eigenvalue EMA, in one launch."""
        kappa = h.clip_threshold
        bound = None if kappa is None else Bound(kappa, QUIET, TRUSTED, 1 / (2 * PATIENCE))
        found = admit(
            A,
            QtG,
            e_res,
            (state["inv_sqrt_lambda_L"], state["inv_sqrt_lambda_S"], state["inv_sqrt_mu"]),
            state.get("trust"),
            state.get("lambda_0"),
            bound=bound,
            beta2=h.beta2,
            damping=h.eps,
            n=n,
            ceilings=(ceiling(A.shape[1]), ceiling(n)),
            largest=torch.finfo(state["M"].dtype).max,
        )
        c, *of_mu, tail, trust, lambda_0 = found.scalars.unbind()
        used, s, a = map(Roots, found.rows.unbind(), found.columns.unbind(), of_mu)
        if bound is None:
            return Admitted(None, used, s, a, tail, {}, None, None)
        changed = {"trust": trust} | ({"lambda_0": lambda_0} if "lambda_0" in state else {})
        evident, bounded = found.flags.unbind()
        return Admitted(c, used, s, a, tail, changed, bounded, evident)

    def operand(self, t: Tensor) -> Operand:
        """Return a pair of float32 numbers where products are balanced, else the tensor."""
        return split(t) if self.balanced and t.dtype == torch.float32 else t

    def operands(self, t: Tensor, u: Tensor) -> tuple[Operand, Operand]:
        """Return the operand of both, in one launch."""
        if self.balanced and t.dtype == u.dtype == torch.float32:
            return split_two(t, u)
        return self.operand(t), self.operand(u)

    def _factors(self, left: Operand, right: Operand) -> tuple[Operand, Operand]:
        """Return both as a product takes them: beside a pair float32 is split."""
        if isinstance(left, Pair) or isinstance(right, Pair):
            left, right = (self.operand(t) if isinstance(t, Tensor) else t for t in (left, right))
        return left, right

    def product(
        self,
        left: Operand,
        right: Operand,
        /,
        *,
        C: Tensor | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 1.0,
    ) -> Tensor:
        """Return alpha left right + beta C."""
        left, right = self._factors(left, right)
        found = by_cublas(left, right, C, alpha, beta)
        return product(left, right, C=C, alpha=alpha, beta=beta) if found is None else found

    def product_operand(
        self, left: Operand, right: Operand, /, *, C: Tensor | None = None, alpha: float = 1.0
    ) -> Operand:
        """Return the operand of alpha left right + C, split as it is stored."""
        left, right = self._factors(left, right)
        halves = isinstance(left, Pair) or (self.balanced and left.dtype == torch.float32)
        return (product_pair if halves else product)(left, right, C=C, alpha=alpha)

    def gram(self, X: Tensor, scale: Tensor | None, /) -> Tensor:
        """Return scale^2 X X^T."""
        return symmetric_product(X) if scale is None else gram(X, scale)

    def spectral_operand(self, Q: Tensor, a: Tensor) -> Operand:
        """Return the operand of Q diag(a) Q^T, split as it is stored."""
        if self.balanced and Q.dtype == torch.float32:
            return symmetric_product_pair(split(Q, a))
        return symmetric_product(Q * a.sqrt()[:, None, :])

    def congruence(self, L: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q^T L Q, of which half is computed, and L Q."""
        A = product(L, Q)
        # Its second factor is read along its rows: the lower half of Q^T ((L Q)^T)^T.
        return symmetric_polynomial(Q.mT, A.mT), A

    def row_energies(self, Q: Operand, G_perp: Operand, E: Tensor) -> Tensor:
        """Return diag(Q^T E Q), by the product that is smaller unless pairs need the other."""
        if isinstance(Q, Tensor) and isinstance(G_perp, Tensor):
            return product(E, Q).mul_(Q).sum(dim=-2).clamp_(min=0)
        left, right = self._factors(Q.mT, G_perp)
        return row_energies(left, right)

    def momentum(
        self,
        G: Tensor,
        M: Tensor,
        G_tilde: Tensor,
        M_tilde: Tensor,
        U: Operand,
        momentum: float,
        weights: tuple[float, float, float],
        scale: Tensor | None,
        active: Tensor | None,
        complement: bool,
    ) -> tuple[Tensor, Operand, Residual | None]:
        """Update M in place and form the residual."""
        g, a, b = weights
        G_par = combine(G_tilde, a + b * g, M_tilde, b * momentum, scale, isinstance(U, Pair))
        own = G_par if complement else None
        G_hat_perp, size, whole = launch_momentum(
            G, M, own, U, momentum=momentum, weights=weights, scale=scale, active=active
        )
        if G_hat_perp is None or size is None or whole is None:
            return M, G_par, None
        return M, G_par, Residual(G_hat_perp, size, whole, residual_noise(U, size.dtype, M.dtype) ** 2)

    def precondition(self, P: Operand, G_par: Operand, Q_S: Tensor, a_S: Tensor, alpha: float) -> Tensor:
        """Return alpha P G_par S^-1/2: one launch; products of pairs, and where r x r does not fit one program."""
        if isinstance(P, Tensor) and isinstance(G_par, Tensor) and can_use_precondition(P, G_par, Q_S, a_S):
            return precondition(P, G_par, Q_S, a_S, alpha)
        return self.product(P, self.product_operand(G_par, self.spectral_operand(Q_S, a_S)), alpha=alpha)

    def whiten(self, P: Operand, residual: Residual, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return X = P G^_perp and the inverse of its norm, which comes with the product and is left to the next."""
        G_hat_perp, size, whole, noise = residual
        half = torch.bfloat16 if dtype == torch.bfloat16 else None
        X, energy = product(*self._factors(P, G_hat_perp), out_dtype=half, energy=True)
        inverse = inverse_norm(energy, size, whole, noise)
        return (X, inverse) if X.dtype == dtype else ((X * inverse[:, None, None]).to(dtype), None)

    def samples(
        self, GQ: Tensor, QtG: Tensor, a: Roots, scale: Tensor | None, weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whiten what the factors' EMAs are made of, in one launch."""
        return samples(GQ, QtG, a.L, a.S, scale, weight)

    def track(self, G_perp: Operand, Y: Operand, K: Tensor, U: Tensor, alpha: float | Tensor) -> Tensor:
        """Return Q of qr(alpha G_perp^T Y + U K)."""
        if self.use_cuda_qr:
            return cuda_qr.track(self, G_perp, Y, K, U, alpha).Q
        V = self.product(G_perp.mT, Y, C=product(U, K), alpha=alpha)
        return qr.householder_qr(V) if self.host_readable else qr.cholesky_tracking(V, K, U, product)

    def refresh_basis(self, L: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(L Q)."""
        if self.use_cuda_qr:
            return cuda_qr.refresh_basis(self, L, Q).Q
        return qr.householder_qr(product(L, Q)) if self.host_readable else qr.cholesky_refresh(L, Q, product)

    def refresh_coordinates(self, S: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(S Q)."""
        if self.use_cuda_qr:
            return cuda_qr.refresh_coordinates(self, S, Q).Q
        return qr.householder_qr(product(S, Q)) if self.host_readable else qr.cholesky_coordinates(S, Q, product)


class TritonIO:
    """Reads gradients and writes weights in one launch each, through device tables of where they lie.

    The tables, of lr and weight decay too, are tensors that stay where they are, so that a captured CUDA graph follows
    what is written into them.
    """

    def __init__(self, members: Sequence[Member], layout: Layout, rounding: Rounding) -> None:
        self.members, self.layout, self.rounding = members, layout, rounding
        self._parameters = [member.p for member in members]
        self.counts = [member.shape.count for member in members]
        starts = [0, *(member.rows.stop for member in members)]
        self.starts = torch.tensor(starts, device=layout.device)
        self.gradient_table = PointerTable(layout.count, layout.device)
        self.weight_table = PointerTable(layout.count, layout.device)
        self.lr = RateTable(layout.count, layout.device)
        self.weight_decay = RateTable(layout.count, layout.device)
        self._gradients: Sequence[Tensor | None] = []
        self._copied: list[tuple[Member, Tensor]] = []

    @property
    def capturable(self) -> bool:
        """True unless a weight had to be copied: its copy would be another one at every step."""
        return not self._copied

    def locate(self, rates: Sequence[Rates]) -> None:
        """Write into the tables what has changed since the last call."""
        given = [p.grad for p in self._parameters if p.grad is not None]
        # What is lazily negated lies nowhere: Member.gradient copies it.
        whole = given if len(given) == len(self._parameters) and not any(map(Tensor.is_neg, given)) else []
        forms = [
            [g.shape for g in whole],
            [g.stride() for g in whole],
            [g.dtype for g in whole],
            [g.device for g in whole],
        ]
        if whole and self.gradient_table.follow(whole, forms):
            self._gradients = whole
        else:
            self._gradients = [member.gradient() for member in self.members]
            self.gradient_table.update(self._gradients, self.counts, whole, forms)
        strides = [
            p.stride() for p in self._parameters
        ]  # of another shape, dtype or device they would have another I/O
        if not self.weight_table.follow(self._parameters, strides):
            weights = [member.weight() for member in self.members]
            pairs = zip(self.members, weights, strict=True)
            self._copied = [(member, weight) for member, weight in pairs if member.is_copy(weight)]
            self.weight_table.update(weights, self.counts, self._parameters, strides)
        ends = [self.members[own.members[-1]].rows.stop for own in rates]
        self.lr.update([own.lr for own in rates], ends)
        self.weight_decay.update([own.weight_decay for own in rates], ends)

    def gather(self, negate: bool, skipped: Tensor) -> Gathered:
        """Read the gradients in the weights' dtype in one launch, and judge them in another."""
        a = self.layout
        G, energy = stack(self.gradient_table.table, a.m, a.n, dtype=a.weight_dtype, negate=negate)
        return Gathered(G, *usable(energy, self.starts, max(self.counts), skipped))

    def apply(self, direction: Direction, moving: Sequence[int], active: Tensor | None) -> None:
        """Step all weights in one launch, straight into their memory."""
        apply(
            self.weight_table.table,
            direction.X,
            dtype=self.layout.weight_dtype,
            lr=self.lr.table,
            weight_decay=self.weight_decay.table,
            scale=direction.scale,
            Q=direction.Q,
            left=direction.left,
            right=direction.right,
            active=active,
            decay_after=direction.decay_after,
            cautious_decay=direction.cautious_decay,
            keys=self.rounding.keys,
            master=self.rounding.master,
        )
        moved = set(moving)
        for member, weight in self._copied:
            if not moved.isdisjoint(member.rows):
                member.write(weight)

    @staticmethod
    def store(slots: Sequence[Slot]) -> None:
        """Write all tensors in one launch."""
        store(slots)

    def release(self) -> None:
        """Keep no gradient and no copy of a weight alive until the next step."""
        self._gradients, self._copied = [], []
