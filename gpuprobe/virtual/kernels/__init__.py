"""What the host computes in place of kernels that CUDA has and the CPU lacks."""
