"""What steps take: time beside other packages', kernels, memory, and a divided step."""
