"""The paper's tables, every method tuned at every length, and a larger model: ``python -m bench.study NAME``."""
