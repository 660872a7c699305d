"""What the compilers made of the kernels: launches and their listings."""
