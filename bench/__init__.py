"""Benchmarks of prokl; run from a checkout, never installed.

Commands are the modules of this folder: ``pretrain`` and ``experiments`` train; ``step_cpu``, ``step_kernels`` and
``memory`` measure whole steps, ``pytest bench`` primitives; ``aot`` and ``csrc_report`` compile; ``summary`` and
``tables`` show what was recorded in ``results``; ``c4`` and ``capture_factors`` make data. What they are built from:

* ``optimizers``, ``rows``, ``command``: what is compared, the schema of ``results``, how commands read options and end.
* ``training``: data, one training loop; ``experiments``: the paper's tables and figures, ``pretrain`` the smallest.
* ``steps``, ``micro``: what is timed, how it is checked first, and tables of it.
* ``compiled``: launches of kernels and their listings.
* ``models``, ``presets``, ``shapes``, ``costs``, ``rates``: models, the paper's settings, counts, the machine's rates.
* ``markdown``, ``drawing``: tables and figures.
"""
