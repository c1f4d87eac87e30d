"""Recording a training run: `record` around code, `run` around a whole program."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuprobe.errors import (
    CostMeasured,
    DataError,
    EnvironmentUnavailable,
    MissingExtra,
    TooLarge,
    UnknownValue,
    UsageError,
)
from gpuprobe.model.run.session import BlindSpot
from gpuprobe.model.text import visible
from gpuprobe.user_frames import is_user_file

if TYPE_CHECKING:
    from gpuprobe.hazard_watch.results import FindingsSoFar
    from gpuprobe.hazards.findings.results import Hazards
    from gpuprobe.model.findings import Finding
    from gpuprobe.model.needs import UsesCost
    from gpuprobe.model.run.session import Step
    from gpuprobe.native.session import NativeSession
    from gpuprobe.planning.first_epoch import EpochLimit
    from gpuprobe.recording.writer import RecordingWriter
    from gpuprobe.sampler.base import Sink
    from gpuprobe.sampler.program import Program, Runnable
    from gpuprobe.sampler.recorder import Recorder

__all__ = [
    "RunResult",
    "as_rank",
    "default_output",
    "own_traceback",
    "program",
    "rank_count",
    "record",
    "run",
    "show_error",
    "summary",
]


def record(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    level: str = "counters",
    hazards: bool = False,
    *,
    force: bool = False,
    warn: Callable[[str], None] | None = None,
    trace_steps: str = "",
    on_step: Callable[[Step], None] | None = None,
    uses: bool = False,
) -> Recorder:
    """Record the memory of the training steps inside this context.

    ::

        with gpuprobe.record("run.gpuprobe", model, optimizer) as rec:
            for batch in loader:
                with rec.step():
                    loss = train(batch)

    Without `rec.step()` (or `rec.wrap`) a step ends at each ``optimizer.step()``. ``model`` and
    ``optimizer`` are detected if they are not given. ``level="counters"`` has almost no overhead;
    ``"trace"`` records every allocation. ``trace_steps`` selects the steps to trace, counted from
    0: ``"3,100-102"`` or ``"all"``; by default the first three, and unusual ones. ``uses`` also
    notes which operators use the memory, for which each takes longer (on a simulated GPU this is
    always noted). ``force`` replaces an existing recording. ``on_step`` is called with every step's
    record after it has been written, from another thread; it must not raise.

    Raises UsageError if ``path`` cannot be created or the level is unknown, MissingExtra without
    torch. Later errors of the recorder never stop the program.
    """
    if hazards:
        raise UsageError(
            "record() does not detect hazards",
            hint="use `with gpuprobe.detect_hazards():` around it, or gpuprobe run --hazards",
        )
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", why="required for recording")
    from gpuprobe.recording.writer import RecordingWriter
    from gpuprobe.sampler.environment import ranks
    from gpuprobe.sampler.recorder import LEVELS
    from gpuprobe.sampler.tracing.traces import chosen_steps

    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}", hint=f"one of: {', '.join(LEVELS)}")
    if trace_steps:
        chosen_steps(trace_steps)  # invalid steps fail before anything is written
    if trace_steps or uses:
        level = "trace"
    rank, _, world_size = ranks()
    writer = RecordingWriter.create(Path(path), rank=rank, world_size=world_size, force=force)
    return _recorder(
        writer if on_step is None else _Notifying(writer, on_step),
        model=model,
        optimizer=optimizer,
        level=level,
        argv=tuple(sys.argv),
        warn=warn or logging.getLogger("gpuprobe").warning,
        trace_steps=trace_steps,
        uses=uses,
    )


def _recorder(sink: Sink, **settings: Any) -> Recorder:
    from gpuprobe.sampler.recorder import Recorder

    return Recorder(sink, **settings)


def child_writer(path: Path, rank: int, ranks: int) -> RecordingWriter:
    from gpuprobe.recording.writer import RecordingWriter

    return RecordingWriter.create(path, rank=rank, world_size=ranks)


def child_recorder(sink: Sink, **settings: Any) -> Recorder:
    """The recorder of a process that a recorded program or command starts."""
    trace_steps = settings["trace_steps"]
    level = "trace" if trace_steps or settings["uses"] else settings["level"]
    return _recorder(sink, **{**settings, "level": level})


class _Notifying:
    """A recording's writer that calls ``on_step`` for every step."""

    def __init__(self, writer: RecordingWriter, on_step: Callable[[Step], None]) -> None:
        self.session = writer.session
        self.trace = writer.trace
        self.later_uses = writer.later_uses
        self.held = writer.held
        self.finding = writer.finding
        self.blind_spot = writer.blind_spot
        self.end = writer.end
        self.close = writer.close
        self._write = writer.step
        self._on_step = on_step

    def step(self, step: Step) -> None:
        self._write(step)
        self._on_step(step)


