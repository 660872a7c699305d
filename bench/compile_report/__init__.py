"""Report what compilers make of Triton's and csrc's kernels, count a step's launches, and pack kernels for a GPU."""
