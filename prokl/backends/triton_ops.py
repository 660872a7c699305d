"""The algebra as Triton launches, the stages fused, and the reading and writing of a bucket through tables.

Products of float32 are split into three of TF32 (``tf32x3``), about as exact as float32 and several times as fast on
a GPU; torch's own TF32 switches touch none of them.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.algebra import Admitted, Algebra, Direction, Factor, Roots, Scale, State
from prokl.algorithm.evidence import UNITS
from prokl.algorithm.klshampoo import KLShampooStages
from prokl.algorithm.method import Batched
from prokl.algorithm.settings import COMPLEMENT_VARIANTS, Hyper, ProHyper
from prokl.algorithm.shapes import ceiling
from prokl.algorithm.stages import Lookahead, Projected, ProKLShampooStages, Residual
from prokl.backends import cuda_qr, qr
from prokl.backends.io import Gathered, Layout, Member, Rates, Slot
from prokl.backends.pointers import PointerTable, RateTable
from prokl.backends.rounding import Rounding
from prokl.kernels.admit import admit
from prokl.kernels.apply import apply
from prokl.kernels.combine import combine, samples
from prokl.kernels.momentum import momentum as launch_momentum
from prokl.kernels.norms import cut, inverse_norm
from prokl.kernels.precondition import can_use_precondition, precondition
from prokl.kernels.product import product
from prokl.kernels.project import project
from prokl.kernels.stack import stack
from prokl.kernels.store import store
from prokl.kernels.symmetric_forms import coordinates_ema, factor_ema, gram, shifted_polynomial
from prokl.kernels.symmetric_product import symmetric_polynomial, symmetric_product
from prokl.kernels.usable import usable


class TritonAlgebra(Algebra):
    """Products as launches; QR by the CUDA extension, or by the same methods in PyTorch where that does not run.

    Args:
        use_cuda_qr: True if the extension runs on this device.
        host_readable: True if reading a value on the host costs nothing (an interpreting CPU).
    """

    name = "triton"
    # The launchers are the entries: they take a tile and a precision besides.
    symmetric_product = staticmethod(symmetric_product)
    symmetric_polynomial = staticmethod(symmetric_polynomial)

    def __init__(self, use_cuda_qr: bool, host_readable: bool) -> None:
        self.use_cuda_qr, self.host_readable = use_cuda_qr, host_readable

    def product(
        self, left: Factor, right: Factor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C."""
        plain = C is None and isinstance(alpha, float) and alpha == 1
        if plain and all(isinstance(t, Tensor) and t.dtype == torch.bfloat16 for t in (left, right)):
            return torch.bmm(left, right)  # of Newton-Schulz; faster by a sixth, with an addend slower (H200)
        return product(left, right, C=C, alpha=alpha, beta=beta)

    def spectral(self, Q: Tensor, a: Tensor) -> Factor:
        """Return Q diag(a) Q^T."""
        return symmetric_product(Q * a.sqrt()[:, None, :])

    def congruence(self, L: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q^T L Q, of which half is computed, and L Q."""
        A = product(L, Q)
        # Its second factor is read along its rows: the lower half of Q^T ((L Q)^T)^T.
        return symmetric_polynomial(Q.mT, A.mT), A

    def diagonal(self, Q: Tensor, E: Tensor) -> Tensor:
        """Return the diagonal of Q^T E Q."""
        return product(E, Q).mul_(Q).sum(dim=-2).clamp_(min=0)

    def tracking_qr(self, V: Tensor, K: Tensor, U: Tensor) -> Tensor:
        """Return Q of qr(V), in PyTorch."""
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


class TritonStages(TritonAlgebra, ProKLShampooStages):
    """Pro-KLShampoo's stages, those that are fused."""

    shifted_polynomial = staticmethod(shifted_polynomial)
    factor_ema = staticmethod(factor_ema)
    coordinates_ema = staticmethod(coordinates_ema)
    cut = staticmethod(cut)

    def projections(self, G: Tensor, M: Tensor, U: Tensor, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """Read G and M once for G U and M U."""
        return project(G, M, U, active)[:2]

    def admit(self, A: Tensor, QtG: Tensor, e_res: Tensor, state: State, h: Hyper, n: int) -> Admitted:
        """Decide about gradients and do the eigenvalue EMA, in one launch."""
        outputs = admit(
            A,
            QtG,
            e_res,
            (state["inv_sqrt_lambda_L"], state["inv_sqrt_lambda_S"], state["inv_sqrt_mu"]),
            state.get("lambda_0"),
            kappa=h.clip_threshold,
            units=UNITS,
            beta2=h.beta2,
            damping=h.eps,
            n=n,
            ceilings=(ceiling(A.shape[1]), ceiling(n)),
            largest=torch.finfo(state["M"].dtype).max,
        )
        c, *of_mu, tail, lambda_0 = outputs.scalars.unbind()
        used, s, a = map(Roots, outputs.rows.unbind(), outputs.columns.unbind(), of_mu)
        if h.clip_threshold is None:
            return Admitted(None, used, s, a, tail, {}, None, None)
        changed = {"lambda_0": lambda_0} if "lambda_0" in state else {}
        evident, bounded = outputs.flags.unbind()
        return Admitted(c, used, s, a, tail, changed, bounded, evident)

    def momentum(
        self, G: Tensor, projected: Projected, scale: Tensor | None, state: State, h: ProHyper, active: Tensor | None
    ) -> tuple[Tensor, Lookahead]:
        """Update M in place and form the residual in one launch, after one for G^ U."""
        (g, a, b), M, U = h.gradient_weights, state["M"], projected.U
        G_par = self.combined(projected.G_tilde, a + b * g, projected.M_tilde, b * h.momentum, scale)
        projection = G_par if h.variant in COMPLEMENT_VARIANTS else None
        G_hat_perp, size, full_size = launch_momentum(
            G, M, projection, U, momentum=h.momentum, weights=(g, a, b), scale=scale, active=active
        )
        if G_hat_perp is None or size is None or full_size is None:
            return M, Lookahead(G_par, None, U)
        return M, Lookahead(
            G_par, Residual(G_hat_perp, size, full_size, self.noise(G.shape[-1], size.dtype, M.dtype)), U
        )

    def combined(self, x: Tensor, alpha: float, y: Tensor, beta: float, scale: Tensor | None) -> Factor:
        """Return scale alpha x + beta y."""
        return combine(x, alpha, y, beta, scale)

    def precondition(self, P: Factor, G_par: Factor, Q_S: Tensor, a_S: Tensor, alpha: float) -> Tensor:
        """Return alpha P G_par S^-1/2 in one launch, but where r x r does not fit one program."""
        if not can_use_precondition(P, G_par, Q_S, a_S):
            return super().precondition(P, G_par, Q_S, a_S, alpha)
        return precondition(P, G_par, Q_S, a_S, alpha)

    def whiten(self, P: Factor, residual: Residual, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return X = P G^_perp and the inverse of its norm, which comes with the product and is left to the next."""
        G_hat_perp, size, full_size, noise = residual
        # Of float64 halves would leave float32's range, in which they are multiplied: X is normalised before.
        half = torch.bfloat16 if dtype == torch.bfloat16 and size.dtype != torch.float64 else None
        X, energy = product(P, G_hat_perp, out_dtype=half, energy=True)
        inverse = inverse_norm(energy, size, full_size, noise)
        return (X, inverse) if X.dtype == dtype else ((X * inverse[:, None, None]).to(dtype), None)

    def gram(self, X: Tensor, scale: Tensor | None, /) -> Tensor:
        """Return scale^2 X X^T."""
        return symmetric_product(X) if scale is None else gram(X, scale)

    def samples(
        self, GQ: Tensor, QtG: Tensor, a: Roots, scale: Tensor | None, weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whiten what the factors' EMAs are made of, in one launch."""
        return samples(GQ, QtG, a.L, a.S, scale, weight)

    def track(self, G_perp: Factor, Y: Factor, K: Tensor, U: Tensor, alpha: Scale) -> Tensor:
        """Return Q of qr(alpha G_perp^T Y + U K)."""
        if self.use_cuda_qr:
            return cuda_qr.track(self, G_perp, Y, K, U, alpha).Q
        return super().track(G_perp, Y, K, U, alpha)


class TritonKLStages(TritonAlgebra, KLShampooStages):
    """KL-Shampoo's stages, as they are written, over launches."""


STAGES: dict[str, Callable[[bool, bool], Batched[Any]]] = {"pro-klshampoo": TritonStages, "kl-shampoo": TritonKLStages}


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
        self._gradient_dtype = layout.weight_dtype
        self._copied: list[tuple[Member, Tensor]] = []

    @property
    def capturable(self) -> bool:
        """True unless a weight had to be copied, whose copy is another one at every step, or gradients be converted."""
        return not self._copied and self._gradient_dtype == self.layout.weight_dtype

    def locate(self, rates: Sequence[Rates]) -> None:
        """Write into the tables what has changed since the last call."""
        a, gradients = self.layout, [p.grad for p in self._parameters if p.grad is not None]
        self._gradient_dtype = a.weight_dtype if all(g.dtype == a.weight_dtype for g in gradients) else a.dtype
        # What is lazily negated lies nowhere: Member.gradient copies it.
        complete = (
            gradients if len(gradients) == len(self._parameters) and not any(map(Tensor.is_neg, gradients)) else []
        )
        forms = [
            [g.shape for g in complete],
            [g.stride() for g in complete],
            [g.dtype for g in complete],
            [g.device for g in complete],
        ]
        if complete and self.gradient_table.follow(complete, forms):
            self._gradients = complete
        else:
            self._gradients = [member.gradient(self._gradient_dtype) for member in self.members]
            self.gradient_table.update(self._gradients, self.counts, complete, forms)
        strides = [
            p.stride() for p in self._parameters
        ]  # of another shape, dtype or device they would have another I/O
        if not self.weight_table.follow(self._parameters, strides):
            weights = [member.weight() for member in self.members]
            pairs = zip(self.members, weights, strict=True)
            self._copied = [(member, W) for member, W in pairs if member.is_copy(W)]
            self.weight_table.update(weights, self.counts, self._parameters, strides)
        ends = [self.members[each.members[-1]].rows.stop for each in rates]
        self.lr.update([each.lr for each in rates], ends)
        self.weight_decay.update([each.weight_decay for each in rates], ends)

    def gather(self, negate: bool, skipped: Tensor) -> Gathered:
        """Read the gradients in one launch, and judge them in another."""
        a = self.layout
        G, energy = stack(self.gradient_table.table, a.m, a.n, dtype=self._gradient_dtype, negate=negate)
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
