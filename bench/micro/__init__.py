"""Microbenchmarks of every primitive and kernel: ``pytest bench --benchmark-only``."""