class RunResult(NamedTuple):
    """The result of a recorded program. ``exit_code``: the program's; ``error``: its exception,
    None if it ended normally or by ``sys.exit``. ``hazards``: the findings, if they were requested;
    ``assumed``: the assumptions of a simulated GPU; ``spawned``: the recordings of jobs that the
    program started (``torch.multiprocessing.spawn``, or processes that joined a process group);
    ``children``: the number of processes that the program started and that used a GPU, without
    those of ``torch.multiprocessing.spawn``; ``uses_cost``: what noting the uses of memory has cost
    in this process, if that was requested; ``decided``: of a program that failed, the first line
    that decided by a value which the simulated GPU had not computed, as ``file:line``.
    """

    exit_code: int
    error: BaseException | None
    hazards: Hazards | None = None
    assumed: tuple[str, ...] = ()
    spawned: tuple[Path, ...] = ()
    children: int = 0
    uses_cost: UsesCost | None = None
    decided: str = ""


def default_output(name: str, *, module: bool = False, replace: bool = False) -> Path:
    """A free name in the current directory: ``train.gpuprobe``, ``train.2.gpuprobe``, …; of a
    ``module`` all parts of the name, as in ``package.train.gpuprobe``. ``replace``: the first name,
    free or not.

    Under ``torchrun`` all ranks must choose the same name without communication: it has a digest
    of the run's id, restart count and port instead of a count.
    """
    stem = name if module else Path(name).stem or "program"
    from gpuprobe.sampler.environment import ranks

    if ranks()[2] > 1:
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        run_id = "\0".join(os.environ.get(name, "") for name in names)
        label = hashlib.sha256(run_id.encode()).hexdigest()[:8]
        return Path(f"{stem}.{label}.gpuprobe")
    path = Path(f"{stem}.gpuprobe")
    count = 1
    while path.exists() and not replace:
        count += 1
        path = Path(f"{stem}.{count}.gpuprobe")
    return path


def lacks_launcher(result: RunResult) -> bool:
    """Whether the program failed as a variable is missing that a launcher sets."""
    if not isinstance(result.error, Exception):
        return False
    from gpuprobe.sampler.failures import program_error

    return program_error(result.error).lacks_launcher


def discard_empty(result: RunResult, output: Path) -> bool:
    """Delete the recording of a program that exited with a code other than 0 before it called a
    model or used a GPU, as for wrong arguments, and return whether it was deleted. A job's is kept.
    """
    if result.exit_code == 0 or result.error is not None or rank_count() > 1:
        return False
    if result.spawned or result.children or not output.is_dir():
        return False
    from gpuprobe.api.recordings import load
    from gpuprobe.recording.writer import remove_recording

    try:
        recorded = load(output)
    except DataError:  # the summary reports why
        return False
    steps = [step for rank in recorded.ranks for step in rank.steps]
    if any(step.windows or {phase.path for phase in step.phases} - {"setup"} for step in steps):
        return False
    remove_recording(output)
    return True


def source_of(program: Program) -> str:
    """The text of the program's file and of those imported modules that are below its folder, such
    as one that parses the arguments.
    """
    folder = Path(program.file).parent
    loaded = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    texts = []
    for name in {program.file, *filter(None, loaded)}:
        path = Path(name)
        own = path.suffix == ".py" and path.is_relative_to(folder)
        if own and (name == program.file or is_user_file(name)):
            with contextlib.suppress(OSError):  # imported from an archive
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(texts)


