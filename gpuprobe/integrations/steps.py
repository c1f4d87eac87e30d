"""``gpuprobe.watch_steps``, and the recording that it and the callbacks share."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gpuprobe.api.recordings import metrics
from gpuprobe.api.watch import as_rank, default_output, record
from gpuprobe.sampler.hooks.wrapping import in_context

if TYPE_CHECKING:
    from gpuprobe.sampler.recorder import Recorder


__all__ = ["TrainingRecording", "watch_steps"]


class TrainingRecording:
    """A recording that a callback starts, and that ends with `finish` or with the process.

    ``path`` None: a new name in the current directory that begins with ``name``. The other
    arguments are those of `gpuprobe.record`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        name: str,
        *,
        level: str = "counters",
        trace_steps: str = "",
        force: bool = False,
    ) -> None:
        self._path = path
        self._name = name
        self._record = partial(record, level=level, trace_steps=trace_steps, force=force)
        self.recorder: Recorder | None = None
        self._output: str | os.PathLike[str] = ""

    def start(
        self,
        model: object = None,
        optimizer: object = None,
        *,
        ranks: tuple[int, int, int] | None = None,
    ) -> Recorder:
        """Start to record; an earlier recording ends first. ``ranks``: (rank, local rank, world
        size), used unless the environment has them. Raises what `record` raises.
        """
        self.finish()
        by_torchrun = "RANK" in os.environ
        with as_rank(*(ranks if ranks is not None and not by_torchrun else (0, 0, 1))):
            path = default_output(self._name) if self._path is None else self._path
            recorder = self._record(path, model, optimizer)
            recorder.__enter__()
        self.recorder, self._output = recorder, path
        # The recording of a failed training that no callback ends would look killed.
        atexit.register(self.finish)
        return recorder

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording, if any. ``error``: the exception that ended the training."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            atexit.unregister(self.finish)
            recorder.finish(error)

    def final_metrics(self) -> dict[str, float]:
        """End the recording, and its `gpuprobe.metrics`; empty if there is none, or with a warning
        if it cannot be read: no error of that may end a training.
        """
        if self.recorder is None:
            return {}
        self.finish()
        try:
            return metrics(self._output)
        except Exception as error:  # noqa: BLE001 - a warning
            warnings.warn(f"gpuprobe: no metrics of {self._output}: {error}", stacklevel=2)
            return {}


_F = TypeVar("_F", bound=Callable[..., Any])


def watch_steps(
    path: str | os.PathLike[str],
    model: object = None,
    optimizer: object = None,
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
    run = TrainingRecording(path, "steps", level=level, trace_steps=trace_steps, force=force)

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
