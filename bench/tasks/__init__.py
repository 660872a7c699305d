"""What an optimizer is put to in its users' hands, task by task, and which of the peers stand it.

A task is a function of a peer. Its first sentence is the criterion; it returns what happened where that is met, and
raises :class:`~bench.tasks.problem.Failed` where it is not.
"""

from collections.abc import Callable

from bench.tasks import gradients, keeping, precision, spread, training
from bench.tasks.peers import Peer

TASKS: dict[str, Callable[[Peer], str]] = {
    "whole model in one optimizer": training.whole_model,
    "experts": training.experts,
    "convolutions": training.convolutions,
    "resume": keeping.resume,
    "bf16 resume": keeping.bf16_resume,
    "deepcopy": keeping.deepcopy,
    "pickle": keeping.pickled,
    "closure": training.closure,
    "OneCycle defaults": training.one_cycle,
    "unnamed groups": training.unnamed_groups,
    "NaN in a matrix's gradient": gradients.nan_in_matrix,
    "NaN in an embedding's gradient": gradients.nan_elsewhere,
    "missing gradients": gradients.missing,
    "float64": precision.float64,
    "dtype change": precision.dtype_change,
    "flat vectors": precision.flat_vectors,
    "compile": precision.compiled,
    "DDP": spread.ddp,
    "ZeRO": spread.zero,
    "DCP": spread.dcp,
    "DCP, late starter": spread.late_dcp,
    "flattened DCP": spread.flattened_dcp,
}
"""By name, in the table's order."""
