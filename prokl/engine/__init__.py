"""Whose turn it is: groups, buckets, clocks, checkpoints, CUDA graphs; imports the algorithm and the backends."""
