"""Estimates in separate processes, and ``compute="auto"``, which may need a second one.

A request is plain data; the response, the last line of stdout, is the estimate's document, or
``{"error": text}``. A process runs one estimate (`run_request`), or forks a process for each of
many (`serve`): importing torch takes a few seconds, most of an estimate of a
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, NoReturn

from gpuprobe.errors import (
    CostMeasured,
    EnvironmentUnavailable,
    GpuprobeError,
    ProgramFailed,
    TooLarge,
    UsageError,
    ValueNeeded,
)
from gpuprobe.model.io.descriptors import KeptDescriptor
from gpuprobe.model.plans.estimate import Estimate
from gpuprobe.planning.argument import with_constant, with_option
from gpuprobe.planning.peers import TRIAL, Peers
from gpuprobe.reporters.json import estimate as estimate_json
from gpuprobe.reporters.json.estimate import estimate_of
from gpuprobe.sampler.program import Program, load_module, load_script, own_traceback

Request = Mapping[str, Any]
"""A request for an estimate: the program (``script``, ``module``, ``arguments``) and the arguments
of `gpuprobe.api.estimates.estimate_program`; ``parameter``, ``value`` and ``change`` of a fit;
``why`` of a second run."""

Document = dict[str, Any]
"""The JSON document of an estimate; or ``error`` (with ``hint`` and ``needs_value``) or
``too_large``."""

COMPUTE: Final = ("auto", "shapes", "real")

_REQUESTED: Final = "as requested"
_AT_ONCE: Final = "they take seconds"
SUFFICIENT: Final = "no line of the script decides by them"
"""Why it is enough to compute some values."""


class Attempt(NamedTuple):
    """An estimate, and the first ``place`` whose decision or size depends on a value that was not
    computed ("" for none). ``too_large``: why all values are too much for a second run ("" if they
    are not), from what they cost.
    """

    estimate: Estimate
    place: str = ""
    too_large: str = ""


def estimate_with(
    compute: str,
    attempt: Callable[[str, str], Attempt],
    again: Callable[[str], Estimate],
) -> Estimate:
    """Estimate a run with ``compute``. ``"auto"`` computes all values while they cost seconds; if
    they cost more and the program decides by one, the run is repeated with all values, if that is
    affordable by the cost of the first run.

    ``attempt`` makes an estimate with ``"auto"``, ``"shapes"`` or ``"real"`` values, for a reason.
    ``again`` makes one with all values, from the state before the first attempt, and raises
    `TooLarge` if the run is too large for that.

    Raises UsageError for an unknown ``compute``, EnvironmentUnavailable if this machine cannot
    compute the requested values, and the errors of both functions.
    """
    if compute not in COMPUTE:
        raise UsageError(f"unknown compute {compute!r}", hint=f"one of: {', '.join(COMPUTE)}")
    if compute != "auto":
        return _requested(compute, attempt, again)
    try:
        found, place, reason = attempt("auto", _AT_ONCE)
    except ValueNeeded as error:
        needed = error.with_traceback(None)  # its frames would keep the first run's tensors alive
        needed.__context__ = None
    else:
        if found.compute == "real":
            return found
        return _exact(found, place, reason, again) if place else _with_reason(found, SUFFICIENT)
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


def _requested(
    compute: str, attempt: Callable[[str, str], Attempt], again: Callable[[str], Estimate]
) -> Estimate:
    try:
        return attempt(compute, _REQUESTED).estimate
    except TooLarge as large:
        reason = str(large)
    except CostMeasured:
        try:
            return again(_REQUESTED)
        except TooLarge as large:
            reason = str(large)
    raise EnvironmentUnavailable(f"--compute {compute}: {reason}", hint="--compute auto")


def _with_reason(found: Estimate, why: str) -> Estimate:
    return replace(found, compute_why=why)


def _exact(bound: Estimate, place: str, why: str, again: Callable[[str], Estimate]) -> Estimate:
    """The estimate with all values, or the first one, ``bound``, if that run is too large (``why``)
    or fails: some programs cannot run twice in one folder.
    """
    if not why:
        try:
            return again(f"{place} decides by a value, and the run is small enough")
        except TooLarge as large:
            why = f"with all values {large}"
        except ProgramFailed as failed:
            why = f"a second run failed: {failed}"
    return _with_reason(bound, f"{place} decides by one, see below; {why}")


class ProgramStart:
    """The working directory, environment and arguments of a program, to run it again in a separate
    process.
    """

    def __init__(self, program: Program) -> None:
        self.cwd = Path.cwd()
        self.environment = dict(os.environ)
        self._program = program

    def peers(self, rank: int, meeting: str = "", **request: object) -> Peers:
        """The ranks of a simulated job, with this process as one of them. ``request``: the values
        that are equal for all ranks.
        """

        def request_of(number: int, folder: str) -> Mapping[str, object]:
            return {**self.request(), **request, "rank": number, "meeting": folder}

        return Peers(rank, request_of, cwd=self.cwd, environment=self.environment, meeting=meeting)

    def again(self, why: str, **request: object) -> Estimate:
        """An estimate of a second run of the program, within the bounds of `Budget`. Its output
        goes to stderr.

        Raises `TooLarge` beyond those bounds, ProgramFailed if there is no estimate.
        """
        done = subprocess.run(
            [sys.executable, "-c", TRIAL, json.dumps({**self.request(), **request, "why": why})],
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=self.cwd,
            env=self.environment,
            check=False,
        )
        document = parse_response(done.stdout, done.returncode)
        if "too_large" in document:
            raise TooLarge(document["too_large"])
        if "error" in document:
            text = f"{document['error']} (in a second run, with all values: {why})"
            raise ProgramFailed(text, hint=document.get("hint", ""))
        return estimate_of(document)

    def request(self) -> dict[str, object]:
        """The part of a request that names the program."""
        spec = self._program.spec
        module = "" if spec is None else spec.name.removesuffix(".__main__")
        first, *arguments = self._program.argv
        request = {"script": module or first, "module": bool(module), "arguments": arguments}
        return {**request, **self._program.changes}


def parse_response(output: str, code: int, errors: Sequence[str] = ()) -> Document:
    """The document in the last line of a process's output, or ``{"error": text}`` if there is none.
    ``code``: its exit code; ``errors``: the lines of its stderr.
    """
    try:
        found: Document = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        last = next((line for line in reversed(errors) if line.strip()), "")
        return {"error": last.strip() or f"the estimate ended {how}"}
    return found


_OPTIONAL: Final = (
    "rank",
    "meeting",
    "link",
    "per_node",
    "output",
    "recorded",
)


def run_request(request: Request, estimate: Callable[..., Estimate]) -> None:
    """Make the requested estimate and print its document, in the process that a request is for.
    ``estimate``: `gpuprobe.api.estimates.estimate_program`.
    """
    out = KeptDescriptor(os.dup(1))
    os.dup2(2, 1)  # the program's output, from C too, is not part of the response
    with contextlib.redirect_stdout(sys.stderr):
        document = _estimate(request, estimate)
    with open(out.number, "w", closefd=False) as stream:
        stream.write("\n" + json.dumps(document) + "\n")


def _estimate(request: Request, estimate: Callable[..., Estimate]) -> Document:
    """The document of a requested estimate: of a script with a value (for `gpuprobe.planning.fit`),
    or of another run or rank of a program (for `ProgramStart`).
    """
    program = program_of(request)
    change = request.get("change", "")
    try:
        if change not in ("", "expandable"):
            from gpuprobe.planning.changes import apply

            apply(change)
        found = estimate(
            program,
            request["gpu"],
            steps=request["steps"],
            compute=request["compute"],
            conf=request["conf"],
            ranks=request["ranks"],
            assume=request["assume"],
            **{
                name: request[key]
                for name, key in (("within", "why"), *((key, key) for key in _OPTIONAL))
                if key in request
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


def program_of(request: Request) -> Program:
    """The requested program, with the requested value and change."""
    arguments, script = list(request["arguments"]), request["script"]
    parameter = request.get("parameter")
    if request.get("module") or parameter is None:
        program = (load_module if request.get("module") else load_script)(script, arguments)
        program.changes = {"change": request["change"]} if request.get("change") else {}
        return program
    if parameter["option"]:
        arguments = with_option(arguments, parameter["option"], request["value"])
    program = load_script(script, arguments)
    program.changes = {key: request[key] for key in ("parameter", "value", "change")}
    if parameter["constant"]:
        source = Path(script).read_text(encoding="utf-8")
        tree = with_constant(source, parameter["constant"], request["value"])
        program.code = compile(tree, program.file, "exec", dont_inherit=True)
    return program


SERVE: Final = "from gpuprobe.api.estimates import serve_trials; serve_trials()"
_LIMIT: Final = 1800  # seconds for one estimate
_MOST_OUTPUT: Final = 1 << 16  # bytes of a run's stderr that are read


class EstimateServer:
    """A process that makes requested estimates one after the other (`serve`). It starts as the
    program of ``start`` did, which may have changed this process, by default as this process. A
    context manager: leaving it ends the process and its current estimate.
    """

    def __init__(self, start: ProgramStart | None = None) -> None:
        self._start_of = start
        self._server: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit

    def __enter__(self) -> EstimateServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stderr.close()

    def __call__(self, request: Mapping[str, object]) -> Document:
        """The JSON document of one estimate, or ``{"error": text}``."""
        found = self.within(request, _LIMIT)
        return found or {"error": f"the estimate took longer than {_LIMIT} s"}

    def within(self, request: Mapping[str, object], seconds: float) -> Document | None:
        """The same; None after ``seconds``, when the estimate is ended."""
        server = self._server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(json.dumps(request).encode() + b"\n")
            server.stdin.flush()
        except BrokenPipeError:
            return self._ended(server)
        ready, _, _ = select.select([server.stdout], [], [], seconds)
        if not ready:
            self._end()
            return None
        line = server.stdout.readline()
        if not line:
            return self._ended(server)
        reply = json.loads(line)
        return parse_response(reply["output"], reply["code"], reply["errors"].splitlines())

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ if self._start_of is None else self._start_of.environment
        # OpenMP's threads wait in a busy loop by default. In forked processes on a machine whose
        # cores are taken, small tensors took four times as long.
        passive = {"OMP_WAIT_POLICY": "passive", **environment}
        return subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is handled by this process
            cwd=None if self._start_of is None else self._start_of.cwd,
            env=passive,
        )

    def _ended(self, server: subprocess.Popen[bytes]) -> Document:
        code = server.wait()
        self._server = None
        return parse_response("", code, _last_output(self._stderr).splitlines())

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for stream in (server.stdin, server.stdout):
            if stream is not None:
                stream.close()


def serve(warm_up: Callable[[], object], run: Callable[[Request], None]) -> None:
    """Call ``warm_up``, which imports what estimates need. Then fork a process that calls ``run``
    for each request on stdin, a line of JSON, and write a line of JSON to stdout: the process's
    exit ``code``, its ``output``, and ``errors``, the end of its stderr.
    """
    warm_up()
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with Path(os.devnull).open("r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    for line in requests:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            with warnings.catch_warnings():
                # Python 3.12 warns about the threads of NumPy's BLAS, which handles forks itself.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if not child:
                requests.close()
                replies.close()
                _run_and_exit(run, json.loads(line), out, errors)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0)
            reply = {
                "code": code,
                "output": out.read().decode("utf-8", "replace"),
                "errors": _last_output(errors),
            }
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _run_and_exit(
    run: Callable[[Request], None],
    request: Request,
    out: IO[bytes],
    errors: IO[bytes],
) -> NoReturn:
    """In the forked process: run a request with its output in files, and exit."""
    code = 1
    try:
        for file, number in ((out, 1), (errors, 2)):
            os.dup2(file.fileno(), number)
            file.close()
        run(request)
        code = 0
    except BaseException:  # noqa: BLE001 - it is in the reply
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _last_output(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MOST_OUTPUT))
    return file.read().decode("utf-8", "replace")
