"""Values of tensors on a simulated GPU, computed on the CPU over its memory."""
