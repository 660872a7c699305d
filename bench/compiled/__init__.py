"""What the compilers make of the kernels, Triton's and csrc's."""
