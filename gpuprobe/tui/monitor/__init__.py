"""`gpuprobe top`."""
