"""Models in training: data, one training loop, contenders and what a run gives."""
