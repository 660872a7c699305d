"""Figures of a live optimizer: its health in a dozen numbers and in words, and dictionaries by matrix.

Nothing is hooked into ``step()`` and nothing is changed. A call reads the state, and the gradients that are there,
does its work on their device for all weights of a shape at once, and then waits for the device once to read the
results. Call it every so many steps, between ``backward()`` and ``step()``.
"""

from prokl.diagnostics.calibration import alpha_kl_bracket, gap_bound, tail_am_gm
from prokl.diagnostics.report import phi, scalars, spectra
from prokl.diagnostics.summary import Health, health

__all__ = [
    "Health",
    "alpha_kl_bracket",
    "gap_bound",
    "health",
    "phi",
    "scalars",
    "spectra",
    "tail_am_gm",
]