def as_rank(rank: int, local_rank: int, world_size: int) -> AbstractContextManager[None]:
    """Inside, this process records as this rank, if ``world_size`` is above 1."""
    from gpuprobe.sampler import environment  # 20 ms: it reads packages' metadata

    return environment.as_rank(rank, local_rank, world_size)


def rank_count() -> int:
    """The number of processes of the job (``torchrun``); 1 without a job."""
    from gpuprobe.sampler.environment import ranks

    return ranks()[2]


def program(target: str, arguments: Sequence[str], module: bool = False) -> Program:
    """Load a script or module, before anything is written.

    Raises UsageError if it does not exist, ProgramFailed if it is not valid Python.
    """
    from gpuprobe.sampler.program import load_module, load_script

    return (load_module if module else load_script)(target, arguments)


def run(
    loaded: Runnable,
    output: Path,
    *,
    level: str = "counters",
    force: bool = False,
    warn: Callable[[str], None] | None = None,
    gpu: str | None = None,
    compute: str = "auto",
    hazards: bool = False,
    trace_steps: str = "",
    on_step: Callable[[Step], None] | None = None,
    measure: bool = False,
    holders: bool = True,
    endless: bool = False,
    uses: bool = False,
    epoch: EpochLimit | None = None,
) -> RunResult:
    """Run a program in this process and record it into ``output``.

    torch is imported when the program imports it; recording starts there. ``gpu`` names the
    simulated GPU that the program finds (``"h100-80gb"``, ``"2xa100-40gb"``); ``compute`` is as
    for `virtual_gpu`. ``hazards`` also detects races between streams: on that GPU, or on CUDA, or
    on a simulated H100. ``on_step``: as for `record`. Raises what `record` and `virtual_gpu`
    raise; an exception of the program is in the result. With ``measure`` and ``compute="real"``, a
    large program makes its first step without values, so that their cost is known, and what it
    prints meanwhile is dropped: CostMeasured if they are affordable, and the program must run again
    from its start, without a recording. ``holders``: at level ``trace``, record what holds tensors
    at the end. ``endless``: the simulated GPU never runs out of memory. ``uses``: as for `record`.
    ``epoch``: end the program's first epoch there, and the program after the evaluation that
    follows.
    """
    recorded = partial(
        _recorded,
        loaded,
        output,
        level,
        force,
        warn,
        hazards,
        trace_steps,
        on_step,
        holders,
        uses,
        epoch,
    )
    if gpu is not None:
        from gpuprobe.api.simulated_gpu import require_torch

        require_torch("required for the simulated GPU")
        from gpuprobe.native.session import EngineOptions
        from gpuprobe.native.session import session as session_of

        silence = ExitStack()
        options = EngineOptions(
            gpu,
            compute,
            measure=measure,
            on_measure=lambda: silence.enter_context(_silenced()),
            endless=endless,
        )
        with silence, session_of(options) as session:
            session.assume_unknown()  # the result reports it
            result = recorded(session)
            if not isinstance(result.error, (TooLarge, CostMeasured)):
                try:
                    session.check_measured(result.error)
                except (TooLarge, CostMeasured) as measured:
                    result = result._replace(error=measured)
        if isinstance(result.error, (TooLarge, CostMeasured)):
            from gpuprobe.recording.writer import remove_recording

            remove_recording(output)
            if isinstance(result.error, CostMeasured):
                raise result.error.with_traceback(None)
            text = f"--compute {compute}: {result.error}"
            raise EnvironmentUnavailable(text, hint="--compute auto")
        assumed = dict.fromkeys((*session.assumed, *result.assumed))
        result = result._replace(assumed=tuple(assumed))
        if not isinstance(result.error, Exception):
            return result
        from gpuprobe.sampler.failures import program_error

        known = program_error(result.error).out_of_memory
        return result if known else result._replace(decided=session.unknown_read()[0])
    return recorded(None)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Inside, what the process prints is dropped: its values are not computed, and the program runs
    again.
    """
    from gpuprobe.processes import to_null

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # the program's own
                stream.flush()

    kept: dict[int, int] = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed
            kept[number] = os.dup(number)
    flush()
    to_null(*kept)
    try:
        yield
    finally:
        flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)


def _recorded(
    loaded: Runnable,
    output: Path,
    level: str,
    force: bool,
    warn: Callable[[str], None] | None,
    hazards: bool,
    trace_steps: str,
    on_step: Callable[[Step], None] | None,
    holders: bool,
    uses: bool,
    epoch: EpochLimit | None,
    session: NativeSession | None,
) -> RunResult:
    """Run a program in this process, on the GPUs of ``session``, and record it."""
    from gpuprobe.patching import when_imported
    from gpuprobe.sampler.program import exit_code, python_restored, signals_restored

    children = _StartedProcesses(output.absolute(), level, trace_steps, uses, tuple(loaded.argv))
    error: BaseException | None = None
    code = 0
    found: Hazards | None = None
    with ExitStack() as stack:
        if hazards:
            from gpuprobe.api.hazards import detect_hazards, findings_so_far

            found = stack.enter_context(detect_hazards())
            on_step = _with_findings(
                findings_so_far(), on_step, lambda finding: recorder.found(finding)
            )
        recorder = record(
            output,
            level=level,
            force=force,
            warn=warn,
            trace_steps=trace_steps,
            on_step=on_step,
            uses=uses,
        )
        recorder.set_argv(loaded.argv)
        only = None
        if epoch is not None:
            from gpuprobe.planning.first_epoch import FirstEpoch, FirstEpochOnly

            first = FirstEpoch(epoch)
            first.on_stop = first.on_stop_in_training = recorder.stop
            recorder.progress = first.phase
            loaded = only = FirstEpochOnly(loaded, first)
        if not holders:
            recorder.without_holders()
        children.follow(recorder, stack)
        when_imported("torch", lambda: children.start(recorder, stack))
        try:
            with python_restored(), signals_restored(until_exit=True):
                loaded.run()
        except SystemExit as exit_:
            code = exit_code(exit_)
        except BaseException as raised:  # noqa: BLE001 - in the result, not swallowed
            code, error = 1, raised.error if isinstance(raised, UnknownValue) else raised
        refused = None if session is None else session.refused()
        if refused is not None and error is None:  # the program caught it
            code, error = 1, refused
        result = RunResult(code, error, found)
        ended = stack.pop_all()
        with _after_the_program(warn):
            if only is not None:
                only.end(recorder)
            with ended:
                if found is not None and (error is not None or code):
                    from gpuprobe.hazards.findings.results import ending

                    found.failed = ending(error, code)
                recorder.stop(error)
                started = children.notes()
                children.read_assumed()
            for finding in found.findings if found is not None else ():
                recorder.found(finding)
            children.report(recorder, started)
            recorder.finish()
            ended_epoch = recorder.epoch
            result = result._replace(
                assumed=(*children.assumed, *([ended_epoch.text] if ended_epoch else ())),
                spawned=_as_requested(output, tuple(children.recordings())),
                children=len(started),
                uses_cost=recorder.uses_cost,
            )
    return result


def _as_requested(output: Path, spawned: tuple[Path, ...]) -> tuple[Path, ...]:
    """The recordings of jobs next to ``output``. If the program has only launched a job, the job's
    recording replaces the program's, which is empty.
    """
    from gpuprobe.recording.writer import remove_recording

    if not spawned or any(output.glob("child-*")) or not _is_idle(output):
        return spawned
    remove_recording(output)
    spawned[0].rename(output)
    return spawned[1:]


def _is_idle(output: Path) -> bool:
    """Whether a recording shows no use of a GPU and no training."""
    from gpuprobe.api.recordings import load

    try:
        recorded = load(output)
    except DataError:  # the summary reports why
        return False
    steps = [step for rank in recorded.ranks for step in rank.steps]
    return not any(
        {window.device for window in step.windows} - {"cpu"}
        or {phase.path for phase in step.phases} - {"setup"}
        for step in steps
    )


@contextlib.contextmanager
def _after_the_program(warn: Callable[[str], None] | None) -> Iterator[None]:
    """Inside, an error of gpuprobe is a warning: the program has ended, and its exit code remains.
    It may have replaced what gpuprobe calls (functions of `os`, `pathlib`, the import).
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - reported
        (warn or logging.getLogger("gpuprobe").warning)(
            f"gpuprobe could not finish the recording: {type(error).__name__}: {error}"
        )


