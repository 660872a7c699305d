"""Who computes a primitive, reads gradients and writes weights, and whether that runs here; imports the algorithm."""
