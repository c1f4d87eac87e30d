"""Writing self-contained HTML pages: a report, a comparison, a check."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprobe.errors import DataError, UsageError

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline import CheckResult
    from gpuprobe.analysis.peak.flame import FlameNode
    from gpuprobe.model.run.recording import Recording

__all__ = ["read_hazards", "write_check", "write_diff", "write_report"]

StrPath = str | os.PathLike[str]


def write_report(
    recording: Recording,
    path: StrPath,
    *,
    hazards: dict[str, Any] | None = None,
    force: bool = False,
) -> tuple[Path, ...]:
    """Write the report as one HTML page that needs nothing else.

    ``hazards`` is a hazards document (`read_hazards`), shown with the rest. Returns what was
    written. Raises UsageError where ``path`` exists (unless ``force``) or cannot be written,
    DataError where nothing was recorded yet.
    """
    from gpuprobe.analysis.trace.tracks import tracks
    from gpuprobe.api.recordings import summary
    from gpuprobe.api.views import _text
    from gpuprobe.model.files import new_file
    from gpuprobe.reporters.html import report as html_report

    found, problems = tracks(recording)
    with new_file(path, force) as stream:
        html_report.write(
            summary(recording, top=html_report.ROWS),
            _text(stream),
            tracks=found,
            trees=_trees(recording),
            problems=problems,
            hazards=hazards,
        )
    return (Path(path),)


def _trees(recording: Recording) -> dict[str, FlameNode]:
    """What was live at the peak; nothing where no trace tells."""
    from gpuprobe.analysis.peak.flame import flame_tree
    from gpuprobe.analysis.peak.peaks import device_peaks, high_water_at, overall_peak
    from gpuprobe.analysis.peak.tree import category_tree, module_tree
    from gpuprobe.model.values import Unavailable

    site = overall_peak(recording, device_peaks(recording))
    mark = None if site is None else high_water_at(site)
    if mark is None or isinstance(mark, Unavailable):
        return {}
    return {
        "category": category_tree(mark),
        "module": module_tree(mark),
        "stacks": flame_tree(mark, root=f"peak of {mark.device}"),
    }


def write_diff(before: Recording, after: Recording, path: StrPath, *, force: bool = False) -> Path:
    """Write what changed between two recordings as one HTML page that needs nothing else, with
    the curves of both. Returns what was written. Raises what `write_report` and `diff` raise.
    """
    from gpuprobe.analysis.trace.tracks import tracks
    from gpuprobe.api.recordings import diff
    from gpuprobe.api.views import _text
    from gpuprobe.model.files import new_file
    from gpuprobe.reporters.html import compare as html_compare
    from gpuprobe.reporters.json import diff as diff_json

    document = diff_json.document(diff(before, after))
    sides = []
    problems: list[str] = []
    for name, recording in (("before", before), ("after", after)):
        found, unread = tracks(recording)
        sides.append((name, found))
        problems += [f"{name}: {problem}" for problem in unread]
    with new_file(path, force) as stream:
        html_compare.write_diff(document, _text(stream), tracks=sides, problems=problems)
    return Path(path)


def write_check(result: CheckResult, path: StrPath, *, title: str = "memory check") -> Path:
    """Write a check against a baseline as one HTML page that needs nothing else; replaces the
    page of an earlier check. Raises UsageError where it cannot be written.
    """
    from gpuprobe.api.views import _text
    from gpuprobe.model.files import new_file
    from gpuprobe.reporters.html import compare as html_compare
    from gpuprobe.reporters.json import check as check_json

    with new_file(path, True) as stream:
        html_compare.write_check(check_json.document(result), _text(stream), title=title)
    return Path(path)


def read_hazards(path: StrPath) -> dict[str, Any]:
    """Read a hazards document, as ``gpuprobe run --hazards-json`` writes it.

    Raises UsageError where there is no such file, DataError where it is something else.
    """
    import json

    where = Path(path)
    try:
        found = json.loads(where.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"no such file: {where}", hint="gpuprobe run --hazards-json FILE writes one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {where}: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != "gpuprobe.hazards":
        raise DataError(f"{where} is no hazards document")
    return found
