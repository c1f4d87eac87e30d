"""The memory of measured tests: shown after the run, saved, and compared with a saved run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from gpuprobe.errors import DataError
from gpuprobe.model.text import human_bytes, human_delta, visible
from gpuprobe.model.values import MOST_BYTES, Bounds

if TYPE_CHECKING:
    import pytest

SCHEMA: Final = "gpuprobe.tests"
VERSION: Final = (1, 0)
"""(major, minor); a minor version only adds keys."""

Figures = Mapping[str, Any]
"""A test's ``peak_allocated``, ``peak_reserved`` and ``left`` in bytes, and its ``group``."""


def write(terminal: pytest.TerminalReporter, found: Sequence[tuple[str, Figures]]) -> None:
    """Write the section of the terminal's summary, and the file of ``--gpuprobe-save``."""
    config = terminal.config
    before = saved(terminal, config.getoption("--gpuprobe-compare"))
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
    figures of another run, by test.
    """
    rows = sorted(found, key=lambda row: (row[1]["group"], row[0]))
    if most is not None:
        rows = sorted(rows, key=lambda row: (-row[1]["peak_allocated"], row[0]))[:most]
        return [_line(nodeid, figures, before) for nodeid, figures in rows]
    texts = []
    for group, members in groupby(rows, key=lambda row: row[1]["group"]):
        texts += [f"{visible(group)}:"] if group else []
        texts += [_line(nodeid, figures, before) for nodeid, figures in members]
    return texts


def _line(nodeid: str, figures: Figures, before: Mapping[str, Figures] | None) -> str:
    text = (
        f"peak {human_bytes(figures['peak_allocated']):>10}, "
        f"reserved {human_bytes(figures['peak_reserved']):>10}, "
        f"left {human_bytes(figures['left']):>10}  {visible(nodeid)}"
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


@dataclass(frozen=True)
class _Row:
    """The figures of a test that are compared."""

    peak_allocated: Annotated[int, Bounds(0, MOST_BYTES)]


@dataclass(frozen=True)
class _Saved:
    tests: dict[str, _Row]


def saved(terminal: pytest.TerminalReporter, path: str) -> dict[str, Figures] | None:
    """The peaks of a saved file's tests; None without a ``path``, and, after a message, if the file
    cannot be read.
    """
    if not path:
        return None
    from gpuprobe.model.io.codec import from_plain  # 4 ms, if results are compared
    from gpuprobe.model.io.document import check_version
    from gpuprobe.model.io.files import read_text

    try:
        document = json.loads(read_text(path))
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise DataError("it is no file of --gpuprobe-save")
        check_version(document, VERSION, "it")
        rows = from_plain(_Saved, document, "it is damaged").tests
        return {nodeid: {"peak_allocated": row.peak_allocated} for nodeid, row in rows.items()}
    except (OSError, ValueError, RecursionError, DataError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        terminal.write_line(
            f"gpuprobe: {visible(path)} cannot be compared with: {visible(reason)}", red=True
        )
        return None
