"""Which threads of the host call the GPU."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

from gpuprobe.model.run.work import AUTOGRAD, MAIN

ENGINE: Final = "pt_autograd"
"""Prefix of the names of the autograd engine's threads. Source: ``c10::setThreadName`` in
torch/csrc/autograd/engine.cpp, since torch 2.5."""

_ENDED: Final = "a thread that has ended"


def thread_name(number: int) -> str:
    """The name of this process's thread that the system has under this number: `MAIN`, `AUTOGRAD`,
    or what the program named it. Linux only.
    """
    if number == os.getpid():
        return MAIN
    for thread in threading.enumerate():
        if thread.native_id == number and type(thread) is not threading._DummyThread:
            return f"thread {thread.name}"
    try:
        name = Path(f"/proc/self/task/{number}/comm").read_text(errors="replace").strip()
    except OSError:
        return _ENDED
    return AUTOGRAD if name.startswith(ENGINE) else f"thread {name}"
