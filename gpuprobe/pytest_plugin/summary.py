"""What the measured tests took: shown at the end of the run, saved, and compared with another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from gpuprobe.model.text import human_bytes, human_delta

SCHEMA: Final = "gpuprobe.tests"
VERSION: Final = (1, 0)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
"""

Figures = Mapping[str, Any]
"""Of one test: ``peak_allocated``, ``peak_reserved`` and ``left`` in bytes, and its ``group``."""


def write(terminal: Any, found: Sequence[tuple[str, Figures]]) -> None:
    """The section of the terminal's summary, and the file of ``--gpuprobe-save``."""
    config = terminal.config
    before = _saved(terminal, config.getoption("--gpuprobe-compare"))
    most = config.getoption("--gpuprobe-most")
    if most != 0:
        terminal.section("GPU memory")
        for line in lines(found, most, before):
            terminal.write_line(line)
    path = config.getoption("--gpuprobe-save")
    if path:
        try:
            Path(path).write_text(dumps(found), encoding="utf-8")
        except OSError as error:
            terminal.write_line(f"gpuprobe: cannot write {path}: {error.strerror}", red=True)


def lines(
    found: Sequence[tuple[str, Figures]],
    most: int | None = None,
    before: Mapping[str, Figures] | None = None,
) -> list[str]:
    """One line per test, by group and name, or the ``most`` highest peaks first. ``before``: the
    figures of another run, by test."""
    rows = sorted(found, key=lambda row: (row[1]["group"], row[0]))
    if most is not None:
        rows = sorted(rows, key=lambda row: (-row[1]["peak_allocated"], row[0]))[:most]
        return [_line(nodeid, figures, before) for nodeid, figures in rows]
    texts = []
    for group, members in groupby(rows, key=lambda row: row[1]["group"]):
        texts += [f"{group}:"] if group else []
        texts += [_line(nodeid, figures, before) for nodeid, figures in members]
    return texts


def _line(nodeid: str, figures: Figures, before: Mapping[str, Figures] | None) -> str:
    text = (
        f"peak {human_bytes(figures['peak_allocated']):>10}, "
        f"reserved {human_bytes(figures['peak_reserved']):>10}, "
        f"left {human_bytes(figures['left']):>10}  {nodeid}"
    )
    if before is None:
        return text
    old = before.get(nodeid)
    if old is None:
        return f"{'new':>12}  {text}"
    change = figures["peak_allocated"] - old["peak_allocated"]
    return f"{human_delta(change) if change else 'same':>12}  {text}"


def dumps(found: Sequence[tuple[str, Figures]]) -> str:
    """The figures as JSON: sorted, one test per line."""
    rows = [f"  {json.dumps(nodeid)}: {json.dumps(dict(figures), sort_keys=True)}"
            for nodeid, figures in sorted(found, key=lambda row: row[0])]  # fmt: skip
    head = f'{{\n "schema": "{SCHEMA}",\n "version": {list(VERSION)},\n "tests": {{\n'
    return head + ",\n".join(rows) + "\n }\n}\n"


def _saved(terminal: Any, path: str) -> dict[str, Figures] | None:
    """The tests of a saved file; None where none is named, or it cannot be read: that is told."""
    if not path:
        return None
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA or document["version"][0] != VERSION[0]:
            raise ValueError("it is of another kind, or of a newer version")
        return {
            nodeid: row for nodeid, row in document["tests"].items() if row["peak_allocated"] >= 0
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        terminal.write_line(f"gpuprobe: {path} is not compared with: {error}", red=True)
        return None
