"""Commands of any kind, recorded from outside: `gpuprobe run [options] -- COMMAND`.

The command runs in a separate process. Every Python process below it that uses a GPU, or that a
launcher has made a rank, records itself (`gpuprobe.sampler.processes`): the first one, or the ranks
of the first job, into the recording that was requested.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple

from gpuprobe.errors import DataError, GpuprobeError, UsageError
from gpuprobe.processes import end_text, in_foreground

if TYPE_CHECKING:
    from gpuprobe.model.run.recording import RankRecording, Recording
    from gpuprobe.sampler.processes.ends import ProcessEnd

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class CommandResult(NamedTuple):
    """The result of a recorded command. ``code``: its exit code, negative for the signal that ended
    it; ``interrupted``: by Ctrl-C; ``recordings``: the requested one first, if anything was
    recorded, then those of other jobs; ``assumed``: what simulated GPUs assumed, in all processes;
    ``ends``: how recorded processes ended, by process id, as far as that is known.
    """

    code: int
    interrupted: bool
    recordings: tuple[Path, ...]
    assumed: tuple[str, ...]
    unrecorded: Mapping[str, int]
    ends: Mapping[int, ProcessEnd]


def run_command(
    words: Sequence[str],
    output: Path,
    *,
    level: str = "counters",
    trace_steps: str = "",
    force: bool = False,
    gpu: str | None = None,
    compute: str = "real",
    uses: bool = False,
) -> CommandResult:
    """Run a command and record what it runs into ``output``; ``gpu``, ``compute`` and ``uses`` as
    for `gpuprobe.api.watch.run`.

    Raises UsageError if it cannot be started or ``output`` cannot be created, and
    EnvironmentUnavailable where simulated GPUs do not run.
    """
    from gpuprobe.sampler.processes.ends import ends_of

    output = output.absolute()
    environment = dict(os.environ)
    if gpu is not None:
        environment.update(_simulated(gpu, compute))
    _ensure_free(output, force)
    with ExitStack() as stack:
        notes = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuprobe-")))
        first = _follow(environment, output, notes, level, trace_steps, uses, tuple(words))
        with ends_of(notes) as ends:
            code, interrupted = _wait(words, environment)
        assumed, unrecorded = _read(notes)
    recordings = tuple(_recordings(output, first))
    return CommandResult(code, interrupted, recordings, assumed, unrecorded, ends)


def _simulated(gpu: str, compute: str) -> Mapping[str, str]:
    """The variables that give processes simulated GPUs."""
    from gpuprobe.native.session import EngineOptions, environment_of

    return environment_of(EngineOptions(gpu, compute))


def _ensure_free(output: Path, force: bool) -> None:
    from gpuprobe.recording.writer import RecordingWriter, remove_recording

    RecordingWriter.create(output, force=force).close()
    remove_recording(output)


def _follow(
    environment: dict[str, str],
    output: Path,
    notes: Path,
    level: str,
    trace_steps: str,
    uses: bool,
    words: tuple[str, ...],
) -> int:
    """Have processes with this environment record themselves; returns the number of the first job
    that is recorded next to ``output``.
    """
    from gpuprobe.api.watch import child_recorder, child_writer
    from gpuprobe.sampler.processes import children, recorded
    from gpuprobe.sampler.processes.notes import NOTES
    from gpuprobe.torch_support.process_gpus import add_startup

    job = recorded.next_job(output)
    make = functools.partial(
        child_recorder, level=level, trace_steps=trace_steps, uses=uses, argv=words
    )
    start = recorded.Children(output, job, 0, 1, notes, child_writer, make, main=False)
    environment[children.ORDERS] = children.orders(start)
    environment[NOTES] = str(notes)
    add_startup(environment)
    return job


def _wait(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bool]:
    """Run the command; its exit code, and whether Ctrl-C interrupted it."""
    try:
        child = subprocess.Popen(words, env=environment)
    except OSError as error:
        raise UsageError(f"cannot run {words[0]}: {error.strerror or error}") from None
    with _forwarding(child) as received:
        code = child.wait()
    return code, signal.SIGINT in received


@contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass signals on to the command, which decides when it ends: Ctrl-C goes to both already.
    Yields the signals that were received.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGINT or not in_foreground():
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(notes: Path) -> tuple[tuple[str, ...], dict[str, int]]:
    """What processes assumed, and how many have no recording, by reason."""
    from gpuprobe.sampler.processes.notes import read_assumed, read_notes

    unrecorded: dict[str, int] = {}
    for reason in read_notes(notes).values():
        if reason:
            unrecorded[reason] = unrecorded.get(reason, 0) + 1
    return read_assumed(notes), unrecorded


def _recordings(output: Path, first: int) -> Iterator[Path]:
    from gpuprobe.sampler.processes.recorded import next_job, spawned_path

    if output.is_dir():
        yield output
    for number in range(first, next_job(output)):
        yield spawned_path(output, number)


def failed_ranks(result: CommandResult) -> str:
    """Which recorded process failed first and how, as text: with an exception, by a signal or with
    an exit code. "" if none did.
    """
    from gpuprobe.api.recordings import load

    failures = []
    for path in result.recordings:
        try:
            recording: Recording = load(path)
        except (DataError, GpuprobeError):
            continue
        failures += [one for rank in recording.ranks if (one := _failure(rank, result.ends))]
    return min(failures)[1] if failures else ""


def _failure(rank: RankRecording, ends: Mapping[int, ProcessEnd]) -> tuple[float, str] | None:
    """When a process failed, and a sentence about it; None if it did not."""
    session = rank.session
    which = f"rank {session.rank}" if session.world_size > 1 else "the program"
    if rank.end is not None and rank.end.error is not None:
        at = session.started_at + rank.end.duration_ns / 1e9
        return at, f"{which} failed first: {rank.end.error.text}"
    end = ends.get(session.pid)
    if end is None or not end.code:
        return None
    return end.at, f"{which} ended first, {end_text(end.code)}"
