"""What steps take: time beside other packages', and kernels."""
