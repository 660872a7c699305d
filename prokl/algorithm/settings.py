"""Hyper-parameters of a step, read from a parameter group when its bucket is laid out; their bounds and places.

Every message names the argument, the value, the bound and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Rational, Real
from operator import not_
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from prokl.algorithm.polynomials import MUON, NsCoefficients, Polynomial, each
from prokl.algorithm.shapes import alpha_kl_bracket, effective_rank

Variant = Literal["pro-klshampoo", "smok-hop", "subspace-only", "complement-only"]
VARIANTS: tuple[str, ...] = get_args(Variant)
SUBSPACE_VARIANTS = ("pro-klshampoo", "smok-hop", "subspace-only")
"""Variants whose update has the subspace part Delta_sub."""
COMPLEMENT_VARIANTS = ("pro-klshampoo", "smok-hop", "complement-only")
"""Variants whose update has the complement part Delta_res."""
POLAR_VARIANTS = ("pro-klshampoo", "complement-only")
"""Variants whose complement part goes through Newton-Schulz."""
BACKENDS = ("reference", "torch", "triton")
"""Values of ``backend``; "reference" is the specification itself, one weight at a time."""
Precision = Literal["balanced", "faithful"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
"""Values of ``precision``; :mod:`prokl.pair` has what balanced products are made of."""
BF16_WEIGHTS = ("stochastic", "master", "plain")
"""Values of ``bf16_weights``; :mod:`prokl.backends.rounding` has what they do."""
Group = dict[str, Any]
"""A parameter group, with all of its hyper-parameters."""
AlphaKL = float | Literal["auto"]
"""Type of ``alpha_kl``."""
AdjustLrFn = Literal["original", "match_rms_adamw"]
"""Values of ``adjust_lr_fn``, named as torch.optim.Muon's."""
InitEigenvalue = float | Literal["auto"]
"""Type of ``init_eigenvalue``."""


class Advanced(TypedDict, total=False):
    """Keyword arguments that hardly anyone sets; docs/settings.md says what each does."""

    eps: float
    init_eigenvalue: InitEigenvalue
    clip_threshold: float | None
    precision: Precision | None
    cautious_weight_decay: bool
    cuda_graphs: bool
    ns_steps: int
    ns_coefficients: NsCoefficients
    ns_dtype: torch.dtype | None


KL_ADVANCED = Advanced(
    eps=1e-8, init_eigenvalue="auto", clip_threshold=5.0, precision=None, cautious_weight_decay=False, cuda_graphs=True
)
"""Defaults of KL-Shampoo's advanced settings."""
PRO_ADVANCED = Advanced(**KL_ADVANCED, ns_steps=5, ns_coefficients=MUON, ns_dtype=None)
"""Pro-KLShampoo's; the Newton-Schulz quintic is Muon's (Keller Jordan)."""
LEFT_BY_SCHEDULERS = -1e-9
"""Least learning rate. A scheduler that multiplies one down to zero, as LinearLR does, leaves n eps of the first after
n steps, of either sign: 2e-10 after a million."""
ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates over lr, as torch.optim.Muon takes it: independent gradients give
sqrt((1 - beta_1) / (1 + beta_1)), 0.23 with beta_1 = 0.9 and 0.16 with 0.95."""


@cache
def cpu_has_bfloat16() -> bool:
    """Return True if the CPU multiplies bfloat16 by instructions of its own, or torch cannot tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.12 and later
    return capabilities is None or any(has for name, has in capabilities().items() if "bf16" in name)


@dataclass(frozen=True)
class Hyper:
    """Settings of a step, ``W <- (1 - lr * weight_decay) W - lr * direction``, and what follows.

    A bucket has lr and weight decay 0 here: they may change in every step, and go to what writes the weights.
    """

    lr: float | Tensor
    weight_decay: float
    momentum: float
    beta2: float
    eps: float
    clip_threshold: float | None
    cautious_weight_decay: bool
    adjust_lr_fn: AdjustLrFn
    gradient_weights: tuple[float, float, float]
    """``(g, a, b)``: M <- momentum * M + g * G, then the direction uses a * G + b * M."""
    gain: float
    """Size of the momentum under gradients of size 1 that never change direction; 1 for an EMA."""
    direction_scale: float
    """Factor of the whole direction; 1 but for "match_rms_adamw"."""


