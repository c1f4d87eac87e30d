"""Estimates in separate processes, and ``compute="auto"``, which may need a second one.

A request is plain data; the response, the last line of stdout, is the estimate's document, or
``{"error": text}``. A process runs one estimate (`run_request`), or forks a process for each of
many (`serve`): importing torch and gpuprobe's engines takes a few seconds, most of an estimate of a
small script, and a search makes a dozen. The process that forks has made one tiny estimate, without
a backward pass: autograd's threads do not survive a fork, and the first backward pass starts them.
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

from gpuprobe.errors import GpuprobeError, ProgramFailed, TooLarge, UsageError, ValueNeeded
from gpuprobe.model.plans.estimate import Estimate
from gpuprobe.planning.argument import with_constant, with_option
from gpuprobe.planning.peers import TRIAL, Peers
from gpuprobe.reporters.json import estimate as estimate_json
from gpuprobe.reporters.json.estimate import estimate_of
from gpuprobe.sampler.program import Program, load_module, load_script, own_traceback

COMPUTE: Final = ("auto", "shapes", "real")

ASKED: Final = "as requested"
_ENOUGH: Final = "sufficient for this script"


def estimate_with(
    compute: str,
    attempt: Callable[[str, str], tuple[Estimate, str]],
    again: Callable[[str], Estimate],
) -> Estimate:
    """The estimate of a run. ``attempt`` makes one with ``"shapes"`` or ``"real"`` values, and is
    told why; with it comes the line of the first size that depends on values, and was the largest
    possible (`gpuprobe.virtual.reads.bounds`), ``""`` where there was none. ``again`` makes one
    with all values, of the run as it was before the first attempt, and raises `TooLarge` where it
    is too large for that.

    Raises UsageError for an unknown ``compute``, and what they raise.
    """
    if compute not in COMPUTE:
        raise UsageError(f"unknown compute {compute!r}", hint=f"one of: {', '.join(COMPUTE)}")
    if compute != "auto":
        return attempt(compute, ASKED)[0]
    try:
        found, bounded = attempt("shapes", _ENOUGH)
    except ValueNeeded as error:
        needed = error.with_traceback(None)  # its frames keep the first run's tensors alive
        needed.__context__ = None
    else:
        return _exact(found, bounded, again) if bounded else found
    place = needed.place or "the program"
    try:
        return again(f"{place} needs a value, and the run is small enough to compute all values")
    except TooLarge as large:
        reason = str(large)
    raise ValueNeeded(
        f"{needed}; too large to compute all values with --compute auto: {reason}",
        hint=needed.hint,
        place=needed.place,
    ) from needed.__cause__


def _exact(bound: Estimate, place: str, again: Callable[[str], Estimate]) -> Estimate:
    """The estimate with all values, and the ``bound`` on it where that run is too large, or fails:
    many a program cannot be run twice in one folder.
    """
    try:
        return again(f"{place} has a size that depends on values, and the run is small enough")
    except TooLarge as large:
        why = f"with all values {large}"
    except ProgramFailed as failed:
        why = f"a second run failed: {failed}"
    return replace(bound, compute_why=f"sizes as at {place} are the largest possible; {why}")


class Start:
    """How a program was started: what a second run of it, in a process of its own, is given."""

    def __init__(self, program: Program) -> None:
        self._cwd = Path.cwd()
        self._environment = dict(os.environ)
        self._program = program

    def peers(self, rank: int, meeting: str = "", **order: Any) -> Peers:
        """The other ranks of a pretended job, of which this process is one. ``order`` is that of
        every rank.
        """

        def order_of(number: int, place: str) -> dict[str, Any]:
            return {**self.order(), **order, "rank": number, "meeting": place}

        return Peers(rank, order_of, cwd=self._cwd, environment=self._environment, meeting=meeting)

    def again(self, why: str, **order: Any) -> Estimate:
        """An estimate of the program from its beginning, within the bounds of `Budget`. It prints
        where the first run did, to stderr.

        Raises `TooLarge` beyond those bounds, ProgramFailed where there is no estimate.
        """
        done = subprocess.run(
            [sys.executable, "-c", TRIAL, json.dumps({**self.order(), **order, "why": why})],
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=self._cwd,
            env=self._environment,
            check=False,
        )
        document = answer_of(done.stdout, done.returncode)
        if "too_large" in document:
            raise TooLarge(document["too_large"])
        if "error" in document:
            text = f"{document['error']} (in a second run, with all values: {why})"
            raise ProgramFailed(text, hint=document.get("hint", ""))
        return estimate_of(document)

    def order(self) -> dict[str, Any]:
        """What a process is told of the program: see `gpuprobe.planning.trial`."""
        spec = self._program.spec
        module = "" if spec is None else spec.name.removesuffix(".__main__")
        first, *arguments = self._program.argv
        order = {"script": module or first, "module": bool(module), "arguments": arguments}
        return {**order, **self._program.changes}


def answer_of(output: str, code: int, last_words: Sequence[str] = ()) -> dict[str, Any]:
    """The document that a process printed last, or ``{"error": text}`` where it has printed none.
    ``code``: how it ended; ``last_words``: its other output.
    """
    try:
        found: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        import signal

        how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        words = next((line for line in reversed(last_words) if line.strip()), "")
        return {"error": words.strip() or f"the estimate ended {how}"}
    return found


_OPTIONAL: Final = (
    "rank",
    "meeting",
    "link",
    "per_node",
    "output",
    "recorded",
    "torch",
    "engine",
)


def answer(order: dict[str, Any], estimate: Callable[..., Estimate]) -> None:
    """Do what the order says, with `gpuprobe.api.virtual.estimate_program`."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the program prints, from C too, is not the answer
    with contextlib.redirect_stdout(sys.stderr):
        found = _estimate(order, estimate)
    with os.fdopen(out, "w") as stream:
        stream.write("\n" + json.dumps(found) + "\n")


