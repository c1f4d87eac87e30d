"""Operators and functions of other packages' CUDA extensions."""