@dataclass(frozen=True)
class ProHyper(Hyper):
    """Pro-KLShampoo's own: mixing weight, Newton-Schulz and the variant."""

    alpha_kl: float
    """Weight of the subspace's part; Smok-Hop sets it to 1 whatever is passed (paper, after Algorithm 2)."""
    polynomials: tuple[Polynomial, ...]
    """(a, b, c) of every Newton-Schulz iteration."""
    ns_dtype: torch.dtype
    """Dtype of their products."""
    variant: Variant


def hyper(group: Group, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Hyper:
    """Read KL-Shampoo's settings, whose momentum is an EMA; see :meth:`prokl.algorithm.method.Method.hyper`."""
    return Hyper(**_shared(group, (1.0 - group["momentum"], 0.0, 1.0)))


def pro_hyper(group: Group, m: int, n: int, dtype: torch.dtype, device: torch.device) -> ProHyper:
    """Read Pro-KLShampoo's settings; see :meth:`prokl.algorithm.method.Method.hyper`.

    The momentum has Nesterov's lookahead (P1), and Smok-Hop's is an EMA. An "auto" ``alpha_kl`` is the geometric mean
    of the bracket over c_a; with c_a, which makes the part larger where rows outnumber columns, losses were higher
    (docs/experiments.md). Newton-Schulz is in bfloat16 as Muon's, with float64 weights in float64, and in float32 on a
    device without instructions for bfloat16.
    """
    variant, alpha_kl, ns_dtype, momentum = (group[k] for k in ("variant", "alpha_kl", "ns_dtype", "momentum"))
    shared = _shared(group, (1.0, 1.0, momentum))
    if variant == "smok-hop":
        shared, alpha_kl = _shared(group, (1.0 - momentum, 0.0, 1.0)), 1.0
    if shared["adjust_lr_fn"] != "original" and variant in POLAR_VARIANTS:
        shared["direction_scale"] = ADAMW_RMS * math.sqrt(n)  # of a root mean square of 1/sqrt(n); torch.optim.Muon's
    if alpha_kl == "auto":
        low, high = alpha_kl_bracket(m, n, effective_rank(group["rank"], m, n))
        alpha_kl = math.sqrt(low * high)
    if ns_dtype is None:
        if device.type == "cuda":
            has_bfloat16 = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
        else:
            has_bfloat16 = device.type != "cpu" or cpu_has_bfloat16()
        ns_dtype = torch.float64 if dtype == torch.float64 else torch.bfloat16 if has_bfloat16 else torch.float32
    polynomials = each(group["ns_coefficients"], group["ns_steps"])
    return ProHyper(**shared, alpha_kl=alpha_kl, polynomials=polynomials, ns_dtype=ns_dtype, variant=variant)


def _shared(group: Group, weights: tuple[float, float, float]) -> dict[str, Any]:
    """Return the fields of :class:`Hyper`.

    The direction is momentum whose entries have, of whitened independent gradients, the root mean square below, which
    "match_rms_adamw" brings to AdamW's.
    """
    derived = {"gradient_weights", "gain", "direction_scale"}
    given = {field.name: group[field.name] for field in fields(Hyper) if field.name not in derived}
    (g, a, b), momentum = weights, given["momentum"]
    rms = math.hypot(a + b * g, b * g * momentum / math.sqrt(1 - momentum**2))
    scale = 1.0 if given["adjust_lr_fn"] == "original" else ADAMW_RMS / rms
    return given | {"gradient_weights": weights, "gain": a + b * g / (1 - momentum), "direction_scale": scale}


def plain(value: Any) -> Any:
    """Return a setting in the types that a step takes, whatever a configuration, a checkpoint or NumPy gave.

    Numbers and strings are Python's own then, any sequence is a tuple, and the name of a dtype in torch is the dtype.
    Tensors, and what is no setting, stay as they are.
    """
    if type(value) in (bool, int, float) or value is None or isinstance(value, Tensor):
        return value
    if hasattr(value, "tolist") and not isinstance(value, type):  # NumPy's numbers and arrays, not their classes
        value = value.tolist()
    if isinstance(value, str):
        text = str.__str__(value)
        dtype = getattr(torch, text, None)
        return dtype if isinstance(dtype, torch.dtype) else text
    if isinstance(value, Sequence):
        return tuple(map(plain, value))
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def clone_if_tensor(value: Any) -> Any:
    """Return a setting for one holder alone: a tensor, which schedulers fill in place, as a copy."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_number(value: Any, least: float = 0.0, below: float = 2**1024) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number: Any = value if isinstance(value, Rational) else float(value)  # NumPy's do not compare with so large an int
    return least <= number < below


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_count(value: Any) -> bool:
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    return integer and value >= 1


def _is_rate(lr: Any) -> bool:
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or lr.ndim > 1 or not lr.is_floating_point() or lr.device.type == "meta":
            return False
        lr = lr.item() if lr.device.type == "cpu" else 0.0  # elsewhere reading it could wait for the device
    return _is_number(lr, LEFT_BY_SCHEDULERS)


def _are_betas(betas: Any) -> bool:
    pair = plain(betas)
    return isinstance(pair, tuple) and len(pair) == 2 and all(_is_number(beta, below=1.0) for beta in pair)


def one_of(*choices: Any) -> Bound:
    """Return the bound of a setting that has these values alone."""
    return lambda value: any(value is choice or value == choice for choice in choices), f"one of {choices}"


Bound = tuple[Callable[[Any], bool], str]
"""Whether a value is in bounds, and these in words, which follow "must be"."""
NONNEGATIVE: Bound = (_is_number, "a finite number of at least 0")
FRACTION: Bound = (lambda value: _is_number(value, below=1.0), "in [0, 1)")
COUNT: Bound = (_is_count, "an integer of at least 1")
FLAG = one_of(True, False)
RATE: Bound = (_is_rate, "a finite number of at least 0, or a tensor with one such element, of at most one dimension")
BETAS: Bound = (_are_betas, "two numbers in [0, 1)")
RANK: Bound = (lambda value: _is_auto(value) or _is_count(value), '"auto" or an integer of at least 1')
ALGORITHM = one_of("matrix", "adamw")
LEAST_THRESHOLD = 1.5
"""Near 1 eigenvalues fall as ever and hardly rise: at 1.1 a 6 x 10 weight's settled where gradients had a size of 3."""
SLOWEST_IN_HALF = 0.995
"""A step changes an EMA by 2^-8 of it, half of bfloat16's largest distance, up to 0.996."""
COMMON_BOUNDS: dict[str, Bound] = {
    "lr": RATE,
    "weight_decay": NONNEGATIVE,
    "momentum": FRACTION,
    "beta2": FRACTION,
    "eps": NONNEGATIVE,
    "clip_threshold": (
        lambda value: value is None or _is_number(value, LEAST_THRESHOLD),
        f"a finite number of at least {LEAST_THRESHOLD}, where 1 is the usual size, or None for no bound",
    ),
    "precondition_frequency": COUNT,
    "init_eigenvalue": (
        lambda value: _is_auto(value) or (_is_number(value) and 0 < value <= 3.4e38),
        '"auto" or a number above 0 and of at most 3.4e38, about float32\'s largest',
    ),
    "state_dtype": one_of(None, torch.bfloat16, torch.float32, torch.float64),
    "bf16_weights": one_of(*BF16_WEIGHTS),
    "backend": one_of(None, *BACKENDS),
    "precision": one_of(None, *PRECISIONS),
    "cuda_graphs": FLAG,
    "maximize": FLAG,
    "cautious_weight_decay": FLAG,
    "adjust_lr_fn": one_of(*get_args(AdjustLrFn)),
}
"""Bounds of the settings that both matrix methods have."""
PRO_BOUNDS: dict[str, Bound] = {
    "rank": RANK,
    "alpha_kl": (lambda value: _is_auto(value) or _is_number(value), '"auto" or a finite number of at least 0'),
    "ns_steps": COUNT,
    "variant": one_of(*VARIANTS),
    "ns_dtype": one_of(None, torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""Bounds of those that Pro-KLShampoo alone has."""
ADAMW_BOUNDS: dict[str, Bound] = {"lr": RATE, "weight_decay": NONNEGATIVE, "betas": BETAS, "eps": NONNEGATIVE}
"""Bounds of AdamW's settings that are numbers."""
SYNONYMS = {"learning_rate": "lr", "epsilon": "eps", "heads": "split"}
"""Names that other packages give a setting, where they are not spelt nearly as here."""
CONSTRUCTOR = {*COMMON_BOUNDS, *PRO_BOUNDS, *PRO_ADVANCED, "process_group"} - {"lr", "weight_decay", "rank"}
"""Arguments of a constructor that ``param_groups`` does not take."""
PARAM_GROUPS = {"adamw", "adamw_betas", "adamw_eps", "adamw_lr", "adamw_weight_decay", "matrix", "names"}
PARAM_GROUPS |= {"heads", "split", "split_fused", "transposed"}
"""Arguments of ``param_groups`` that no constructor takes."""
ADAMW = {"amsgrad", "capturable", "foreach", "fused"}
"""Keys of AdamW's groups that are arguments of neither."""


def check(name: str, value: Any, bound: Bound) -> None:
    """Raise ValueError unless a value is in bounds."""
    fits, words = bound
    if not fits(value):
        raise ValueError(f"Invalid {name}={value!r}: must be {words}.")


def check_common(group: Group) -> None:
    """Raise ValueError when a hyper-parameter that both matrix methods have is out of bounds."""
    for name, bound in COMMON_BOUNDS.items():
        check(name, group[name], bound)
    _check_not_differentiable(group)
    for name in ("momentum", "beta2") if plain(group["state_dtype"]) == torch.bfloat16 else ():
        if plain(group[name]) > SLOWEST_IN_HALF:
            raise ValueError(
                f"Invalid {name}={group[name]!r} with state_dtype=torch.bfloat16: must be at most {SLOWEST_IN_HALF}, "
                "as bfloat16 rounds away what slower averages change. Use state_dtype=torch.float32."
            )
    if group["precision"] == "balanced" and group["backend"] == "reference":
        raise ValueError(
            "Invalid precision='balanced' with backend='reference': the specification is as exact as its dtype. Use "
            "precision=None, or another backend."
        )


def check_pro(group: Group) -> None:
    """Raise ValueError when a hyper-parameter of Pro-KLShampoo is out of bounds."""
    check_common(group)
    for name, bound in PRO_BOUNDS.items():
        check(name, group[name], bound)
    if group["adjust_lr_fn"] != "original" and group["variant"] == "subspace-only":
        raise ValueError(
            f"Invalid adjust_lr_fn={group['adjust_lr_fn']!r} with variant='subspace-only': alpha_kl alone sets the "
            "size of that update, which no factor of the shape matches to AdamW's. Use adjust_lr_fn='original'."
        )
    each(plain(group["ns_coefficients"]), group["ns_steps"])


def check_adamw(group: Group) -> None:
    """Raise ValueError when a hyper-parameter of a group that AdamW handles is missing or out of bounds."""
    if "lr" not in group:
        raise ValueError(
            'A group with algorithm="adamw" needs its own lr: the matrix method\'s lr is in other units '
            "(AdamW's is usually around 1e-3)."
        )
    for name, bound in ADAMW_BOUNDS.items():
        check(name, group[name], bound)
    for name in ("amsgrad", "maximize", "capturable", "foreach", "fused"):
        choices = (True, False, None) if name in ("foreach", "fused") else (True, False)
        if not any(group[name] is choice for choice in choices):  # torch's kernels take nothing that is but equal
            raise ValueError(f"Invalid {name}={group[name]!r}: must be one of {choices}.")
    _check_not_differentiable(group)


def _check_not_differentiable(group: Group) -> None:
    check("differentiable", group.get("differentiable"), (not_, "False or left out: no step is recorded for autograd"))


def check_known(title: str, arguments: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError for an argument that is not ``known``: with where it belongs, or the nearest one."""
    for key in (key for key in arguments if key not in known):
        if key == "betas":
            where = "AdamW's are adamw_betas of prokl.param_groups, and the matrix method's are momentum and beta2"
        elif key in PARAM_GROUPS:
            where = f"it belongs to the groups, prokl.param_groups(model, {key}=...)"
        elif key in ADAMW:
            where = f'it is AdamW\'s, and belongs to its groups, those with "algorithm": "adamw", as "{key}"'
        elif key in CONSTRUCTOR and "adamw_lr" in known:
            also = ", and AdamW's is adamw_eps" if key == "eps" else ""
            where = f"it goes to the constructor, ProKLShampoo(groups, {key}=...){also}"
        elif key in CONSTRUCTOR | {"rank"}:
            where = (
                "it is ProKLShampoo's, which alone projects and orthogonalises; leave it out. The authors' form is "
                f"{title}(groups, init_eigenvalue=0.1, clip_threshold=None)"
            )
        elif key == "nesterov":
            where = "its momentum is as the method has it; leave it out"
        else:
            spelt = SYNONYMS.get(key, key.replace("wd", "weight_decay").replace("learning_rate", "lr"))
            turned = [name for name in known if sorted(name.split("_")) == sorted(spelt.split("_"))]  # as lr_adamw
            nearest = turned or get_close_matches(spelt, known, n=1)
            raise TypeError(
                f"{title}() got an unexpected keyword argument {key!r}: "
                + (f"the nearest is {nearest[0]!r}." if nearest else f"it takes {', '.join(known)}.")
            )
        raise TypeError(f"{title}() takes no {key}: {where}.")
