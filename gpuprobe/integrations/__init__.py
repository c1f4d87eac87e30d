"""Recording from inside training loops. Each module needs its own library and imports it only when
the module is imported:

* `gpuprobe.integrations.lightning.MemoryCallback`, for a Lightning ``Trainer``;
* `gpuprobe.integrations.huggingface.MemoryCallback`, for a Hugging Face ``Trainer``;
* `gpuprobe.watch_steps`, a decorator for your own step function;
* `gpuprobe.integrations.notebook`, the cell magic ``%%gpuprobe`` of Jupyter.
"""
