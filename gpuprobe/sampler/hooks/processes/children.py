"""Processes that a program starts (`multiprocessing`), and whether they use a GPU.

What they need there is in no measurement of the program. A process that only prepares samples needs
nothing there, and most are such; so each is asked, as it ends, whether it has allocated anything.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import multiprocessing.spawn
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpuprobe.patching import patch


class Children:
    """The processes started in the context `watched`."""

    def __init__(self) -> None:
        self.on_gpu: frozenset[int] = frozenset()
        """The ids of those that have ended and had allocated memory on a GPU."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        prepare = multiprocessing.spawn.get_preparation_data

        def with_arrival(name: str) -> dict[str, Any]:
            # The first thing that a spawned process reads; unknown keys it leaves alone.
            return {"gpuprobe": _Arrival(folder), **prepare(name)}

        with ExitStack() as stack:
            # No TemporaryDirectory: each forked child that comes to its end would remove it.
            folder = tempfile.mkdtemp(prefix="gpuprobe-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.callback(patch(multiprocessing.spawn, "get_preparation_data", with_arrival))
            stack.callback(_watch(Path(folder)))
            stack.callback(_watch_forks(Path(folder)))
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # the program has removed it
                    self.on_gpu = frozenset(int(file.name) for file in Path(folder).iterdir())


class _Arrival:
    """Unpickled in a spawned process before it imports the program: `_watch` is called there."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return _watch, (Path(self._folder),)


def _watch(folder: Path) -> Any:
    """Have each process that begins from here on leave a file where it has used a GPU. Returns what
    takes that back."""
    base = multiprocessing.process.BaseProcess
    bootstrap: Any = base._bootstrap  # type: ignore[attr-defined]

    def bootstrapped(process: Any, *args: Any, **more: Any) -> Any:
        before = _allocations()
        code = bootstrap(process, *args, **more)
        _report(folder, before)
        return code

    return patch(base, "_bootstrap", bootstrapped)


def _watch_forks(folder: Path) -> Any:
    """The same of what the program forks by itself, and that comes to its own end."""
    parent = os.getpid()
    before = 0

    def forked() -> None:
        nonlocal before
        before = _allocations()

    def ends() -> None:
        if os.getpid() != parent:
            _report(folder, before)

    os.register_at_fork(after_in_child=forked)
    atexit.register(ends)
    return lambda: atexit.unregister(ends)


def _report(folder: Path, before: int) -> None:
    if _allocations() > before:
        with contextlib.suppress(OSError):  # the parent has ended: nobody reads it
            (folder / str(os.getpid())).touch()


def _allocations() -> int:
    """How often this process has allocated memory on any GPU; 0 if that is unknown, as of a GPU
    that failed: the process ends as it would have.
    """
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return 0
        return sum(
            cuda.memory_stats(device).get("allocation.all.allocated", 0)
            for device in range(cuda.device_count())
        )
    except Exception:  # noqa: BLE001 - it is the program's process
        return 0
