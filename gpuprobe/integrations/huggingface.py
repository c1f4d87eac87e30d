"""A callback for Hugging Face: ``Trainer(callbacks=[MemoryCallback("run.gpuprobe")], …)``."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gpuprobe.errors import MissingExtra
from gpuprobe.integrations.session import WatchedRun

__all__ = ["MemoryCallback"]


def _callback_class() -> Any:
    if find_spec("transformers") is None:
        why = "its Trainer calls this callback"
        raise MissingExtra("transformers", "huggingface", why=why)
    return import_module("transformers").TrainerCallback


class MemoryCallback(_callback_class()):  # type: ignore[misc]
    """Record what each optimizer step of ``Trainer.train`` does to memory.

    ``path`` None: a free name beginning with ``trainer``. The rest is as in `gpuprobe.record`;
    what that raises is raised when the training starts. The Trainer does not tell its callbacks
    of an exception: such a recording ends with the next training, or with the process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        level: str = "counters",
        *,
        trace_steps: str = "",
        force: bool = False,
    ) -> None:
        super().__init__()
        self._run = WatchedRun(path, "trainer", level=level, trace_steps=trace_steps, force=force)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ranks = (args.process_index, args.local_process_index, args.world_size)
        # No optimizer: it may be wrapped by now, and is found at its first step either way.
        self._run.start(kwargs.get("model"), ranks=ranks)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.finish()
