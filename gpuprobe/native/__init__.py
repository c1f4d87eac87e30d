"""A CUDA runtime that computes nothing: CUDA builds of torch run without a GPU."""
