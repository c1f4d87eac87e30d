"""Processes that a program starts with ``torch.multiprocessing.spawn``, recorded as ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing

from gpuprobe.patching import patch
from gpuprobe.sampler.environment import as_rank, ranks
from gpuprobe.sampler.hooks.processes.children import not_followed
from gpuprobe.sampler.hooks.processes.recorded import next_job, spawned_path
from gpuprobe.sampler.recorder import Recorder


def follow_spawns(output: Path, start: Callable[[Path], Recorder]) -> Callable[[], None]:
    """Have the processes of every ``torch.multiprocessing.spawn`` recorded as the ranks of one
    recording each, next to ``output``. ``start`` makes the recorder of a process, in that process:
    it is pickled. Returns what undoes that.
    """
    original = torch.multiprocessing.spawn

    def spawn(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        *rest: Any,
        **options: Any,
    ) -> Any:
        if ranks()[2] > 1 or options.get("start_method", "spawn") != "spawn":
            return original(fn, args, nprocs, *rest, **options)
        path = spawned_path(output, next_job(output))
        path.mkdir()
        return original(_Spawned(fn, path, nprocs, start), args, nprocs, *rest, **options)

    return patch(torch.multiprocessing, "spawn", functools.wraps(original)(spawn))


class _Spawned:
    """What a program spawns, recorded there as one of ``count`` ranks."""

    def __init__(
        self, fn: Callable[..., Any], path: Path, count: int, start: Callable[[Path], Recorder]
    ) -> None:
        self._fn = fn
        self._path = path
        self._count = count
        self._start = start

    def __call__(self, rank: int, *args: Any) -> None:
        not_followed()
        with as_rank(rank, rank, self._count):  # the program's own environment is not changed
            recorder = self._start(self._path)
            recorder.start_guarded()
        error: BaseException | None = None
        try:
            self._fn(rank, *args)
        except BaseException as raised:
            error = raised
            raise
        finally:
            recorder.stop(error)
            recorder.finish()
