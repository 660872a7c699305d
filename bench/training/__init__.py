"""Models in training: data, one training loop and what a run gives."""
