"""Values of tensors on the native engine, computed on the CPU over the device's memory."""

from gpuprobe.native.values.session import Values

__all__ = ["Values"]
