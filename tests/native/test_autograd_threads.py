"""A process does not end while a thread of the autograd engine is at work."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuprobe.native import autograd_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

AT_EXIT = """
import atexit, sys
sys.path.insert(0, {folder!r})
from test_autograd_threads import named_thread, work
from gpuprobe.native import autograd_threads

if sys.argv[1] == "wait":
    atexit.register(autograd_threads.wait_until_idle)
named_thread(lambda: (work(), print("done", flush=True)))
"""


def named_thread(function: Callable[[], object], name: bytes = b"pt_autograd_0") -> threading.Event:
    """Run it in a daemon thread that has this name for the system."""
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME
        begun.set()
        function()
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    begun.wait()
    return ended


def work() -> None:
    """About half a second of processor time, in C, without Python's lock."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 800_000)


def test_waits_for_a_thread_that_works() -> None:
    ended = named_thread(work)
    autograd_threads.wait_until_idle(60)
    assert ended.is_set()


def test_does_not_wait_for_a_thread_that_sleeps() -> None:
    stop = threading.Event()
    ended = named_thread(stop.wait)
    autograd_threads.wait_until_idle(3600)
    assert not ended.is_set()
    stop.set()


def test_does_not_wait_for_other_threads() -> None:
    ended = named_thread(work, b"pt_data_worker")
    autograd_threads.wait_until_idle(600)
    assert not ended.is_set()
    ended.wait()


def test_gives_up() -> None:
    ended = named_thread(lambda: [work() for _ in range(4)])
    autograd_threads.wait_until_idle(0.05)
    assert not ended.is_set()
    ended.wait()


@pytest.mark.parametrize(("how", "printed"), [("wait", "done\n"), ("leave", "")])
def test_at_the_end_of_a_process(how: str, printed: str) -> None:
    program = AT_EXIT.format(folder=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program, how], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == (printed, "", 0)
