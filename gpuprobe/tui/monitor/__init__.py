"""`gpuprobe top`: the dashboard of GPUs and processes."""
