"""Recordings in other formats: an HTML page, Perfetto, torch snapshot; results in
notebooks; findings as annotations.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from gpuprobe.errors import DataError, GpuprobeError, UsageError
from gpuprobe.model.io.files import new_file

if TYPE_CHECKING:
    from gpuprobe.analysis.peak.flame import FlameNode
    from gpuprobe.model.findings import Finding
    from gpuprobe.model.run.recording import RankRecording, Recording

StrPath = str | os.PathLike[str]


def write_report(recording: Recording, path: StrPath, *, force: bool = False) -> tuple[Path, ...]:
    """Write the report as one HTML page that needs nothing else. Returns the path.

    Raises UsageError if ``path`` exists (unless ``force``) or cannot be written, DataError if
    nothing was recorded yet.
    """
    from gpuprobe.analysis.inspection.tracks import tracks
    from gpuprobe.recording.summary import summarize
    from gpuprobe.reporters.html import report as html_report
    from gpuprobe.step_time.recorded import timelines_of

    found, problems = tracks(recording)
    with new_file(path, force) as stream:
        html_report.write(
            summarize(recording, top=html_report.ROWS, whole=True),
            _text(stream),
            tracks=found,
            trees=_trees(recording),
            problems=problems,
            courses=timelines_of(recording.ranks),
        )
    return (Path(path),)


def _trees(recording: Recording) -> dict[str, FlameNode]:
    """The memory at the peak as trees; empty without a trace of the peak."""
    from gpuprobe.analysis.peak.flame import (
        category_tree,
        every_frame,
        flame_tree,
        informative_frames,
        module_tree,
        need_tree,
    )
    from gpuprobe.analysis.peak.peaks import device_peaks, high_water_at, overall_peak
    from gpuprobe.model.values import Unavailable

    site = overall_peak(recording, device_peaks(recording))
    mark = None if site is None else high_water_at(site)
    if mark is None or isinstance(mark, Unavailable):
        return {}
    return {
        "category": category_tree(mark),
        **({} if (needs := need_tree(mark)) is None else {"use": needs}),
        "module": module_tree(mark),
        "stacks": flame_tree(mark, informative_frames, root=f"peak of {mark.device}"),
        "all frames": flame_tree(mark, every_frame, root=f"peak of {mark.device}"),
    }


def write_diff(before: Recording, after: Recording, path: StrPath, *, force: bool = False) -> Path:
    """Write the difference of two recordings as one HTML page that needs nothing else, with the
    curves of both. Returns the path. Raises what `write_report` and `diff` raise.
    """
    from gpuprobe.analysis.inspection.tracks import tracks
    from gpuprobe.api.recordings import diff
    from gpuprobe.reporters.html import report as html_report

    changes = diff(before, after)
    sides = []
    problems: list[str] = []
    for name, recording in (("before", before), ("after", after)):
        found, unread = tracks(recording)
        sides.append((name, found))
        problems += [f"{name}: {problem}" for problem in unread]
    with new_file(path, force) as stream:
        html_report.write_diff(changes, _text(stream), tracks=sides, problems=problems)
    return Path(path)


def write_perfetto(recording: Recording, path: StrPath, *, force: bool = False) -> tuple[Path, ...]:
    """Write the traces as Chrome trace JSON for ui.perfetto.dev; gzipped for a name in ``.gz``.
    Operations with other ranks are included for the steps in which they were recorded one by one,
    and the predicted course of a step, if its work was recorded.

    The file contains all ranks. Returns its path. Raises UsageError if ``path`` exists (unless
    ``force``) or cannot be written, DataError if there is neither a trace nor such an operation.
    """
    from gpuprobe.analysis.communication import detailed_steps
    from gpuprobe.analysis.launches import counted_steps
    from gpuprobe.model.run.communication import records_of
    from gpuprobe.reporters.viewers import perfetto
    from gpuprobe.step_time.recorded import timelines_of

    communication = [
        perfetto.RankCommunication(
            rank.session.rank,
            int(rank.session.started_at * 1e6),
            [record for step in detailed_steps(rank) for record in records_of(step.exchanges)],
        )
        for rank in recording.ranks
    ]
    communication = [one for one in communication if one.records]
    launches = [
        perfetto.RankLaunches(
            rank.session.rank, int(rank.session.started_at * 1e6), counted_steps(rank)
        )
        for rank in recording.ranks
    ]
    launches = [one for one in launches if one.steps]
    predicted = [
        perfetto.PredictedStep(rank, *course)
        for rank, course in timelines_of(recording.ranks).items()
    ]
    ranks = recording.ranks if communication else _ranks_with_traces(recording)
    several = len(recording.ranks) > 1
    traces = (
        (rank.session.rank if several else None, trace) for rank in ranks for trace in rank.traces
    )
    with new_file(path, force) as stream:
        if os.fspath(path).endswith(".gz"):
            import gzip

            # No name and no time in the header: the same recording gives the same bytes.
            with gzip.GzipFile("", "wb", 6, stream, mtime=0) as packed:
                text = _text(packed)
                perfetto.write_ranks(
                    traces,
                    text,
                    communication=communication,
                    launches=launches,
                    predicted=predicted,
                )
                text.flush()
        else:
            perfetto.write_ranks(
                traces,
                _text(stream),
                communication=communication,
                launches=launches,
                predicted=predicted,
            )
    return (Path(path),)


def write_snapshot(recording: Recording, path: StrPath, *, force: bool = False) -> tuple[Path, ...]:
    """Write the traces as a torch memory snapshot, for pytorch.org/memory_viz.

    The format has no ranks: of several ranks each gets a file, with the rank in its name
    (``run.rank0.pickle``). Returns the paths. Raises UsageError as `write_perfetto` does, or if
    there is no trace of a CUDA device; DataError without any trace.
    """
    from gpuprobe.reporters.viewers import torch_snapshot

    with_traces = _ranks_with_traces(recording)
    name = Path(path)
    written = []
    for rank in with_traces:
        where = name
        if len(recording.ranks) > 1:
            where = name.with_name(f"{name.stem}.rank{rank.session.rank}{name.suffix}")
        with new_file(where, force) as stream:
            torch_snapshot.write(rank.traces, stream)
        written.append(where)
    return tuple(written)


class View(NamedTuple):
    """A file format of recordings: its writer, and the option of ``gpuprobe report``."""

    write: Callable[..., tuple[Path, ...]]
    metavar: str
    help: str


VIEWS: dict[str, View] = {
    "perfetto": View(write_perfetto, "FILE.json[.gz]", "the trace for ui.perfetto.dev"),
    "snapshot": View(write_snapshot, "FILE.pickle", "a torch memory snapshot for torch's viewer"),
}
"""The formats of ``gpuprobe report``, by option."""

_NEEDS_TRACE = "record with --level trace"


def _ranks_with_traces(recording: Recording) -> list[RankRecording]:
    """The ranks that have a trace. Raises DataError if none has one."""
    found = [rank for rank in recording.ranks if next(iter(rank.traces), None) is not None]
    if not found:
        raise DataError(f"{recording.path} has no memory trace", hint=_NEEDS_TRACE)
    return found


def _text(stream: Any) -> IO[str]:
    import io

    # Frames may contain bytes that are not UTF-8: they are written as escapes.
    return io.TextIOWrapper(
        stream, "utf-8", errors="backslashreplace", newline="\n", write_through=True
    )


# -- in notebooks


def html_of(value: Any) -> str:
    """The HTML fragment of a result for notebooks: peak, causes, advice and curve of a recording or
    report; the changes of a diff or check; the figures of an estimate, fit, replay, finding or
    device.

    For a recording that cannot be read, it shows the error. Raises TypeError for other objects.
    """
    from gpuprobe.analysis.inspection.tracks import tracks
    from gpuprobe.api.recordings import ReportDocument
    from gpuprobe.model.run.recording import Recording
    from gpuprobe.recording.summary import summarize
    from gpuprobe.reporters.html import notebook

    try:
        if isinstance(value, ReportDocument):
            return notebook.of_report(value.summary, tracks(value.recording)[0])
        if isinstance(value, Recording):
            return notebook.of_report(summarize(value), tracks(value)[0])
        return notebook.of_result(value)
    except GpuprobeError as error:
        return notebook.of_error(error)


def text_of(value: Any) -> str:
    """The same as text for IPython in a terminal, without a curve; "" for results that have none.
    For a recording that cannot be read, the error.
    """
    from gpuprobe.api.recordings import ReportDocument
    from gpuprobe.model.run.recording import Recording
    from gpuprobe.recording.summary import summarize
    from gpuprobe.reporters.sections.results import sections_of
    from gpuprobe.reporters.terminal import Style
    from gpuprobe.reporters.text.draw import lines

    try:
        if isinstance(value, (ReportDocument, Recording)):
            value = value.summary if isinstance(value, ReportDocument) else summarize(value)
        return "\n".join(lines(sections_of(value), Style()))
    except GpuprobeError as error:
        return str(error)


def annotation_service(text: str) -> tuple[str | None, str]:
    """The service of ``github``, ``gitlab``, ``gitlab=FILE`` or ``auto`` (None if no service is
    detected), and the file for GitLab. Raises UsageError for other values.
    """
    from gpuprobe.reporters.ci.annotations import GITLAB_FILE, SERVICES, service_of

    name, equals, file = text.partition("=")
    if name not in (*SERVICES, "auto") or (equals and (name != "gitlab" or not file)):
        raise UsageError(f"expected github, gitlab, gitlab=FILE or auto, found {text!r}")
    return service_of(os.environ) if name == "auto" else name, file or GITLAB_FILE


def annotations_of(
    service: str, findings: Sequence[Finding], project: str, elsewhere: str, failed: str = ""
) -> str:
    """The annotations that ``service`` shows at the lines of findings. Their files are relative to
    the folder ``project``; findings without a place are at the file ``elsewhere``. ``failed``: how
    the program failed.
    """
    from gpuprobe.reporters.ci.annotations import Places, write_github, write_gitlab

    stream = io.StringIO()
    places = Places.of(os.environ, project)
    if service == "github":
        write_github(findings, stream, places, failed=failed)
    else:
        write_gitlab(findings, stream, places, elsewhere, failed=failed)
    return stream.getvalue()
