"""Nothing in a report is for nobody: what changes under any of its keys changes what one reads.

A report is filled by walking its dataclasses. Then one value after the other is changed, and each
view has to change with it, except where the lists here say why not.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import types
import typing
from collections.abc import Iterator
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, NewType

import pytest
from html_pages import Page

from gpuprobe.model.causes import Bound, Certainty
from gpuprobe.model.findings import Level
from gpuprobe.model.memory import Category
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.report import Report
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.model.run.recording import StepRow, StepRows
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.html import report as html_report
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.text import draw

# Values that are not free: they name one another, or come from a list.
GIVEN: dict[str, Any] = {
    "recording.status": "failed",
    "recording.kind": "recording",
    "session.argv": ("train.py", "--lr"),
    "session.level": "trace",
    "session.world_size": 9,
    "ranks.0.rank": 0,
    "ranks.1.rank": 1,
    "ranks.*.steps": 4,
    "devices.0.rank": 0,
    "devices.1.rank": 1,
    "devices.0.device": "cuda:0",
    "devices.1.device": "cuda:1",
    "peak.measure": "allocated",
    "peak.rank": 0,
    "peak.device": "cuda:0",
    "peak.traced": Unavailable("the peak's step has no trace"),
    "categories.at": "nearest_trace",
    "out_of_memory.*.fits_with": ("conf:one", "conf:two"),
    "needs.rows.*.need": "needed_later",
    "causes.*.holder.root": HolderRoot.LOCAL,
    "lifespans.timed": True,
    "lifespans.rows.*.begins_in_trace": True,
    "lifespans.rows.*.ends_in_trace": True,
    "time.steps": 4,
    "time.gpu_steps": 4,
    "rank_comparison.memory.at": "peak",
    "rank_comparison.time.steps": 4,
    "rank_comparison.time.late_steps": 4,
    "steps.highlights.rank": 0,
    "steps.highlights.device": "cuda:0",
    "steps.highlights.first": 10,
    "steps.highlights.worst": 10,
    "steps.highlights.slowest": 11,
    "steps.highlights.last": 11,
    "steps.rows.*.rank": 0,
    "steps.rows.0.step.index": 10,
    "steps.rows.1.step.index": 11,
    "steps.rows.*.step.windows.0.device": "cuda:0",
    "steps.rows.*.step.ended_by": "optimizer",
    "steps.rows.*.step.duration_ns": 500_000_000,
    "placement.*.what": "module",
    "blind_spots.*.ranks": (0,),
    "findings.*.finding.level": Level.WARNING,
    "causes.*.effect.certainty": Certainty.REPLAYED,
}
OTHER: dict[str, Any] = {
    "causes.*.effect.bound": Bound.OR_MORE,
    "recording.status": "incomplete",
    "recording.kind": "snapshot",
    "categories.at": "step_end",
    "peak.measure": "host_rss",
    "peak.traced": 77 << 20,
    "needs.rows.*.need": "in_use",
    "rank_comparison.memory.at": "step_end",
    "findings.*.finding.level": Level.ERROR,
    "steps.highlights.device": None,
}

# Which no view for people shows, and why.
MACHINE_ONLY = {
    "recording.error.out_of_memory": "whether to look for an account; that account is shown",
    "findings.*.finding.fingerprint": "for comparing runs",
    **dict.fromkeys(
        (
            f"holders.*.{key}"
            for key in ("root", "path.*", "kept", "node", "error", "via", "cycle.*", "inferred")
        ),
        "how a block is kept, which `gpuprobe explain` shows; a report has the container's place",
    ),
    "causes.*.holder.*": "the sentence of the cause names it, and -v has it in words",
    "causes.*.effect.certainty": "in words, with the effect",
    "holders.*.saved_tensors": "their bytes are shown",
    "needs.rows.*.modules.*.blocks": "the row has those of all modules",
    "lifespans.*": "only known where needs are not: see below",
    "children.*.error.out_of_memory": "its message has it",
    "ranks.*.error.out_of_memory": "whether to look for an account; that account is shown",
    "ranks.*.error.rank": "the row's own",
    "fragmentation.peak.why_it_stays.*": "what stays at the end is what one can do about",
    "session.rank": "the first rank's, which is the first row of the ranks",
    "steps.highlights.rank": "whose rows are marked",
    "steps.rows.*.step.start_ns": "the timeline draws it",
    "steps.rows.*.step.phases.*": "of a step one row is shown, with its longest phase",
    "steps.rows.*.step.windows.*": "of a step one row is shown, of the rank's device",
    "steps.rows.*.step.host.*": "of a step one row is shown; of the host where it is the measure",
    "steps.rows.*.step.tensors.*": "the peak's step has them as categories",
    "steps.rows.*.step.traces.*": "names of files",
    "steps.rows.*.step.collectives.*": "summed over the steps, under time",
    "steps.rows.*.step.exchanges.*": "the last of them are summed, under communication",
    "launches.rows.*.kind": "counted for each kind",
    "launches.rows.*.device": "the figures are of all devices of the rank",
    "launches.rows.*.nodes": "summed, as replayed",
    "steps.rows.*.step.launches.*": "the last of them are the report's own",
    "steps.rows.*.step.work.*": "the time of the last of them is the report's own",
    "steps.rows.*.step.host_waits.*": "`gpuprobe diff` has their sums, beside what is predicted",
    "step_time.samples": "shown where there are no tokens and no images (test_tables.py)",
    "steps.rows.*.step.placement.*": "the last of them is the report's own",
    "steps.rows.*.step.ended_by": "which steps count was decided by it",
    "steps.rows.*.step.gpu_ns": "summed over the steps, under time",
}


def hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def find(table: dict[str, Any], path: str) -> Any:
    return next((value for key, value in table.items() if fnmatchcase(path, key)), None)


def filled(hint: Any, path: str, numbers: Iterator[int]) -> Any:
    """A value of the type, another one each time."""
    given = find(GIVEN, path)
    if given is not None:
        return given
    if isinstance(hint, NewType):
        return filled(hint.__supertype__, path, numbers)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [one for one in arguments if one not in (type(None), Unavailable, NoPlace)]
        return filled(Place if Place in kinds else kinds[0], path, numbers)
    if origin is tuple:
        inner = [arguments[0]] * 2 if arguments[-1] is ... else arguments
        return tuple(filled(one, f"{path}.{i}", numbers) for i, one in enumerate(inner))
    if hint is StepRows:
        rows = [filled(StepRow, f"{path}.{at}", numbers) for at in range(2)]
        return StepRows([(0, tuple(row.step for row in rows))])
    if origin is dict:
        return {Category.ACTIVATION: next(numbers) << 20, Category.GRADIENT: next(numbers) << 20}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint is Peak:
            least = next(numbers) << 20
            return Peak(least, least + (next(numbers) << 20))
        return hint(
            **{
                one.name: filled(hints(hint)[one.name], f"{path}.{one.name}".lstrip("."), numbers)
                for one in dataclasses.fields(hint)
                if one.init
            }
        )
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    return scalar(hint, next(numbers))


def scalar(hint: Any, number: int) -> Any:
    if hint is str:
        return f"word{number}"
    if hint is bool:
        return False
    if hint is float:
        return 1e9 + number * 86_400
    assert hint is int, hint
    return number << 20


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, (tuple, StepRows)):
        for i, one in enumerate(value[:1]):
            yield from leaves(one, f"{path}.{i}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, (Unavailable, Place)):
        for one in dataclasses.fields(value):
            yield from leaves(getattr(value, one.name), f"{path}.{one.name}".lstrip("."))
    else:
        yield path


def changed(value: Any, path: str, steps: list[str]) -> Any:
    """The same with another value at the end of ``steps``."""
    if not steps:
        other = find(OTHER, path)
        if other is not None or path in OTHER:
            return other
        if isinstance(value, bool):
            return not value
        if isinstance(value, str):
            return f"other-{value}"
        if isinstance(value, (int, float)):
            return value * 3 + 50_000_000
        if isinstance(value, Place):
            return dataclasses.replace(value, line=value.line + 1)
        if isinstance(value, dict):
            return {key: size * 2 for key, size in value.items()}
        raise AssertionError(f"{path}: {value!r}")
    name, *rest = steps
    if isinstance(value, StepRows):
        rows = list(value)
        rows[int(name)] = changed(rows[int(name)], path, rest)
        return StepRows([(row.rank, (row.step,)) for row in rows])
    if isinstance(value, tuple):
        at = int(name)
        return (*value[:at], changed(value[at], path, rest), *value[at + 1 :])
    return dataclasses.replace(value, **{name: changed(getattr(value, name), path, rest)})


REPORT: Report = filled(Report, "", itertools.count(2))


def text(report: Report) -> str:
    stream = io.StringIO()
    draw.write(report_sections(report, full=True), stream, full=True)
    return stream.getvalue()


def html(report: Report) -> str:
    stream = io.StringIO()
    html_report.write(report, stream)
    return Page(stream.getvalue()).text


VIEWS = {"text": text, "html": html}
UNCHANGED = {name: view(REPORT) for name, view in VIEWS.items()}


def for_readers() -> list[str]:
    return [
        path for path in leaves(REPORT) if not any(fnmatchcase(path, key) for key in MACHINE_ONLY)
    ]


@pytest.mark.parametrize("path", for_readers())
def test_every_key_reaches_those_who_read(path: str) -> None:
    other = changed(REPORT, path, path.split("."))
    assert other != REPORT
    missing = [name for name, view in VIEWS.items() if view(other) == UNCHANGED[name]]
    assert missing == []


UNTRACED = dataclasses.replace(REPORT, needs=Unavailable("not traced"))


@pytest.mark.parametrize("path", [path for path in leaves(REPORT) if path.startswith("lifespans")])
def test_without_uses_every_key_of_lifespans_does(path: str) -> None:
    other = changed(UNTRACED, path, path.split("."))
    missing = [name for name, view in VIEWS.items() if view(other) == view(UNTRACED)]
    assert missing == []


def test_the_exceptions_are_keys() -> None:
    paths = list(leaves(REPORT))
    for key in MACHINE_ONLY:
        assert any(fnmatchcase(path, key) for path in paths), key
