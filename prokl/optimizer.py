"""Pro-KLShampoo and KL-Shampoo as ``torch.optim`` optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from prokl.algorithm.initial import InitEigenvalue
from prokl.algorithm.klshampoo import KLShampooMethod
from prokl.algorithm.pro_klshampoo import ProKLShampooMethod
from prokl.algorithm.settings import AdjustLrFn, AlphaKL, Preset, Variant
from prokl.algorithm.shapes import Rank
from prokl.engine.arguments import constructor
from prokl.matrix_optimizer import MatrixOptimizer

if TYPE_CHECKING or dist.is_available():  # also at run time, for who reads the types of arguments
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
else:
    ProcessGroup = DeviceMesh = None


class ProKLShampoo(MatrixOptimizer):
    """Pro-KLShampoo: KL-Shampoo with its right factor projected, whitening recovered by orthogonalisation.

    For a weight W with short side m and long side n the right Kronecker factor is restricted to
    ``U S U^T + mu_perp (I - U U^T)`` with U (n,r) tracked. One step (paper, Algorithm 2), with gradient G, mu the
    momentum, b = beta2, tau the precondition_frequency and c_a = sqrt(max(1, rows / cols))::

        (1) M <- mu M + G;  G^ = G + mu M;  G^par = G^ U;  G^perp = G^ - G^par U^T
        (2) W <- (1 - lr * weight_decay) W - lr * [c_a NS(L^-1/2 G^perp) + alpha_kl L^-1/2 G^par S^-1/2 U^T]
        (3) G~ = G U;  G_perp = G - G~ U^T;  dL = (G~ S^-1 G~^T + G_perp G_perp^T / mu_perp) / n;  dS = G~^T L^-1 G~ / m
            lambda_L, lambda_S <- EMAs of diag Q_L^T dL Q_L, diag Q_S^T dS Q_S     (dL, dS with the state before)
            mu_perp            <- EMA of tr(G_perp^T L^-1 G_perp) / (m (n - r))    (with the new lambda_L)
            L <- b L + (1 - b) dL                                       (dL with the new lambda_S, mu_perp)
            S <- b S + (1 - b) dS                                       (dS with the new lambda_L)
        (4) U_+ = qr(b U S + (1 - b)/m G^T L^-1 G U)                    (with the new S, lambda_L)
            T = U^T U_+;  S <- T^T S T;  Q_S <- T^T Q_S;  U <- U_+
        (5) every tau steps: Q_L <- qr(L Q_L);  Q_S <- qr(S Q_S)

    L^-1/2 = Q_L diag(lambda_L^-1/2) Q_L^T, likewise S^-1/2; NS is Newton-Schulz orthogonalisation.

    A group with ``algorithm="adamw"`` (own lr, betas, eps, weight_decay) is stepped by PyTorch's AdamW, so that
    one optimizer trains a whole model; :func:`prokl.param_groups` makes such groups. The first usable gradient
    of a weight only initialises its state. A non-finite gradient leaves its matrix and state untouched; a matrix that
    has not moved in 100 steps with a gradient is warned about once.

    Args:
        params: parameters, named parameters or groups. Matrix groups take floating weights of 2 dimensions,
            3 (a stack of matrices) or more (convolutions, flattened to (out, rest)). Two keys of a group say how its
            weights are read, each one value for all or a list with one a weight: ``transposed``, True where they are
            stored (in, out); ``split``, into how many equal pieces the output dimension divides, or a tuple of their
            sizes, None for one: each piece is a matrix of its own, skipped and counted by itself. A list is for
            weights with names, as trainers reorder others (ZeroRedundancyOptimizer): these need one group per value.
        lr: step size, in units of the operator norm of the complement's update, as Muon's.
        weight_decay: decoupled, multiplied by lr.
        momentum: mu of the Nesterov momentum M <- mu M + G; the paper's and Muon's is 0.95.
        rank: r of the tracked subspace, per weight at most min(m, n - 1). "auto" is m / 6, at most 128: what the paper
            has for a width of 768, where it also found 32 and 64 little different.
        beta2: weight of all EMAs of the preconditioner; the paper's is 0.95.
        alpha_kl: weight of the subspace part; with "match_rms_adamw" against NS without c_a, and scaled with it. "auto"
            is k^(1/4) / sqrt(m (n - r)) with k = min(m, n - r), per weight: the geometric mean of the paper's bracket
            (:func:`prokl.diagnostics.alpha_kl_bracket`) over c_a. The paper tunes a number in 0.005..0.015.
        eps: damping of inverse square roots, 1/(sqrt(lambda) + eps).
        precondition_frequency: tau, steps between refreshes of the eigenbases. In between Q_S turns with the subspace
            and shrinks; after a refresh the whitened size of independent gradients was at most 1.2 with 10, 3.0 with
            100 and 36 with 300, of which ``clip_threshold`` bounds what is above 5.
        ns_steps: Newton-Schulz iterations.
        ns_coefficients: (a, b, c) of the quintic; the default is Muon's (Keller Jordan).
        init_eigenvalue: start of all eigenvalues. A number is the paper's lambda_0 (its experiments use 0.1);
            "auto" takes the rms of the initialising gradient, which makes training invariant to the loss scale.
            A number below the clip's floor 1/C^2 of a factor is raised to it.
        variant: "pro-klshampoo", or the paper's "smok-hop" (no orthogonalisation, alpha_kl = 1, EMA momentum),
            "subspace-only", "complement-only".
        state_dtype: storage dtype of the state; None is float32 for half-precision weights, else the weight's.
        bf16_weights: what a step writes into bfloat16 weights: "stochastic" (rounded up or down at random, unbiased,
            the same bits after a resume), "master" (rounded to nearest beside a float32 master in the state, which
            counts wherever the weight still is its rounding, and is taken over by a weight that has become another
            dtype) or "plain" (to nearest). Other dtypes, and AdamW groups, are rounded to nearest. The random numbers
            follow from the weight's name, or its place where it has none, and its step.
        backend: "triton" (batched, fused kernels; CUDA devices from compute capability 8.0), "torch" (batched, any
            device), "reference" (the specification, slow), or None to choose between the first two.
        precision: "faithful" (products are as exact as float32), "balanced" (the large products of float32 are three of
            bfloat16 each, 16 bits of every factor: their errors stay within those of Newton-Schulz in bfloat16), or
            None: balanced in the kernels on a GPU, faithful elsewhere. Where the arithmetic is in float64, for float64
            weights or state, it changes nothing, and never Newton-Schulz, whose dtype is ``ns_dtype``.
        maximize: ascend instead of descend.
        ns_dtype: dtype of the Newton-Schulz products; None is bfloat16, float64 for float64 weights, and float32 on a
            CPU without instructions for bfloat16, or a GPU below compute capability 8.0.
        clip_threshold: largest size of a gradient, whitened by the state before it; usual is 1. Beyond it the gradient
            is scaled down to it before momentum and statistics: the step is bounded, and the eigenvalues follow within
            some ten steps. A direction of a factor that is beyond it by itself, as a row that wakes, is
            held at it for the step, and the whitened momentum at twice what gradients of size 1 that never turn amount
            to. A gradient below 0.01 leaves factors and eigenvalues that others have confirmed as they are, for up to
            30 in a row; a zero one moves and teaches nothing. ``clipped()`` counts the bounded steps. None is the
            paper's form, whose steps have no bound.
        cautious_weight_decay: decay only elements whose sign is not opposite to the direction's (arXiv:2510.12402).
        adjust_lr_fn: units of lr. "original", or None: c_a on the complement alone, as in the paper. "match_rms_adamw":
            the whole direction times torch.optim.Muon's 0.2 sqrt(max(rows, cols)), with c_a = 1: updates of root mean
            square about 0.2 lr, as AdamW's. Smok-Hop's factor is 0.2 sqrt((1 + momentum) / (1 - momentum));
            "subspace-only" has none. Weight decay uses lr itself.
        cuda_graphs: replay the steps of the "triton" backend on a GPU from CUDA graphs: of every shape one for ordinary
            and one for refresh steps, for every combination of settings other than lr and weight decay. These, and the
            gradients' addresses, may change freely. A step in which a weight of the shape begins or has no gradient, or
            is a convolution in another than PyTorch's default memory format, runs without, as everything does for good,
            with a warning, once a graph could not be recorded. The step's temporary memory stays with the graphs.
        process_group: among which ranks the step and the state of weights that are no DTensors are divided: a process
            group or a mesh, whose ranks all have these weights and, as DDP sees to, the same gradients. Each matrix is
            stepped by one of them, which alone has its state; ``step`` and ``load_state_dict`` need them all then.
            None: every rank steps everything. DTensors are divided among the ranks of their own mesh.
        preset: "paper" is Algorithm 2 as printed, with the paper's settings: momentum=0.95, beta2=0.95, alpha_kl=0.01,
            init_eigenvalue=0.1, clip_threshold=None, where these are not given. None: the defaults above.

    State of a weight, oriented (m <= n): step, skipped, clipped, trust, stale, M (m,n), U (n,r), L, Q_L (m,m),
    S, Q_S (r,r), inv_sqrt_lambda_L (m,), inv_sqrt_lambda_S (r,), inv_sqrt_mu (), and lambda_0 () for "auto"; a 3-D
    weight has a leading dimension. ``step`` is -1 until the initialising gradient, an int, or of a 3-D weight an int64
    tensor on the CPU. ``bf16_weights="master"`` adds master (m,n), float32. Keys of piece i of a split weight end in
    ``.i``. A weight without a gradient so far has an entry too, of zeros.

    Of a divided weight ``state`` has what this rank owns, and ``PartOfState`` in the place of the rest.

    Raises:
        TypeError: ``params`` is a module, or ``process_group`` no group.
        ValueError: a hyper-parameter out of bounds, or a parameter that the matrix method cannot take.
    """

    method = ProKLShampooMethod()

    @constructor
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
        eps: float = 1e-8,
        precondition_frequency: int = 10,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        init_eigenvalue: InitEigenvalue = "auto",
        variant: Variant = "pro-klshampoo",
        state_dtype: torch.dtype | None = None,
        bf16_weights: str = "stochastic",
        backend: str | None = None,
        precision: str | None = None,
        maximize: bool = False,
        ns_dtype: torch.dtype | None = None,
        clip_threshold: float | None = 5.0,
        cautious_weight_decay: bool = False,
        adjust_lr_fn: AdjustLrFn | None = "original",
        cuda_graphs: bool = True,
        process_group: ProcessGroup | DeviceMesh | None = None,
        preset: Preset | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "rank": rank,
            "beta2": beta2,
            "alpha_kl": alpha_kl,
            "eps": eps,
            "precondition_frequency": precondition_frequency,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "init_eigenvalue": init_eigenvalue,
            "variant": variant,
            "state_dtype": state_dtype,
            "bf16_weights": bf16_weights,
            "backend": backend,
            "precision": precision,
            "maximize": maximize,
            "ns_dtype": ns_dtype,
            "clip_threshold": clip_threshold,
            "cautious_weight_decay": cautious_weight_decay,
            "adjust_lr_fn": adjust_lr_fn,
            "cuda_graphs": cuda_graphs,
        }
        super().__init__(params, defaults, process_group)


class KLShampoo(MatrixOptimizer):
    """KL-Shampoo with both factors whole, as its authors coded it; the baseline of Pro-KLShampoo.

    ``W <- (1 - lr * weight_decay) (W - lr * L^-1/2 M R^-1/2)`` with M an EMA of the gradients. State needs
    2 (m^2 + n^2) elements a weight. AdamW groups, non-finite gradients and first gradients as in
    :class:`ProKLShampoo`.

    Args:
        params: as in :class:`ProKLShampoo`; a ``rank`` in a group is ignored, so that both take the same groups.
        lr: step size.
        weight_decay: decoupled, multiplied by lr, applied after the step.
        momentum: weight of the gradient EMA.
        beta2: weight of the EMAs of the preconditioner.
        eps: damping, once on the product of both sides.
        precondition_frequency: steps between refreshes of the eigenbases.
        init_eigenvalue: as in :class:`ProKLShampoo`; the authors' code uses 0.1.
        state_dtype, bf16_weights, backend, precision, maximize: as in :class:`ProKLShampoo`.
        clip_threshold: likewise; None is the authors' form.
        cautious_weight_decay: as in :class:`ProKLShampoo`, by the stepped weight.
        adjust_lr_fn: "match_rms_adamw" multiplies the direction by 0.2 sqrt((1 + momentum) / (1 - momentum)).
        cuda_graphs, process_group: as in :class:`ProKLShampoo`.
        preset: "paper" is the authors' form: init_eigenvalue=0.1, clip_threshold=None, where these are not given.

    State of a weight, oriented (m <= n): step, skipped, clipped, trust, stale, M (m,n), L, Q_L (m,m), R, Q_R (n,n),
    inv_sqrt_lambda_L (m,), inv_sqrt_lambda_R (n,), and lambda_0 () for "auto".

    Raises:
        TypeError: ``params`` is a module, or ``process_group`` no group.
        ValueError: a hyper-parameter out of bounds, or a parameter that the matrix method cannot take.
    """

    method = KLShampooMethod()

    @constructor
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.002,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        *,
        beta2: float = 0.95,
        eps: float = 1e-8,
        precondition_frequency: int = 10,
        init_eigenvalue: InitEigenvalue = "auto",
        state_dtype: torch.dtype | None = None,
        bf16_weights: str = "stochastic",
        backend: str | None = None,
        precision: str | None = None,
        maximize: bool = False,
        clip_threshold: float | None = 5.0,
        cautious_weight_decay: bool = False,
        adjust_lr_fn: AdjustLrFn | None = "original",
        cuda_graphs: bool = True,
        process_group: ProcessGroup | DeviceMesh | None = None,
        preset: Preset | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "beta2": beta2,
            "eps": eps,
            "precondition_frequency": precondition_frequency,
            "init_eigenvalue": init_eigenvalue,
            "state_dtype": state_dtype,
            "bf16_weights": bf16_weights,
            "backend": backend,
            "precision": precision,
            "maximize": maximize,
            "clip_threshold": clip_threshold,
            "cautious_weight_decay": cautious_weight_decay,
            "adjust_lr_fn": adjust_lr_fn,
            "cuda_graphs": cuda_graphs,
        }
        super().__init__(params, defaults, process_group)
