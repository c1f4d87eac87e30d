"""A callback for Hugging Face: ``Trainer(callbacks=[MemoryCallback("run.gpuprobe")], …)``."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from gpuprobe.errors import MissingExtra
from gpuprobe.integrations.steps import TrainingRecording

__all__ = ["MemoryCallback"]


def _callback_class() -> type:
    if find_spec("transformers") is None:
        why = "its Trainer calls this callback"
        raise MissingExtra("transformers", "huggingface", why=why)
    callback: type = import_module("transformers").TrainerCallback
    return callback


class _Arguments(Protocol):
    """The part of ``TrainingArguments`` that is read."""

    process_index: int
    local_process_index: int
    world_size: int


class MemoryCallback(_callback_class()):  # type: ignore[misc]
    """Record the memory of each optimizer step of ``Trainer.train``.

    ``path`` None: a new name that begins with ``trainer``. The other arguments are those of
    `gpuprobe.record`, whose errors are raised when the training starts. The Trainer does not notify
    its callbacks of exceptions: the recording of a failed training ends with the next training, or
    with the process.
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
        self._recording = TrainingRecording(
            path, "trainer", level=level, trace_steps=trace_steps, force=force
        )

    def on_train_begin(
        self, args: _Arguments, state: object, control: object, **kwargs: object
    ) -> None:
        ranks = (args.process_index, args.local_process_index, args.world_size)
        # Without the optimizer: it may be wrapped already, and is found at its first step anyway.
        self._recording.start(kwargs.get("model"), ranks=ranks)

    def on_train_end(
        self, args: _Arguments, state: object, control: object, **kwargs: object
    ) -> None:
        self._recording.finish()
