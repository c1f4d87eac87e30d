"""The threads of torch's autograd engine at the end of a process.

A thread of the autograd engine frees the graph of a backward pass after ``backward()`` has
returned, and takes Python's lock for the Python objects in it. Where the program ends right after,
Python ends a thread that waits for the lock during its finalization (``pthread_exit`` in
`PyEval_AcquireThread`, before Python 3.14), which C++ answers with ``std::terminate``: the process
ends by SIGABRT, exit code 134, after all of the program's work. On a GPU there is usually enough to
wait for; on the simulated GPU there is not.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from gpuprobe.clocks import monotonic, sleep
from gpuprobe.torch_support.thread_names import ENGINE

MOST: Final = 2.0
"""The longest delay of the end of a process, in seconds."""

_THREADS: Final = "/proc/self/task"

# At exit these are what the program has made them.
_list: Final = os.listdir
_open: Final = open


def wait_until_idle(seconds: float = MOST) -> None:
    """Wait until each thread of the autograd engine waits for work, for at most ``seconds``. Call
    it while Python's lock can still be taken, for example at exit. Linux only.
    """
    threads = _threads()
    until = monotonic() + seconds
    checks_idle = 0
    # A thread that waits for the lock sleeps as well: it gets the lock while this one sleeps.
    while threads and checks_idle < 2 and monotonic() < until:
        sleep(0.001)
        checks_idle = 0 if any(map(_is_busy, threads)) else checks_idle + 1


def _threads() -> list[str]:
    """The folders of the threads; none where the program has left no descriptor to list them."""
    try:
        folders = [f"{_THREADS}/{number}" for number in _list(_THREADS)]
    except OSError:
        return []
    return [folder for folder in folders if _text(f"{folder}/comm").startswith(ENGINE)]


def _is_busy(thread: str) -> bool:
    """Whether the thread runs or is about to; see proc_pid_stat(5): the state follows the name."""
    return _text(f"{thread}/stat").rpartition(") ")[2][:1] in {"R", "D"}


def _text(path: str) -> str:
    with suppress(OSError), _open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""  # the thread has ended
