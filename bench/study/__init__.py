"""The paper's tables and figures, one command each: ``python -m bench.study NAME``."""
