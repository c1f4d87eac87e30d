"""A callback for Hugging Face: ``Trainer(callbacks=[MemoryCallback("run.gpuprobe")], …)``, or
``TrainingArguments(report_to=["gpuprobe", "wandb"])`` once this module is imported.
"""

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


class _State(Protocol):
    """The part of ``TrainerState`` that is read."""

    is_world_process_zero: bool


class MemoryCallback(_callback_class()):  # type: ignore[misc]
    """Record the memory of each optimizer step of ``Trainer.train``.

    ``path`` None: a new name that begins with ``trainer``. The other arguments are those of
    `gpuprobe.record`, whose errors are raised when the training starts. The Trainer does not notify
    its callbacks of exceptions: the recording of a failed training ends with the next training, or
    with the process.

    When a training ends, its `gpuprobe.metrics` join what the Trainer logs then: they are in
    ``trainer.train().metrics``, and reach the trackers whose callbacks are called after this one,
    those named after ``"gpuprobe"`` in ``report_to``.
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

    def on_log(
        self,
        args: _Arguments,
        state: _State,
        control: object,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        # Logged once, when the training is over. The Trainer's result is this very dict.
        if logs is not None and "train_runtime" in logs and state.is_world_process_zero:
            logs.update(self._recording.final_metrics())

    def on_train_end(
        self, args: _Arguments, state: object, control: object, **kwargs: object
    ) -> None:
        self._recording.finish()


def _register() -> None:
    """Make "gpuprobe" a name for ``report_to``."""
    known = import_module("transformers.integrations.integration_utils").INTEGRATION_TO_CALLBACK
    known["gpuprobe"] = MemoryCallback


_register()