def _estimate(order: dict[str, Any], estimate: Callable[..., Estimate]) -> dict[str, Any]:
    """The document of the estimate that ``order`` describes: of a script (a case and a value, for
    `gpuprobe.planning.fit`), or of a program once more (for `gpuprobe.planning.auto`).
    """
    program = program_of(order)
    change = order.get("change", "")
    if change not in ("", "expandable"):
        from gpuprobe.planning.changes import apply

        apply(change)
    try:
        found = estimate(
            program,
            order["gpu"],
            steps=order["steps"],
            compute=order["compute"],
            conf=order["conf"],
            ranks=order["ranks"],
            assume=order["assume"],
            **{
                name: order[key]
                for name, key in (("within", "why"), *((key, key) for key in _OPTIONAL))
                if key in order
            },
        )
    except TooLarge as error:
        return {"too_large": str(error)}
    except GpuprobeError as error:
        cause = error.__cause__
        plain = cause is None or isinstance(error, ValueNeeded)
        if cause is not None and isinstance(error, ProgramFailed):
            sys.stderr.write(own_traceback(cause))
        return {
            "error": f"{error}" if plain else f"{type(cause).__name__}: {cause}",
            "hint": error.hint,
            "needs_value": isinstance(error, ValueNeeded),
        }
    return estimate_json.document(found)


def program_of(order: dict[str, Any]) -> Program:
    """The program that an order names, with the value and the change that it describes."""
    arguments, script = list(order["arguments"]), order["script"]
    if order.get("module"):
        return load_module(script, arguments)
    way = order.get("way")
    if way is None:
        return load_script(script, arguments)
    if way["option"]:
        arguments = with_option(arguments, way["option"], order["value"])
    program = load_script(script, arguments)
    program.changes = {key: order[key] for key in ("way", "value", "change")}
    if way["constant"]:
        source = Path(script).read_text(encoding="utf-8")
        tree = with_constant(source, way["constant"], order["value"])
        program.code = compile(tree, program.file, "exec", dont_inherit=True)
    return program


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
