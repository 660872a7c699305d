"""Groups, buckets, clocks, checkpoints and CUDA graphs; imports the algorithm and the backends."""
