"""Estimates in processes of their own, forked from one that has imported torch already.

Importing torch and what an estimate needs of it takes some seconds, most of an estimate of a small
script; a search makes a dozen. The process that forks has made one tiny estimate, without a
backward pass: autograd's threads do not survive a fork, and the first one starts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from gpuprobe.planning.auto import answer_of

SERVE: Final = "from gpuprobe.api.virtual import serve_trials; serve_trials()"
_LIMIT: Final = 1800  # seconds for one estimate
_MOST_WORDS: Final = 1 << 16  # bytes kept of what a run prints


class Estimates:
    """Makes estimates of orders (`gpuprobe.planning.trial`), one after the other. A context: on the
    way out the process is ended, and an estimate that it is making. ``engine``: on which they are
    made, as in ``--engine``.
    """

    def __init__(self, engine: str = "auto") -> None:
        self._engine = engine
        self._server: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit

    def __enter__(self) -> Estimates:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._words.close()

    def __call__(self, order: dict[str, Any]) -> dict[str, Any]:
        """The JSON document of one estimate, or ``{"error": text}``."""
        server = self._server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(json.dumps(order).encode() + b"\n")
            server.stdin.flush()
        except BrokenPipeError:
            return self._ended(server)
        ready, _, _ = select.select([server.stdout], [], [], _LIMIT)
        if not ready:
            self._end()
            return {"error": f"the estimate took longer than {_LIMIT} s"}
        line = server.stdout.readline()
        if not line:
            return self._ended(server)
        reply = json.loads(line)
        return answer_of(reply["answer"], reply["code"], reply["words"].splitlines())

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", SERVE, self._engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,  # Ctrl-C is this process's to answer
        )

    def _ended(self, server: subprocess.Popen[bytes]) -> dict[str, Any]:
        code = server.wait()
        self._server = None
        return answer_of("", code, _last(self._words).splitlines())

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for stream in (server.stdin, server.stdout):
            if stream is not None:
                stream.close()


def serve(warm_up: Callable[[], object], answer: Callable[[dict[str, Any]], None]) -> None:
    """Call ``warm_up``, which makes an estimate import what it needs, then fork a process for each
    order on stdin, a line of JSON each, and write a line about it to stdout: ``code``, how the
    process ended, ``answer``, what it printed, and ``words``, the end of its stderr.
    """
    warm_up()
    orders = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with Path(os.devnull).open("r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    for line in orders:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as words:
            with warnings.catch_warnings():
                # NumPy's BLAS has threads, which Python 3.12 warns of; it handles forks itself.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if not child:
                _be_child(answer, json.loads(line), out, words)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0)
            found = {
                "code": code,
                "answer": out.read().decode("utf-8", "replace"),
                "words": _last(words),
            }
        replies.write(json.dumps(found) + "\n")
        replies.flush()


def _be_child(
    answer: Callable[[dict[str, Any]], None],
    order: dict[str, Any],
    out: IO[bytes],
    words: IO[bytes],
) -> None:
    code = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(words.fileno(), 2)
        answer(order)
        code = 0
    except BaseException:  # noqa: BLE001 - the reply has it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _last(words: IO[bytes]) -> str:
    size = words.seek(0, os.SEEK_END)
    words.seek(max(0, size - _MOST_WORDS))
    return words.read().decode("utf-8", "replace")
