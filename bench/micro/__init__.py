"""Microbenchmarks of operations and kernels: ``pytest bench --benchmark-only``."""
