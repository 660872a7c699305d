"""Microbenchmarks of every stage and kernel: ``pytest bench --benchmark-only``."""
