"""A decorator for a training step of your own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from gpuprobe.api.watch import in_context
from gpuprobe.integrations.session import WatchedRun

__all__ = ["watch_steps"]

_F = TypeVar("_F", bound=Callable[..., Any])


def watch_steps(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    level: str = "counters",
    *,
    trace_steps: str = "",
    force: bool = False,
) -> Callable[[_F], _F]:
    """Record every call of a function as one training step.

    ::

        @gpuprobe.watch_steps("run.gpuprobe")
        def train_step(batch): ...

    The recording begins with the first call and ends with the process, or with
    ``train_step.finish()``; a later call starts another one (which needs ``force``). Inside ``with
    gpuprobe.record(...) as rec``, use ``rec.wrap`` instead. Arguments are those of `record`, whose
    errors are raised at the first call.
    """
    run = WatchedRun(path, "steps", level=level, trace_steps=trace_steps, force=force)

    def decorate(step_fn: _F) -> _F:
        def step() -> AbstractContextManager[None]:
            recorder = run.recorder
            if recorder is None:
                recorder = run.start(model, optimizer)
            return recorder.step_of_call()

        stepped = in_context(step_fn, step)
        stepped.finish = run.finish  # type: ignore[attr-defined]
        return stepped

    return decorate
