"""The support bundle of `gpuprobe doctor`, with private data redacted."""
