"""A callback for Lightning: ``Trainer(callbacks=[MemoryCallback("run.gpuprobe")])``.

Works with the package ``lightning`` and, where only that is there or it is the one in use, with
``pytorch_lightning``.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gpuprobe.errors import MissingExtra
from gpuprobe.integrations.session import WatchedRun

__all__ = ["MemoryCallback"]


def _callback_class() -> Any:
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in (*(name for name in names if name in sys.modules), *names):
        if find_spec(name.partition(".")[0]) is not None:
            return import_module(f"{name}.callbacks").Callback
    raise MissingExtra("lightning", "lightning", why="its Trainer calls this callback")


class MemoryCallback(_callback_class()):  # type: ignore[misc]
    """Record what each training step of ``Trainer.fit`` does to memory.

    A step ends where the optimizer steps, so that accumulated gradients are one step. With
    Lightning's automatic optimization the forward and the backward pass run inside the
    optimizer's step, as its closure, and are shown there (``optimizer/forward``). ``path`` None:
    a free name beginning with ``lightning``. The rest is as in `gpuprobe.record`; what that
    raises is raised when the training starts.
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
        self._run = WatchedRun(path, "lightning", level=level, trace_steps=trace_steps, force=force)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers exist by now, and the model is where it is going to be."""
        ranks = (trainer.global_rank, trainer.local_rank, trainer.world_size)
        # No model: a LightningModule is not itself called, what it calls is what to look at.
        self._run.start(None, list(trainer.optimizers), ranks=ranks)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._run.finish(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._run.finish()
