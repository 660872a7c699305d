"""The backends: they compute operations, read gradients and write weights; the choice among them."""
