"""Benchmarks of prokl; run from a checkout, never installed."""
