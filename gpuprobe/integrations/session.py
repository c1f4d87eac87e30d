"""One recording that a callback starts and ends, whatever becomes of the training in between."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

from gpuprobe.api.watch import as_rank, default_output, record

if TYPE_CHECKING:
    from gpuprobe.api.watch import Recorder

__all__ = ["WatchedRun"]


class WatchedRun:
    """Starts a recording once, and ends it: by `finish`, or when the process ends.

    ``path`` None: a free name in the current directory, made from ``name``. The other
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
        self._options: dict[str, Any] = {
            "level": level,
            "trace_steps": trace_steps,
            "force": force,
        }
        self.recorder: Recorder | None = None

    def start(
        self, model: Any = None, optimizer: Any = None, *, ranks: tuple[int, int, int] | None = None
    ) -> Recorder:
        """Begin to record; what was being recorded is ended first. ``ranks``: (rank, local rank,
        world size), where the environment does not have them. Raises what `record` raises.
        """
        self.finish()
        known = "RANK" in os.environ  # from torchrun
        with as_rank(*(ranks if ranks is not None and not known else (0, 0, 1))):
            path = default_output(self._name) if self._path is None else self._path
            recorder = record(path, model, optimizer, **self._options)
            recorder.__enter__()
        self.recorder = recorder
        # A training that raised, in a loop that no callback ends, would look killed.
        atexit.register(self.finish)
        return recorder

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording, if there is one. ``error``: what ended the training."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            atexit.unregister(self.finish)
            recorder.finish(error)
