"""Figures of a live optimizer: its health in a dozen numbers and in words, dictionaries by matrix, and a picture.

Nothing is hooked into ``step()`` and nothing is changed. A call reads the state, and the gradients that are there,
does its work on their device for all weights of a shape at once, and then waits for the device once to read the
results; ``plot``, which makes two calls, twice. Call it every so many steps, between ``backward()`` and ``step()``::

    loss.backward()
    if step % 100 == 0:
        health = diagnostics.health(optimizer, since=health)
        run.log(health.numbers | diagnostics.scalars(optimizer), step=step)
        diagnostics.plot(optimizer, f"spectra-{step}.png")
    optimizer.step()
"""

from prokl.diagnostics.calibration import alpha_kl_bracket, gap_bound, tail_am_gm
from prokl.diagnostics.figure import plot
from prokl.diagnostics.report import eigenvalues, phi, scalars, spectra
from prokl.diagnostics.summary import Health, health

__all__ = [
    "Health",
    "alpha_kl_bracket",
    "eigenvalues",
    "gap_bound",
    "health",
    "phi",
    "plot",
    "scalars",
    "spectra",
    "tail_am_gm",
]
