"""The tables of GPUs and processes of `gpuprobe top`."""
