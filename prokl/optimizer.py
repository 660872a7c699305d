"""Pro-KLShampoo and KL-Shampoo as ``torch.optim`` optimizers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack  # typing's from Python 3.11 on; torch requires it

from prokl.algorithm.klshampoo import KLShampooMethod
from prokl.algorithm.pro_klshampoo import ProKLShampooMethod
from prokl.algorithm.settings import KL_ADVANCED, PRO_ADVANCED, AdjustLrFn, Advanced, AlphaKL, Variant
from prokl.algorithm.shapes import Rank
from prokl.matrix_optimizer import MatrixOptimizer

if TYPE_CHECKING or dist.is_available():  # also at run time, for who reads the types of arguments
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
else:
    ProcessGroup = DeviceMesh = None

PAPER: MappingProxyType[str, Any] = MappingProxyType(
    {"momentum": 0.95, "beta2": 0.95, "alpha_kl": 0.01, "init_eigenvalue": 0.1, "clip_threshold": None}
)
"""Arguments of ``ProKLShampoo(groups, **PAPER)``, Algorithm 2 as printed: without a bound, with lambda_0 of the paper's
experiments, and with the alpha_kl that it selected for three of its four models."""


class ProKLShampoo(MatrixOptimizer):
    """Pro-KLShampoo: KL-Shampoo with its right factor projected, whitening recovered by orthogonalisation.

    For a weight W with short side m and long side n the right Kronecker factor is restricted to
    ``U S U^T + mu_perp (I - U U^T)`` with U (n,r) tracked. A step moves the weight by (paper, Algorithm 2)::

        W <- (1 - lr * weight_decay) W - lr * [c_a NS(L^-1/2 G^perp) + alpha_kl L^-1/2 G^par S^-1/2 U^T]

    where G^ is the momentum gradient, G^par = G^ U, G^perp = G^ - G^par U^T, NS is Newton-Schulz orthogonalisation, and
    c_a = sqrt(max(1, rows / cols)). docs/algorithm.md has all of it.

    The first usable gradient of a weight only initialises its state, as in KL-Shampoo's code: an optimizer that is made
    anew for every step moves no matrix, so keep one, or load its state. A non-finite gradient leaves its matrix alone,
    and in a stack all of its matrices. Groups with ``algorithm="adamw"`` go to PyTorch's AdamW;
    :func:`prokl.param_groups` makes them. docs/settings.md explains every setting, the keys of a group, and the state.

    Args:
        params: parameters, named parameters or groups. Weights have 2 dimensions, 3 (a stack of matrices) or more
            (convolutions, flattened to (out, rest)). A group may say how they are read: ``transposed``, ``split``.
        lr: step size, in units of the operator norm of the complement's update, as Muon's. Start with 0.02, at
            124M parameters with 0.01, and halve it from run to run as long as they end lower; docs/results.md says what
            this rests on.
        weight_decay: decoupled, multiplied by lr.
        momentum: mu of the Nesterov momentum.
        rank: r of the subspace, at most min(m, n - 1). "auto" is m / 6, at most 128.
        beta2: weight of all EMAs of the preconditioner.
        alpha_kl: weight of the subspace part. "auto" is k^(1/4) / sqrt(m (n - r)) with k = min(m, n - r).
        precondition_frequency: tau, steps between refreshes of the eigenbases. From an "auto" start steps 2, 4, 8, ...
            below it refresh, too.
        variant: "pro-klshampoo", or the paper's "smok-hop" (no orthogonalisation, alpha_kl = 1, EMA momentum),
            "subspace-only", "complement-only".
        state_dtype: dtype of the state; None is float32 for half-precision weights, else the weight's.
        bf16_weights: how bfloat16 weights are rounded: "stochastic" (unbiased), "master" (a float32 copy in the state)
            or "plain" (to nearest).
        backend: "triton" (CUDA, from capability 8.0), "torch", "reference" (the specification, slow), or None to choose
            between the first two.
        maximize: ascend instead of descend.
        adjust_lr_fn: "original", or None: as above. "match_rms_adamw": updates have the size of AdamW's.
        process_group: the ranks, a group or a mesh, that share step and state of weights that are no DTensors, with the
            same gradients, as under DDP. All must call ``step`` and ``load_state_dict``.
        advanced: keywords that hardly anyone sets: eps=1e-8, init_eigenvalue="auto", clip_threshold=5.0,
            precision=None, cautious_weight_decay=False, cuda_graphs=True, ns_steps=5,
            ns_coefficients=(3.4445, -4.7750, 2.0315), ns_dtype=None.

    ``ProKLShampoo(groups, **prokl.PAPER)`` is Algorithm 2 as printed; ``**(prokl.PAPER | {"alpha_kl": 0.015})`` changes
    an argument. The paper has whole weights: ``heads=False`` of ``param_groups``.

    Raises:
        TypeError: ``params`` is a module, ``process_group`` no group, or an argument is unknown.
        ValueError: a hyper-parameter out of bounds, or a parameter that the matrix method cannot take.
    """

    method = ProKLShampooMethod()
    _advanced = PRO_ADVANCED

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        *,
        rank: Rank = "auto",
        beta2: float = 0.9,
        alpha_kl: AlphaKL = "auto",
        precondition_frequency: int = 10,
        variant: Variant = "pro-klshampoo",
        state_dtype: torch.dtype | None = None,
        bf16_weights: str = "stochastic",
        backend: str | None = None,
        maximize: bool = False,
        adjust_lr_fn: AdjustLrFn | None = "original",
        process_group: ProcessGroup | DeviceMesh | None = None,
        **advanced: Unpack[Advanced],
    ) -> None:
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "rank": rank,
            "beta2": beta2,
            "alpha_kl": alpha_kl,
            "precondition_frequency": precondition_frequency,
            "variant": variant,
            "state_dtype": state_dtype,
            "bf16_weights": bf16_weights,
            "backend": backend,
            "maximize": maximize,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, settings, advanced, process_group)


class KLShampoo(MatrixOptimizer):
    """KL-Shampoo with both factors whole, as its authors coded it; the baseline of Pro-KLShampoo.

    ``W <- (1 - lr * weight_decay) (W - lr * L^-1/2 M R^-1/2)`` with M an EMA of the gradients. State needs
    m n + 2 (m^2 + n^2) + m + n elements a weight. AdamW groups, non-finite gradients and first gradients as in
    :class:`ProKLShampoo`.

    Args:
        params: as in :class:`ProKLShampoo`; a ``rank`` in a group is ignored, so that both take the same groups.
        lr: step size.
        weight_decay: decoupled, multiplied by lr, applied after the step.
        momentum: weight of the gradient EMA.
        beta2: weight of the EMAs of the preconditioner.
        precondition_frequency: steps between refreshes of the eigenbases.
        state_dtype: as in :class:`ProKLShampoo`.
        bf16_weights: likewise.
        backend: likewise.
        maximize: likewise.
        process_group: likewise.
        adjust_lr_fn: "match_rms_adamw" multiplies the direction by 0.2 sqrt((1 + momentum) / (1 - momentum)).
        advanced: as in :class:`ProKLShampoo`, without Newton-Schulz's. ``eps`` damps the product of both sides once.

    The authors' form has init_eigenvalue=0.1 and clip_threshold=None, in their code with momentum=0.9 and beta2=0.98.

    Raises:
        TypeError: ``params`` is a module, ``process_group`` no group, or an argument is unknown.
        ValueError: a hyper-parameter out of bounds, or a parameter that the matrix method cannot take.
    """

    method = KLShampooMethod()
    _advanced = KL_ADVANCED

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.002,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        *,
        beta2: float = 0.95,
        precondition_frequency: int = 10,
        state_dtype: torch.dtype | None = None,
        bf16_weights: str = "stochastic",
        backend: str | None = None,
        maximize: bool = False,
        adjust_lr_fn: AdjustLrFn | None = "original",
        process_group: ProcessGroup | DeviceMesh | None = None,
        **advanced: Unpack[Advanced],
    ) -> None:
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "beta2": beta2,
            "precondition_frequency": precondition_frequency,
            "state_dtype": state_dtype,
            "bf16_weights": bf16_weights,
            "backend": backend,
            "maximize": maximize,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, settings, advanced, process_group)
