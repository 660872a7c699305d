"""Gradients that are no ordinary ones: how far a step goes, and what a run loses, by every optimizer."""
