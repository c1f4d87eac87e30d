"""A CUDA device that exists only in software."""

from gpuprobe.virtual.operators.registry import register_operator

__all__ = ["register_operator"]
