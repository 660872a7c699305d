"""The operations as Triton launches, and the reading and writing of a bucket through tables.

Products of float32 are split into three of TF32, about as exact as float32 and several times as fast on a GPU;
torch's own TF32 switches touch none of them. Balanced ones take large float32 factors as pairs of bfloat16, split as
they are stored.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prokl.algorithm.algebra import Algebra, Direction, Factor, Projected, Scale
from prokl.algorithm.evidence import UNITS, Admitted, Roots
from prokl.algorithm.settings import COMPLEMENT_VARIANTS, POLAR_VARIANTS, SUBSPACE_VARIANTS, Hyper, ProHyper
from prokl.algorithm.shapes import State, ceiling
from prokl.backends import cuda_qr, torch_pairs
from prokl.backends.device import SecondStream
from prokl.backends.io import Gathered, Layout, Member, Rates, Slot, TorchIO
from prokl.backends.pointers import PointerTable, RateTable
from prokl.backends.rounding import Rounding
from prokl.kernels import turn
from prokl.kernels.admit import admit
from prokl.kernels.apply import apply
from prokl.kernels.gram import normalised_gram
from prokl.kernels.momentum import momentum as launch_momentum
from prokl.kernels.product import bounded_product, product, product_with_energies, split_product
from prokl.kernels.project import project
from prokl.kernels.split import split, split_two
from prokl.kernels.stack import stack
from prokl.kernels.store import store
from prokl.kernels.symmetric_product import (
    extrapolated,
    shifted_polynomial,
    symmetric_polynomial,
    symmetric_product,
)
from prokl.kernels.two_products import symmetric_products
from prokl.kernels.usable import usable
from prokl.kernels.weigh import weigh
from prokl.pair import Operand, Pair


class Squares(NamedTuple):
    """The factor that normalises X before it is formed, as :func:`normalised_gram` takes it."""

    parts: Tensor
    """(B,3,k), as the kernel of the momentum leaves them."""
    noise: float
    """Ratio of squared norms up to which X is negligible."""


class TritonAlgebra(Algebra):
    """Products as launches; QR by the CUDA extension, or by the same methods in PyTorch where that does not run.

    Args:
        use_cuda_qr: True if the extension runs on this device.
        host_readable: True if reading a value on the host costs nothing (an interpreting CPU).
    """

    name = "triton"
    pairs = False
    """True if large float32 factors are pairs."""
    # The launchers are the operations: they take a tile besides.
    symmetric_product = staticmethod(symmetric_product)
    symmetric_products = staticmethod(symmetric_products)
    symmetric_polynomial = staticmethod(symmetric_polynomial)
    shifted_polynomial = staticmethod(shifted_polynomial)
    extrapolated = staticmethod(extrapolated)

    def __init__(self, use_cuda_qr: bool, host_readable: bool) -> None:
        super().__init__(host_readable)
        self.use_cuda_qr = use_cuda_qr

    def second_stream(self, t: Tensor) -> AbstractContextManager[None]:
        """Return a context of another stream where the extension factors: few blocks, each for a long time."""
        return SecondStream(t.device, priority=-1) if t.is_cuda and self.use_cuda_qr else nullcontext()

    def product(
        self, left: Factor, right: Factor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: float = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C."""
        plain = C is None and isinstance(alpha, float) and alpha == 1
        if plain and all(isinstance(t, Tensor) and t.dtype == torch.bfloat16 for t in (left, right)):
            return torch.bmm(left, right)  # of Newton-Schulz; faster by a sixth (H200)
        return product(left, right, C=C, alpha=alpha, beta=beta)

    def turned(self, T: Tensor, S: Tensor, Q_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return T^T S T and T^T Q_S, in one launch unless the rank is large."""
        return turn.turned(T, S, Q_S) if T.shape[-1] <= turn.MOST else super().turned(T, S, Q_S)

    def normalised_gram(self, X: Tensor, scale: Any, size: Tensor, /) -> tuple[Tensor, Scale, Tensor]:
        """Return scale^2 X X^T, the square, and size times the scale, in one launch."""
        return (
            normalised_gram(X, *scale, size) if isinstance(scale, Squares) else super().normalised_gram(X, scale, size)
        )

    def projections(self, G: Tensor, M: Tensor, U: Factor, Q_S: Tensor) -> Projected:
        """Return G and M on the subspace in one launch, and both in the basis of S in another."""
        both, factor = project(G, M, U)
        m = both.shape[2]
        turned = self.product(both.flatten(1, 2), Q_S)
        return Projected(both[:, 0], both[:, 1], turned[:, :m], turned[:, m:], factor)

    def residual(self, G: Tensor, G_tilde: Factor, U: Factor) -> tuple[Tensor, Tensor]:
        """Return G_perp = G - G~ U^T, and parts of its rows' energies, in one launch."""
        out_dtype = torch.bfloat16 if self.pairs else None
        return product_with_energies(G_tilde, U.mT, C=G, alpha=-1.0, out_dtype=out_dtype)

    def subspace_parts(
        self, of: Projected, admitted: Admitted, h: ProHyper, Q_S: Tensor, alpha: float
    ) -> tuple[Factor, Any, Tensor, Tensor, Factor]:
        """Return G^par, T with parts of its energy, A diag(c_S), Z and Y in one launch, split or rounded as stored."""
        (g, a, b), used = h.gradient_weights, admitted.used
        given: dict[str, Any] = {"rows": admitted.c_L, "columns": admitted.c_S, "used_rows": used.L, "used": used.S}
        given |= {"scale": admitted.scale, "weights": (a + b * g, b * h.momentum), "pair": self.pairs}
        return weigh(*of[:4], Q=Q_S if h.variant in SUBSPACE_VARIANTS else None, alpha=alpha, **given)

    def admit(self, A: Tensor, G_tilde: Tensor, e_res: Tensor, state: State, h: Hyper, n: int) -> Admitted:
        """Decide about gradients and do the eigenvalue EMA, in one launch."""
        outputs = admit(
            A,
            G_tilde,
            e_res,
            (state["inv_sqrt_lambda_L"], state["inv_sqrt_lambda_S"], state["inv_sqrt_mu"]),
            state.get("lambda_0"),
            kappa=h.clip_threshold,
            units=UNITS,
            beta2=h.beta2,
            damping=h.eps,
            n=n,
            ceilings=(ceiling(A.shape[1]), ceiling(n)),
            largest=torch.finfo(state["M_Q"].dtype).max,
        )
        c, used_mu, s_mu, weight_L, lambda_0 = outputs.scalars.unbind()
        (used_L, s_L, c_L), (used_S, s_S, c_S) = outputs.rows.unbind(), outputs.columns.unbind()
        used, s = Roots(used_L, used_S, used_mu), Roots(s_L, s_S, s_mu)
        if h.clip_threshold is None:
            return Admitted(None, used, s, c_L, c_S, weight_L, {}, None, None)
        changed = {"lambda_0": lambda_0} if "lambda_0" in state else {}
        evident, bounded = outputs.flags.unbind()
        return Admitted(c, used, s, c_L, c_S, weight_L, changed, bounded, evident)

    def momentum(
        self, G: Tensor, M: Tensor, G_par: Factor, U: Factor, admitted: Admitted, h: ProHyper, active: Tensor | None
    ) -> tuple[Tensor, Factor | None, Any]:
        """Update M in place and form X in one launch; what normalises it is left to Newton-Schulz in bfloat16."""
        arithmetic, dtype = admitted.used.L.dtype, h.ns_dtype
        polar = h.variant in POLAR_VARIANTS
        # Halves of float64 would leave float32's range, in which they are multiplied: X is normalised before.
        half = polar and dtype == torch.bfloat16 and arithmetic != torch.float64
        X, squares = launch_momentum(
            G,
            M,
            G_par if h.variant in COMPLEMENT_VARIANTS else None,
            U,
            admitted.used.L,
            momentum=h.momentum,
            weights=h.gradient_weights,
            scale=admitted.scale,
            active=active,
            out_dtype=torch.bfloat16 if half else None,
            pair=self.pairs and h.variant in COMPLEMENT_VARIANTS and not polar,
        )
        if X is None:
            return M, None, None
        noise = self.noise(G.shape[-1], squares.dtype, M.dtype) ** 2
        if half:
            return M, X, Squares(squares, noise)
        (norm, size, full_size), limits = squares.sum(dim=-1).unbind(1), torch.finfo(squares.dtype)
        vanishes = (norm < limits.tiny) | (norm > limits.max / 4) | (size <= noise * full_size) & full_size.isfinite()
        inverse = torch.where(vanishes, 0.0, norm.rsqrt())
        if not polar:
            return M, X, inverse
        assert isinstance(X, Tensor)
        return M, (X * inverse[:, None, None]).to(dtype), None

    def bounded_product(
        self,
        left: Factor,
        T: Any,
        /,
        *,
        largest: float,
        bounded: Tensor | None,
        clipped: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """Return left T, bounded, in one launch."""
        T, energies = T
        if bounded is None or clipped is None:
            return product(left, T, out_dtype=dtype), clipped
        return bounded_product(left, T, energies, largest=largest, bounded=bounded, clipped=clipped, out_dtype=dtype)

    def track(self, G_perp: Tensor, Y: Factor, K: Tensor, U: Tensor, alpha: float) -> Tensor:
        """Return Q of qr(alpha G_perp^T Y + U K)."""
        if self.use_cuda_qr:
            return cuda_qr.track(self, G_perp, Y, K, U, alpha).Q
        return super().track(G_perp, Y, K, U, alpha)

    def semidefinite_qr(self, L: Tensor) -> tuple[Factor, Factor]:
        """Return Q and R of qr(L), as products take them."""
        if not self.use_cuda_qr:
            return super().semidefinite_qr(L)
        Q, L = self.operands(cuda_qr.semidefinite_qr(self, L).Q, L)
        return Q, self.product_as_factor(Q.mT, L)

    def orthonormal(self, Q: Tensor) -> Tensor:
        """Return Q (3 I - Q^T Q) / 2, as Q - Q E / 2: E = Q^T Q - I is so small that bfloat16 does for the product."""
        if Q.dtype != torch.float32:
            return super().orthonormal(Q)
        eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device).expand_as(Q)
        E = symmetric_product(Q.mT, C=eye, beta=-1.0, out_dtype=torch.bfloat16)
        return product(Q.bfloat16(), E, C=Q, alpha=-0.5, out_dtype=Q.dtype)

    def coordinates_qr(self, S: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(S Q)."""
        return cuda_qr.coordinates_qr(self, S, Q).Q if self.use_cuda_qr else super().coordinates_qr(S, Q)


def _paired(t: Operand) -> Operand:
    """Return an operand split into a pair, unless it is one, or is bfloat16."""
    return t if isinstance(t, Pair) or t.dtype == torch.bfloat16 else split(t.float())


class PairedTritonAlgebra(TritonAlgebra, torch_pairs.PairedAlgebra):
    """Launches whose products take pairs too: beside one the other factor is split, unless it is bfloat16."""

    pairs = True
    operands = staticmethod(split_two)

    def operand(self, t: Tensor) -> Pair:
        """Split a large factor."""
        return split(t)

    def product(
        self, left: Operand, right: Operand, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: float = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C."""
        if isinstance(left, Pair) or isinstance(right, Pair):
            left, right = map(_paired, (left, right))
        return super().product(left, right, C=C, alpha=alpha, beta=beta)

    def product_as_factor(self, left: Operand, right: Operand) -> Pair:
        """Return left right, split as it is stored."""
        return split_product(_paired(left), _paired(right))


class TritonIO(TorchIO):
    """Reads gradients and writes weights in one launch each, through device tables of where they lie.

    The tables, of lr and weight decay too, are tensors that stay where they are, so that a captured CUDA graph follows
    what is written into them. Gradients in float32 are split where products take ``pairs``.
    """

    def __init__(self, members: Sequence[Member], layout: Layout, rounding: Rounding, pairs: bool = False) -> None:
        self.pairs = pairs
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
        complete = gradients
        if len(gradients) < len(self._parameters) or any(map(Tensor.is_neg, gradients)):
            complete = []  # a lazily negated tensor lies nowhere: Member.gradient copies it
        forms = [(g.shape, g.stride(), g.dtype, g.device) for g in complete]
        if complete and self.gradient_table.follow(complete, forms):
            self._gradients = complete
        else:
            self._gradients = [member.gradient(self._gradient_dtype) for member in self.members]
            self.gradient_table.update(self._gradients, self.counts, complete, forms)
        # Of another shape, dtype or device they would have another I/O.
        strides = [p.stride() for p in self._parameters]
        if not self.weight_table.follow(self._parameters, strides):
            weights = [member.weight() for member in self.members]
            pairs = zip(self.members, weights, strict=True)
            self._copied = [(member, W) for member, W in pairs if member.is_copy(W)]
            self.weight_table.update(weights, self.counts, self._parameters, strides)
        ends = [self.members[each.members[-1]].rows.stop for each in rates]
        self.lr.update([each.lr for each in rates], ends)
        self.weight_decay.update([each.weight_decay for each in rates], ends)

    def gather(self, negate: bool, skipped: Tensor) -> Gathered:
        """Read the gradients in one launch; tell in another which are finite and which are zero."""
        a = self.layout
        dtype = self._gradient_dtype
        pair = self.pairs and dtype == torch.float32
        G, energy = stack(self.gradient_table.table, a.m, a.n, dtype=dtype, negate=negate, pair=pair)
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
