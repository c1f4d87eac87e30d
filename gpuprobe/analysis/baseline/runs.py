"""The baselines of several runs in one file: of a training script and of an evaluation, say.

A run has a name; a file with one baseline that has none is as `text` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gpuprobe.analysis.baseline.model import Baseline, Tolerance
from gpuprobe.analysis.baseline.text import (
    CONFLICT,
    RUNS_SCHEMA,
    RUNS_VERSION,
    baseline_from,
    dumps,
    loads,
    parsed,
    plain_of,
    rendered,
)
from gpuprobe.errors import DataError
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.document import header

UNNAMED: Final = ""
"""The name of the run of a file with one baseline."""

NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""What a run may be called: it stands in reports, on command lines and in names of test cases."""


def dumps_runs(runs: Mapping[str, Baseline]) -> str:
    """The file of these baselines, by the names of their runs."""
    if set(runs) == {UNNAMED}:
        return dumps(runs[UNNAMED])
    plain = {name: plain_of(baseline) for name, baseline in runs.items()}
    return rendered({**header(RUNS_SCHEMA, RUNS_VERSION), "runs": plain})


def loads_runs(text: str, where: str = "the baseline") -> dict[str, Baseline]:
    """Read what `dumps_runs` or `dumps` wrote. Raises DataError for anything else,
    UnsupportedSchema for a newer major version."""
    document, version = parsed(text, where)
    if document["schema"] != RUNS_SCHEMA:
        return {UNNAMED: loads(text, where)}
    runs: dict[str, Any] = from_plain(
        dict[str, Any], document.get("runs"), f"{where} is damaged: runs"
    )
    wrong = next((name for name in runs if not NAME.fullmatch(name)), None)
    if wrong is not None or not runs:
        raise DataError(f"{where} is damaged: runs: {wrong!r:.80} is no name of a run")
    newer = version > RUNS_VERSION
    return {
        name: baseline_from(plain, f"{where}: {name}", newer=newer) for name, plain in runs.items()
    }


def merged_tolerances(text: str) -> dict[str, dict[str, Tolerance]] | None:
    """The tolerances of a file with merge conflicts, by run: of both sides, where they differ of a
    metric the smaller. None where there is no conflict, or a side cannot be read."""
    if not CONFLICT.search(text):
        return None
    found: dict[str, dict[str, Tolerance]] = {}
    for side in (0, 1):
        lines, here = [], 0
        for line in text.splitlines():
            if line.startswith("<<<<<<<"):
                here = 1
            elif line.startswith("|||||||"):
                here = 3  # the common ancestor, in git's diff3 style
            elif line.startswith("=======") and here:
                here = 2
            elif line.startswith(">>>>>>>"):
                here = 0
            elif here in (0, side + 1):
                lines.append(line)
        try:
            runs = loads_runs("\n".join(lines))
        except DataError:
            return None
        for run, baseline in runs.items():
            known = found.setdefault(run, {})
            for name, tolerance in (baseline.tolerances or {}).items():
                other = known.get(name, tolerance)
                known[name] = min(other, tolerance, key=lambda t: (t.relative, t.absolute))
    return found
