"""A command that runs somebody's program, in a process of its own.

Its exit code is an answer ("memory is within the baseline"), and the program can end the process
before there is one: by ``os._exit``, by replacing the process with another (``os.exec*``), by a
signal. So another process waits for the answer; without one the command has failed.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from types import FrameType

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.code_origin import PACKAGE

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


_PYTHON = os.path.dirname(os.__file__)  # noqa: PTH120


def supervised(command: Callable[[], int]) -> int:
    """The exit code of ``command``, which is run in a forked process and returns there.

    To be called by a process that has no thread and has not imported torch: neither survives a
    fork. Where the process ends without an answer, the code is that of a program that failed.
    """
    reading, writing = os.pipe()
    stacks = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - both processes hold it
    child = os.fork()
    if child == 0:
        os.close(reading)
        if not faulthandler.is_enabled():  # else the user wants the stacks on stderr
            faulthandler.enable(stacks)
        try:
            answer = command()
        except SystemExit as end:  # argparse: help, or what is wrong with the options
            answer = int(end.code or 0)
        os.write(writing, bytes([answer]))
        os.close(writing)
        return answer
    os.close(writing)
    status, received = _wait(child)
    with open(reading, "rb", buffering=0) as stream:  # noqa: PTH123 (a descriptor)
        os.set_blocking(reading, False)  # a process that the program left behind may hold it open
        code = stream.read(1)
    if received and os.WIFSIGNALED(status) and os.WTERMSIG(status) == received:
        signal.signal(received, signal.SIG_DFL)  # as this process would have ended by itself
        os.kill(os.getpid(), received)
    ended = os.waitstatus_to_exitcode(status)
    if code:
        return ended if ended > 0 else code[0]
    how = f"by {signal.Signals(-ended).name}" if ended < 0 else f"with exit code {ended}"
    with stacks:
        stacks.seek(0)
        where = _program_line(stacks)
    stderr.error(
        f"the program terminated this process {how}, before anything was measured{where}",
        hint="it must return or call sys.exit, not os._exit, os.exec or a signal",
    )
    return exit_codes.PROGRAM_FAILED


def _program_line(stacks: Iterable[str]) -> str:
    """Where the program was, from the stacks that `faulthandler` wrote as it crashed: ``" (at
    FILE:LINE)"`` of the innermost frame that is not torch's, gpuprobe's or Python's; "" without
    one.
    """
    current = False
    for line in stacks:
        current = current or line.startswith("Current thread")
        found = re.match(r'  File "(.+)", line (\d+) in ', line)
        if not current or found is None:
            continue
        file = found[1]
        libraries = file.startswith((PACKAGE, "<")) or f"{os.sep}torch{os.sep}" in file
        python = file.startswith(_PYTHON) and "site-packages" not in file
        if not libraries and not python:
            return f" (at {file}:{found[2]})"
    return ""


def _wait(child: int) -> tuple[int, int]:
    """The child's wait status, and the last signal that was passed on to it, 0 for none."""
    received = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if number == signal.SIGINT and _typed():
            return  # Ctrl-C: the terminal has sent it to the child, too
        received = number
        os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        return os.waitpid(child, 0)[1], received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _typed() -> bool:
    """Whether this process is the one that the terminal's keys reach."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # no terminal, or no stdin at all
        return False
