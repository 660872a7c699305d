"""What steps take: time beside other packages', kernels, memory, a divided step, the host's part."""
