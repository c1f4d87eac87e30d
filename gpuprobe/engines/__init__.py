"""The engines that a program can run on: this machine's GPUs, torch's CUDA code without a GPU
(native), or a model of both (virtual).

Only this package imports `gpuprobe.virtual`, and only `gpuprobe.engines.choice.choose` decides
which engine is used.
"""
