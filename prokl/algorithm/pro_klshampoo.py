"""Pro-KLShampoo and its variants: settings, state, start and specification; its step is in stages.py."""

from __future__ import annotations

from torch import Tensor

from prokl.algorithm import reference
from prokl.algorithm.algebra import State
from prokl.algorithm.initial import initialise
from prokl.algorithm.method import Group
from prokl.algorithm.settings import ProHyper, check_pro
from prokl.algorithm.shapes import effective_rank


class ProKLShampooMethod:
    """Pro-KLShampoo and its variants as a :class:`prokl.algorithm.method.Method`."""

    name: str = "pro-klshampoo"
    fixed: tuple[str, ...] = ("rank", "variant", "state_dtype", "init_eigenvalue")
    check = staticmethod(check_pro)
    hyper = staticmethod(ProHyper.of)
    reference_step = staticmethod(reference.step)
    reference_refresh = staticmethod(reference.refresh_eigenbases)

    def rank(self, group: Group, m: int, n: int) -> int:
        """Return min(rank, m, n - 1)."""
        return effective_rank(group["rank"], m, n)

    def state_shapes(self, m: int, n: int, rank: int, group: Group) -> dict[str, tuple[int, ...]]:
        """Return the shape of every state tensor of one matrix, by its key."""
        shapes: dict[str, tuple[int, ...]] = {
            "M": (m, n),
            "U": (n, rank),
            "L": (m, m),
            "S": (rank, rank),
            "Q_L": (m, m),
            "Q_S": (rank, rank),
            "inv_sqrt_lambda_L": (m,),
            "inv_sqrt_lambda_S": (rank,),
            "inv_sqrt_mu": (),
            "clipped": (),
        }
        return shapes | ({"lambda_0": ()} if group["init_eigenvalue"] == "auto" else {})

    def workspace(self, m: int, n: int, rank: int) -> int:
        """Return the elements of temporary memory that a step needs for one matrix at most."""
        return 8 * m * n + 9 * m * m + 6 * n * rank

    def initialise(self, G: Tensor, rank: int, group: Group) -> State:
        """Make the state (B,...) from the initialising gradients G (B,m,n)."""
        return initialise(G, rank, group["beta2"], group["init_eigenvalue"])