class _StartedProcesses:
    """The processes that a recorded program starts: they are recorded next to it, at the same
    level. ``output`` is absolute: the program may change the working directory.
    """

    def __init__(
        self, output: Path, level: str, trace_steps: str, uses: bool, argv: tuple[str, ...]
    ) -> None:
        self._output = output
        self._level = level
        self._trace_steps = trace_steps
        self._uses = uses
        self._argv = argv
        self._first_job = 0
        self._folder: Path | None = None  # of the notes that the processes leave
        self.assumed: tuple[str, ...] = ()

    def start(self, recorder: Recorder, stack: ExitStack) -> None:
        """Start recording, as the program imports torch."""
        recorder.start_guarded()
        self.follow(recorder, stack)
        from gpuprobe.sampler.processes.recorded import follow_spawns  # it imports torch

        child = partial(record, level=self._level, trace_steps=self._trace_steps, uses=self._uses)
        stack.callback(follow_spawns(self._output, child))

    def follow(self, recorder: Recorder, stack: ExitStack) -> None:
        """Follow the processes until ``stack`` closes. Called before the program starts the first
        one, or uses torch.
        """
        if self._first_job:
            return
        from gpuprobe.sampler.environment import ranks
        from gpuprobe.sampler.processes import children, notes, recorded

        self._first_job = recorded.next_job(self._output)
        try:
            folder = notes.make_notes()
        except OSError as failure:  # the program continues
            recorder.blind_spot(
                BlindSpot(
                    "processes that the program starts (multiprocessing, os.fork): "
                    f"{failure.strerror or failure}",
                    "whether they use the GPU is unknown; their memory is not included",
                )
            )
            return
        self._folder = folder
        stack.callback(notes.remove_notes)
        rank, _, count = ranks()
        make = partial(
            child_recorder,
            level=self._level,
            trace_steps=self._trace_steps,
            uses=self._uses,
            argv=self._argv,
        )
        os.environ[notes.NOTES] = str(folder)
        stack.callback(os.environ.pop, notes.NOTES, None)
        job = recorded.Children(
            self._output, self._first_job, rank, count, folder, child_writer, make
        )
        stack.enter_context(children.following(job))

    def read_assumed(self) -> None:
        """Read what the simulated GPUs of the processes assumed."""
        if self._folder is not None:
            from gpuprobe.sampler.processes.notes import read_assumed

            self.assumed = read_assumed(self._folder)

    def notes(self) -> dict[int, str]:
        """Why each process that used a GPU is not recorded ("" if it is), by process id."""
        if self._folder is None:
            return {}
        from gpuprobe.sampler.processes.notes import read_notes

        return read_notes(self._folder)

    @staticmethod
    def report(recorder: Recorder, notes: Mapping[int, str]) -> None:
        """Record which processes are not recorded, or not completely."""
        from gpuprobe.sampler.processes.recorded import ENDED_EARLY

        recorder.incomplete_processes = sorted(
            process for process, text in notes.items() if text and text != ENDED_EARLY
        )
        for reason, count in Counter(text for text in notes.values() if text).items():
            processes = "1 process that uses" if count == 1 else f"{count} processes that use"
            recorder.blind_spot(
                BlindSpot(
                    f"{processes} the GPU and that the program started: {reason}",
                    "their memory is not included",
                )
            )

    def recordings(self) -> Iterator[Path]:
        """The recordings of the jobs that the program has started."""
        if not self._first_job:
            return
        from gpuprobe.sampler.processes.recorded import next_job, spawned_path

        for number in range(self._first_job, next_job(self._output)):
            yield spawned_path(self._output, number)


