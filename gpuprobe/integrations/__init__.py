"""Recording from inside other people's training loops. Each needs its own library, and imports
it only when it is itself imported:

* `gpuprobe.integrations.lightning.MemoryCallback`, for a Lightning ``Trainer``;
* `gpuprobe.integrations.huggingface.MemoryCallback`, for a Hugging Face ``Trainer``;
* `gpuprobe.watch_steps`, a decorator for a step function of your own.
"""
