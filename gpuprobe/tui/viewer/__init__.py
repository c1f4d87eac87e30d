"""`gpuprobe view`."""
