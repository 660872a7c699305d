"""Benchmarks of prokl; run from a checkout, never installed.

Seven commands, five of them for people: ``pretrain`` compares optimizers on a small model, ``study`` makes the paper's
tables and tunes every method, ``timing`` measures steps and ``pytest bench`` stages and kernels, ``compile_report``
compiles, ``tables`` shows what was recorded in ``results``; and ``first`` asks a GPU whether anything works, ``c4``
makes data. What they are built from:

* ``optimizers``, ``rows``, ``command``, ``clock``: what is compared, the schema of ``results``, how commands read
  options and end, times on a device.
* ``study``: searches, runs that are resumed or made anew, and kept as rows; ``training``: data, a loop for runs with
  checkpoints, another for a model that stays on a GPU; ``workers``: one pool.
* ``timing``, ``micro``: what is timed; ``gate``: how it is checked first.
* ``compile_report``: what the compilers make of kernels and csrc, what a step launches of them, and how they travel.
* ``models``, ``presets``, ``shapes``: models, and the paper's settings.
* ``markdown``: tables.
"""
