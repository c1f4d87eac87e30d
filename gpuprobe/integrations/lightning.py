"""A callback for Lightning: ``Trainer(callbacks=[MemoryCallback("run.gpuprobe")])``.

Works with the package ``lightning``, and with ``pytorch_lightning`` if that is imported or if only
that is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from gpuprobe.errors import MissingExtra
from gpuprobe.integrations.steps import TrainingRecording

__all__ = ["MemoryCallback"]


def _callback_class() -> type:
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in (*(name for name in names if name in sys.modules), *names):
        if find_spec(name.partition(".")[0]) is not None:
            callback: type = import_module(f"{name}.callbacks").Callback
            return callback
    raise MissingExtra("lightning", "lightning", why="its Trainer calls this callback")


class _Logger(Protocol):
    """The part of a Lightning logger that is used."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...


class _Trainer(Protocol):
    """The part of Lightning's ``Trainer`` that is read."""

    global_rank: int
    local_rank: int
    world_size: int
    global_step: int
    is_global_zero: bool
    loggers: Sequence[_Logger]
    optimizers: Sequence[object]


class MemoryCallback(_callback_class()):  # type: ignore[misc]
    """Record the memory of each training step of ``Trainer.fit``.

    A step ends with the optimizer's step, so that accumulated gradients are one step. With
    Lightning's automatic optimization the forward and the backward pass run inside the optimizer's
    step, as its closure, and are shown there (``optimizer/forward``). ``path`` None: a new name
    that begins with ``lightning``. The other arguments are those of `gpuprobe.record`, whose errors
    are raised when the training starts.

    When the training ends, the Trainer's loggers get its `gpuprobe.metrics`.
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
            path, "lightning", level=level, trace_steps=trace_steps, force=force
        )

    def on_train_start(self, trainer: _Trainer, pl_module: object) -> None:
        """Start to record. The optimizers exist by now, and the model is on its device."""
        ranks = (trainer.global_rank, trainer.local_rank, trainer.world_size)
        # Without the model: a LightningModule is not called itself, only the modules in it are.
        self._recording.start(None, list(trainer.optimizers), ranks=ranks)

    def on_train_end(self, trainer: _Trainer, pl_module: object) -> None:
        if trainer.is_global_zero and trainer.loggers:
            values = self._recording.final_metrics()
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)
        self._recording.finish()

    def on_exception(self, trainer: _Trainer, pl_module: object, exception: BaseException) -> None:
        self._recording.finish(exception)

    def teardown(self, trainer: _Trainer, pl_module: object, stage: str) -> None:
        self._recording.finish()
