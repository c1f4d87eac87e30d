"""One recording that a callback starts and ends, whatever becomes of the training in between."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpuprobe.api.watch import default_output, record

if TYPE_CHECKING:
    from gpuprobe.sampler.recorder import Recorder

__all__ = ["WatchedRun"]


class WatchedRun:
    """Starts a recording once, and ends it: when told to, or when the process ends.

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
        with _as_rank(ranks):
            path = default_output(self._name) if self._path is None else self._path
            recorder = record(path, model, optimizer, **self._options)
            recorder.__enter__()
        self.recorder = recorder
        # A training that raised, in a loop that tells nobody, would look killed.
        atexit.register(self.finish)
        return recorder

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording, if there is one. ``error``: what ended the training."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            atexit.unregister(self.finish)
            recorder.finish(error)


@contextmanager
def _as_rank(ranks: tuple[int, int, int] | None) -> Iterator[None]:
    """Show the ranks the way torchrun does, where nobody has; and take that back again."""
    if ranks is None or ranks[2] <= 1 or "RANK" in os.environ:
        yield
        return
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(zip(names, map(str, ranks), strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
