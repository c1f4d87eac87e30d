"""Calls of tools in processes, which end with the call."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio

from gpuprobe.agents.folders import Folders
from gpuprobe.errors import GpuprobeError, ProgramFailed
from gpuprobe.processes import command, end_text

Progress = Callable[[float, str], Awaitable[None]]
"""Reports the seconds since the start of a call, and what it does."""

WORKER: Final = "gpuprobe.agents.worker"
"""The module of a call's process."""

_EVERY_S: Final = 5.0
"""Time between two reports if the call itself reports nothing."""

_PATIENCE_S: Final = 2.0

_AT_ONCE: Final = 2
"""Calls that run at the same time: an estimate may take a whole machine's memory."""


class CallLimits(NamedTuple):
    """Limits of each call: ``seconds``, and the bytes of its document (``most``)."""

    seconds: float
    most: int


class Reply(NamedTuple):
    """The result of a call: its document and the lists in it that were shortened
    (`gpuprobe.agents.bounds.Cut`), or what failed, with a hint.
    """

    document: dict[str, Any] | None
    cut: Sequence[tuple[str, int, int]] = ()
    error: str = ""
    hint: str = ""


class ToolCalls:
    """Runs the calls of one server."""

    def __init__(self, folders: Folders, limits: CallLimits) -> None:
        self._folders = folders
        self._limits = limits
        self._running: set[int] = set()
        self._turn = anyio.Semaphore(_AT_ONCE)

    def end_all(self) -> None:
        """End the processes of all calls."""
        for pid in tuple(self._running):
            end_tree(pid)

    async def run(self, tool: str, arguments: Mapping[str, Any], progress: Progress) -> Reply:
        """Run one call in a separate process; if this is cancelled, the process ends, with the
        processes that it started.
        """
        request = {
            "tool": tool,
            "arguments": arguments,
            "folders": self._folders.roots,
            "most": self._limits.most,
        }
        async with self._turn:
            try:
                with anyio.fail_after(self._limits.seconds):
                    return await self._run(request, progress)
            except TimeoutError:
                error: GpuprobeError = ProgramFailed(
                    f"{tool} took longer than {self._limits.seconds:g} s and was ended",
                    hint="gpuprobe mcp --timeout SECONDS sets the limit",
                )
                return Reply(None, error=str(error), hint=error.hint)

    async def _run(self, request: Mapping[str, Any], progress: Progress) -> Reply:
        process = await anyio.open_process(
            command(WORKER),
            stderr=None,  # the server's
            # Python's import path begins with this folder: not with a file such as json.py of the
            # working folder, to which the process changes.
            cwd=Path(sys.executable).parent,
            start_new_session=True,
        )
        self._running.add(process.pid)
        replies: list[Reply] = []
        doing = f"running {request['tool']}"
        try:
            assert process.stdin is not None
            with contextlib.suppress(anyio.BrokenResourceError):  # it has ended already
                await process.stdin.send(json.dumps(request).encode() + b"\n")
            async with anyio.create_task_group() as group:
                group.start_soon(
                    _read, process.stdout, replies, progress, group.cancel_scope, doing
                )
                code = await process.wait()
                # A process that the program left may have the stream open.
                group.cancel_scope.deadline = anyio.current_time() + 1
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
                self._running.discard(process.pid)
                await process.aclose()
        if replies:
            return replies[0]
        error = f"the process of the call ended {end_text(code)}, without a result"
        return Reply(None, error=error)


async def _read(
    stream: Any,
    replies: list[Reply],
    progress: Progress,
    scope: anyio.CancelScope,
    doing: str,
) -> None:
    """Read the lines of a call until its reply, and report its progress: what it does, every few
    seconds and when that changes.
    """
    since = time.monotonic()
    rest = b""
    await progress(0.0, doing)
    while not replies:
        part = b""
        with anyio.move_on_after(_EVERY_S) as waited:
            try:
                part = await stream.receive()
            except anyio.EndOfStream:
                return
        if waited.cancelled_caught and not part:
            await progress(time.monotonic() - since, doing)
            continue
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            found = json.loads(line)
            if "progress" in found:
                doing = found["progress"]
                await progress(time.monotonic() - since, doing)
            else:
                replies.append(
                    Reply(
                        found.get("document"),
                        found.get("cut", ()),
                        found.get("error", ""),
                        found.get("hint", ""),
                    )
                )
    scope.cancel()


async def _end(process: Any) -> None:
    """End a call's process and those that it started. One that is still running is interrupted
    first and has `_PATIENCE_S` to remove its temporary recordings.
    """
    import psutil  # 15 ms

    started: set[psutil.Process] = set()
    if process.returncode is None:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            running = psutil.Process(process.pid)
            started.update(running.children(recursive=True))
            process.send_signal(signal.SIGINT)
            deadline = anyio.current_time() + _PATIENCE_S
            while process.returncode is None and anyio.current_time() < deadline:
                await anyio.sleep(0.05)
                started.update(running.children(recursive=True))
    end_tree(process.pid)
    for other in started:
        if other.is_running():  # compares the start time too: not another one with its id
            end_tree(other.pid)


def end_tree(pid: int) -> None:
    """End the process ``pid``, its process group if it leads one, and all processes that it
    started, which may have separate groups. Each process is stopped before its children are listed,
    so that none is missed.
    """
    import psutil  # 15 ms

    stopped: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        waiting = [psutil.Process(pid)]
        while waiting:
            process = waiting.pop()
            with contextlib.suppress(psutil.Error):
                process.suspend()
                stopped.append(process)
                waiting += process.children()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.kill()