def _with_findings(
    so_far: FindingsSoFar, on_step: Callable[[Step], None] | None, notify: Callable[[Finding], None]
) -> Callable[[Step], None]:
    """An ``on_step`` that also reports the findings since the previous step."""

    def with_findings(step: Step) -> None:
        for finding in so_far.news():
            notify(finding)
        if on_step is not None:
            on_step(step)

    return with_findings


def show_error(error: BaseException) -> int:
    """Show an error as Python does at the end of a script, by the program's ``sys.excepthook``.
    Returns the exit code that Python would have.
    """
    from gpuprobe.sampler.program import show

    return show(error)


def own_traceback(error: BaseException) -> str:
    """The traceback of a program's error, without gpuprobe's frames."""
    from gpuprobe.sampler.program import own_traceback as text_of

    return text_of(error)


def summary(output: Path, width: int = 80, *, gpu: str = "") -> list[str]:
    """The summary at the end of a run, in lines of text: how it ran out of memory, if it did; the
    peak, its place and largest parts; cause and fix, or what to try; and the recording's path.
    Without control characters. ``gpu`` is the name of the GPU in the catalogue, for commands to run
    next.

    Under ``torchrun`` only the first rank has a summary, of the path alone: other ranks may still
    be writing. Raises DataError if the recording cannot be read.
    """
    import shlex

    from gpuprobe.sampler.environment import ranks

    rank, _, world_size = ranks()
    if world_size > 1:
        shown = visible(str(output))
        command = f"gpuprobe report {shlex.quote(shown)}"
        where = f"recording of {world_size} ranks: {shown}   ({command})"
        return [where] if rank == 0 else []
    from gpuprobe.analysis.completeness import missing_parts
    from gpuprobe.analysis.evaluation import WITH_GRADIENTS
    from gpuprobe.api.recordings import load
    from gpuprobe.recording.summary import summarize
    from gpuprobe.reporters.sections.parts import capitalized
    from gpuprobe.reporters.sections.report import headline
    from gpuprobe.reporters.sections.report.failures import (
        ended_out_of_memory,
        estimate_command,
        estimate_reason,
    )
    from gpuprobe.reporters.sections.report.head import (
        explain_command,
        grows_unheld,
        head_of,
        main_cause,
    )
    from gpuprobe.reporters.sections.report.ranks import children_line
    from gpuprobe.reporters.terminal import Style
    from gpuprobe.reporters.text import draw

    recording = load(output)
    report = summarize(recording, top=3)
    style = Style(width=width, cwd=report.session.cwd)
    failed = ended_out_of_memory(report)
    head = head_of(report)
    lines = [style.relative(capitalized(head.verdict))] if failed else []
    missing = missing_parts(recording, ended=True)  # this process has closed it
    lines += [f"the recording is incomplete: {text}" for text in missing[:1]]
    if report.peak.measure is None and not missing:
        lines.append("nothing was recorded: no training step of torch was detected")
    elif report.peak.measure is not None:
        first, *rest = draw.lines([headline(report)], style)
        lines += [f"peak: {first}", *rest]
        lines += [f"also: {children_line(report)}"] if report.children else []
        labelled = [("cause", head.cause), ("fix", head.fix), ("saves", head.saves)]
        if not failed and main_cause(report) is None:
            labelled = [("try", head.fix)]
        labelled += [
            ("evaluation", f"{row.finding.message} ({row.finding.location})")
            for row in report.findings
            if row.finding.rule == WITH_GRADIENTS.id and "evaluation" not in head.cause
        ]
        lines += [f"{label}: {style.relative(text)}" for label, text in labelled if text]
    shown = style.text(style.path(str(output)))
    lines.append(f"recording: {shown}   (gpuprobe report {shlex.quote(shown)})")
    wrapped = [line for text in lines for line in style.wrapped(text, rest="  ")]
    commands = []
    if grows_unheld(report):
        commands.append(("what holds the memory:", explain_command(report, gpu)))
    if command := estimate_command(report, gpu):
        reason = estimate_reason(report)
        commands.append((reason[0].lower() + reason[1:], command))
    for reason, command in commands:
        wrapped += [reason, f"  {visible(command)}"]  # in one line, to be copied
    return wrapped
