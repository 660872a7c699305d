"""State in the weight's coordinates, as the specifications and files before 0.6 have it, and in the eigenbases.

M_Q is Q_L^T M, of KL-Shampoo Q_L^T M Q_R; L_Q is Q_L^T L Q_L, and R_Q is Q_R^T R Q_R. All else is the same in both.
"""

from __future__ import annotations

from prokl.algorithm.types import State


def in_weight_coordinates(state: State) -> State:
    """Return a state (B,...), or of one matrix, with M, L and R in the place of M_Q, L_Q and R_Q."""
    Q_L, Q_R, kept = state["Q_L"], state.get("Q_R"), {"M_Q", "L_Q", "R_Q"}
    new = {key: value for key, value in state.items() if key not in kept}
    M = Q_L @ state["M_Q"]
    new |= {"M": M if Q_R is None else M @ Q_R.mT, "L": Q_L @ state["L_Q"] @ Q_L.mT}
    return new if Q_R is None else new | {"R": Q_R @ state["R_Q"] @ Q_R.mT}


def in_eigenbases(state: State) -> State:
    """Undo :func:`in_weight_coordinates`, of orthonormal Q_L and Q_R."""
    Q_L, Q_R, kept = state["Q_L"], state.get("Q_R"), {"M", "L", "R"}
    new = {key: value for key, value in state.items() if key not in kept}
    M = Q_L.mT @ state["M"]
    new |= {"M_Q": M if Q_R is None else M @ Q_R, "L_Q": Q_L.mT @ state["L"] @ Q_L}
    return new if Q_R is None else new | {"R_Q": Q_R.mT @ state["R"] @ Q_R}
