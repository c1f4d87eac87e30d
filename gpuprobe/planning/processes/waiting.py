"""An estimated program that waits for a process which was ended after its steps."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from gpuprobe.planning.processes import ENDED
from gpuprobe.sampler.hooks.optimizer_steps import Enough

_PATIENCE_S: Final = 5.0
_IDLE_S: Final = 0.2
"""Of processor time within that, of the program and all that it started: less is none."""


class Stalled(Enough):
    """Ends a program that waits for such a process."""


@contextmanager
def not_forever(folder: Path) -> Iterator[None]:
    """Raise `Stalled` in the program if nothing works for some seconds after a process was ended
    (``folder`` has its file): what the program waits for will never come. Where `Enough` ends the
    program, the processes that it started end too.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main or not hasattr(signal, "pthread_kill"):
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise Stalled

    others = {process.pid for process in multiprocessing.active_children()}
    over = threading.Event()
    # SIGURG is ignored by default, so that one which comes too late does no harm.
    handler = signal.signal(signal.SIGURG, interrupt)
    watcher = threading.Thread(
        target=_watch, args=(folder, _PATIENCE_S, over, main.ident), name="gpuprobe-stalled"
    )
    watcher.daemon = True
    watcher.start()
    try:
        yield
    except Enough:
        for process in multiprocessing.active_children():
            if process.pid not in others:
                process.terminate()
        raise
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGURG, handler)


def _watch(folder: Path, patience: float, over: threading.Event, main: int) -> None:
    used, since = 0.0, time.monotonic()
    while not over.wait(patience / 5):
        now = _processor_time()
        if now - used > _IDLE_S or not any(folder.glob(f"*{ENDED}")):
            used, since = now, time.monotonic()
        elif time.monotonic() - since >= patience:
            signal.pthread_kill(main, signal.SIGURG)
            since = time.monotonic()


def _processor_time() -> float:
    """Seconds, of this process without the calling thread, and of those that it started."""
    total = time.process_time() - time.thread_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended
            continue
        total += times.user + times.system
    return total
