"""A CUDA device that exists only in software."""
