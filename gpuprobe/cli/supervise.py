"""Commands that run the user's program in a child process.

The exit code of such a command is its result ("memory is within the baseline"). The program can end
the process before there is a result: by ``os._exit``, ``os.exec*`` or a signal. So a parent process
waits for the result; without one the command has failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable
from types import FrameType

from gpuprobe.cli import status_line
from gpuprobe.errors import ProgramFailed
from gpuprobe.model.io.descriptors import KeptDescriptor
from gpuprobe.processes import end_with_parent, in_foreground

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def supervised(command: Callable[[], int]) -> int:
    """Run ``command`` in a forked process and return its exit code, in both processes.

    The caller must have no thread and must not have imported torch: neither survives a fork.
    Raises ProgramFailed if the process ends without a result.
    """
    result = mmap.mmap(-1, 2)  # shared: whether there is a result, and the exit code
    stacks = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - both processes hold it
    progress = status_line.PROGRESS = status_line.Progress()
    child = os.fork()
    if child == 0:
        end_with_parent(signal.SIGTERM)  # as the parent forwards it, which cannot forward SIGKILL
        kept = KeptDescriptor(os.dup(stacks.fileno()))
        stacks.close()
        if not faulthandler.is_enabled():  # otherwise the user has enabled it
            faulthandler.enable(kept.number)
        try:
            code = command()
        except SystemExit as end:  # argparse: help, or invalid options
            code = int(end.code or 0)
        result[:] = bytes([1, code])
        return code
    with progress.printed():
        status, received = _wait(child)
    measured, code = result[:]
    if received and os.WIFSIGNALED(status) and os.WTERMSIG(status) == received:
        signal.signal(received, signal.SIG_DFL)  # as without the child process
        os.kill(os.getpid(), received)
    ended = os.waitstatus_to_exitcode(status)
    if measured:
        return ended if ended > 0 else code
    how = f"by {signal.Signals(-ended).name}" if ended < 0 else f"with exit code {ended}"
    with stacks:
        stacks.seek(0)
        where = _program_line(stacks)
    raise ProgramFailed(
        f"the program terminated this process {how}, before anything was measured{where}",
        hint="it must return or call sys.exit, not os._exit, os.exec or a signal",
    )


def _program_line(stacks: Iterable[str]) -> str:
    """``" (at FILE:LINE)"``: the innermost frame of the program and its libraries in the stacks of
    `faulthandler`; "" without one.
    """
    from gpuprobe.user_frames import is_program_file  # after a program has failed

    current = False
    for line in stacks:
        current = current or line.startswith("Current thread")
        found = re.match(r'  File "(.+)", line (\d+) in ', line)
        if current and found is not None and is_program_file(found[1]):
            return f" (at {found[1]}:{found[2]})"
    return ""


def _wait(child: int) -> tuple[int, int]:
    """The child's wait status, and the last signal forwarded to it (0: none)."""
    received = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if number == signal.SIGINT and in_foreground():
            return  # Ctrl-C: the terminal has sent it to the child, too
        received = number
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(child, number)

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        return os.waitpid(child, 0)[1], received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
