"""Benchmarks of prokl; run from a checkout, never installed.

Commands are the modules of this folder: ``pretrain`` and ``experiments`` train; ``step_cpu``, ``step_kernels`` and
``memory`` measure whole steps, ``pytest bench`` primitives; ``aot`` and ``csrc_report`` compile; ``summary`` and
``tables`` show what was recorded in ``results``; ``c4`` and ``capture_factors`` make data. What they are built from:

* ``training``: data, one training loop, contenders; ``experiments``: the paper's tables and figures.
* ``steps``, ``micro``: what is timed, how it is checked first, and tables of it.
* ``compiled``: launches of kernels and their listings.
* ``models``, ``presets``, ``shapes``, ``costs``, ``rates``: models, the paper's settings, counts, the machine's rates.
* ``records``, ``markdown``, ``drawing``, ``errors``: rows, tables, figures, and how commands end.
"""
