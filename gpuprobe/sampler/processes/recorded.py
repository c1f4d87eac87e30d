"""Recorders in the processes that the recorded program starts and that use a GPU.

The recording of such a process is a directory inside the program's, ``child-RANK-PID.gpuprobe``
(``RANK`` is that of the program, 0 without ``torchrun``). Processes that have joined a job with
``torch.distributed``, and those of ``torch.multiprocessing.spawn``, are the ranks of one recording
next to the program's.

Every process that the program spawns imports this module, data loader workers too: it must not
import torch, nor the recorder (`late` is separate for the same reason).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuprobe.errors import UsageError
from gpuprobe.patching import patch

if TYPE_CHECKING:
    from gpuprobe.sampler.base import Sink
    from gpuprobe.sampler.processes.late import JobPlace
    from gpuprobe.sampler.recorder import Recorder

ENDED_EARLY: Final = "ended before anything was recorded"

_MOST: Final = 1_000
"""Names that are tried: the largest number of jobs that a program starts."""


def spawned_path(output: Path, number: int) -> Path:
    """The path of the ``number``-th job that the program recorded into ``output`` starts."""
    name = f"{output.stem}.spawned.{number}" if number > 1 else f"{output.stem}.spawned"
    return output.with_name(f"{name}.gpuprobe")


def next_job(output: Path) -> int:
    """The number of the first job that has no recording yet."""
    number = 1
    while spawned_path(output, number).exists():
        number += 1
    return number


class Children(NamedTuple):
    """What a started process needs for its recording: a `StartInProcess` of `following`.

    ``writer`` creates a recording for a rank, given the number of ranks; ``recorder`` a recorder
    that writes to a sink and passes its warnings to ``warn``. ``job`` is the number of the first
    job of this program. In the folder ``notes`` each process that used a GPU leaves a file named by
    its process id, with the reason if it has no recording, or an incomplete one. ``main``: the
    program that is recorded into ``output`` is the process that starts the others; without one, the
    first process or job that comes is.
    """

    output: Path
    job: int
    rank: int
    ranks: int
    notes: Path
    writer: Callable[[Path, int, int], Sink]
    recorder: Callable[..., Recorder]
    main: bool = True

    def __call__(self, since: float) -> _Child | None:
        from gpuprobe.sampler.processes.late import LateSink

        return self._begin(lambda: LateSink(self._create, self._note))

    def as_rank(self) -> Callable[[float], _Child | None] | None:
        """A function that starts this process as the rank that a launcher has made it in its
        environment; None if it is not a rank, or if the program is a rank itself.
        """
        from gpuprobe.sampler.environment import ranks
        from gpuprobe.sampler.processes.late import JobPlace

        rank, _, count = ranks()
        if count == 1 or self.ranks > 1:
            return None

        def sink() -> Sink:
            made = self._create(JobPlace(rank, count))
            self._note("")
            return made

        return lambda since: self._begin(sink)

    def _begin(self, sink: Callable[[], Sink]) -> _Child | None:
        try:
            self._note(ENDED_EARLY)
            child = _Child(self.recorder(sink(), warn=self._note))
            child.begin()
        except Exception as error:  # noqa: BLE001 - it must not reach the program
            self._note(f"{type(error).__name__}: {error}")
            return None
        return child

    def _create(self, place: JobPlace | None) -> Sink:
        jobs = (spawned_path(self.output, number) for number in range(self.job, self.job + _MOST))
        first = () if self.main else (self.output,)
        if place is not None and self.ranks == 1:
            for path in (*first, *jobs):
                try:
                    return self.writer(path, place.rank, place.ranks)
                except UsageError:  # the path of an earlier job
                    if not path.exists():
                        raise
        for path in first:
            with contextlib.suppress(UsageError):  # another process was first
                return self.writer(path, 0, 1)
        name = f"child-{self.rank:05d}-{getpid()}"
        path = self.output / f"{name}.gpuprobe"
        number = 1
        while path.exists():  # process ids are used again
            number += 1
            path = self.output / f"{name}-{number}.gpuprobe"
        return self.writer(path, 0, 1)

    def _note(self, text: str | None) -> None:
        file = self.notes / str(getpid())
        with contextlib.suppress(OSError):  # the program has ended: nothing reads the notes
            if text is None:
                file.unlink()
            else:
                file.write_text(text, encoding="utf-8")


class _Child:
    """The handler of a started process that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(self) -> None:
        self._recorder.set_argv(sys.argv)  # of this process, which may run another program
        self._recorder.start_guarded()

    def so_far(self) -> None:
        self._recorder.so_far()

    def end(self, error: BaseException | None) -> None:
        self._recorder.stop(error)
        self._recorder.finish()


def follow_spawns(output: Path, start: Callable[[Path], Recorder]) -> Callable[[], None]:
    """Record the processes of every ``torch.multiprocessing.spawn`` as the ranks of one recording
    each, next to ``output``. ``start`` creates the recorder of a process, in that process: it is
    pickled. Returns a function that undoes this.
    """
    import torch.multiprocessing

    from gpuprobe.sampler.environment import ranks

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
    """A function that a program spawns, recorded in the new process as one of ``count`` ranks."""

    def __init__(
        self, fn: Callable[..., Any], path: Path, count: int, start: Callable[[Path], Recorder]
    ) -> None:
        self._fn = fn
        self._path = path
        self._count = count
        self._start = start

    def __call__(self, rank: int, *args: Any) -> None:
        from gpuprobe.sampler.environment import as_rank
        from gpuprobe.sampler.processes.children import not_followed

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
