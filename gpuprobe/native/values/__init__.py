"""Values of tensors on a simulated GPU, computed on the CPU over its memory."""

from gpuprobe.native.values.session import Values

__all__ = ["Values"]
