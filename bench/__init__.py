"""Benchmarks of prokl; run from a checkout, never installed.

CONTRIBUTING.md has the commands. They are built from:

* ``optimizers``, ``rows``, ``command``, ``clock``: what is compared, the schema of ``results``, how commands read
  options and end, times on a device.
* ``study``: searches, runs that are resumed or made anew, and kept as rows; ``training``: data, a loop for runs with
  checkpoints, another for a model that stays on a GPU; ``workers``: one pool.
* ``timing``, ``micro``: what is timed; ``gate``: how it is checked first.
* ``compile_report``: what the compilers make of kernels and csrc, what a step launches of them, and how they travel.
* ``models``, ``presets``, ``shapes``: models, and the paper's settings.
* ``markdown``: tables.
"""
