"""What the compilers make of the kernels, Triton's and csrc's, what a step launches of them, and how they travel."""
