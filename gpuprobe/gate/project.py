"""The settings of a check in a project's ``pyproject.toml``: ``[tool.gpuprobe]``.

::

    [tool.gpuprobe]
    gpu = "h100-80gb"             # the simulated GPU to run on
    run = "-m shop.train --fast"  # a script or a module, and its arguments
    steps = 6                     # stop it after so many optimizer steps
    baseline = "memory.json"      # relative to this file
    hazards = true                # also count races and implicit synchronisations
    compute = "shapes"            # on a simulated GPU: sizes alone, without the arithmetic

    [tool.gpuprobe.tolerance]
    peak_allocated = "2%"
    peak_reserved = "2%, 64 MiB"  # the larger of the two
    implicit_syncs_per_step = 1

Several runs have names; a setting that a run lacks is taken from the table above::

    [tool.gpuprobe.runs.train]
    run = "-m shop.train --fast"
    steps = 6

    [tool.gpuprobe.runs.evaluate]
    run = "evaluate.py"

All keys are optional. An unknown key is an error: a misspelt tolerance that is silently ignored
would be worse than none.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from gpuprobe.errors import ConfigError
from gpuprobe.model.io.codec import Malformed, closed, from_plain, unknown_key
from gpuprobe.model.io.files import read_text
from gpuprobe.model.values import Bounds, Parsed

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline.model import Tolerance

KEYS: Final = (
    "baseline",
    "compute",
    "gpu",
    "hazards",
    "run",
    "runs",
    "steps",
    "tolerance",
)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
_NAME = "pyproject.toml"

_MOST_SHARE = 1e6
_MOST_AMOUNT = 1 << 62
"""The largest accepted amount; a baseline has the same limits."""


@dataclass(frozen=True, slots=True)
class ProjectSettings:
    """The settings in a project's file; None for those that it lacks.

    ``path`` is the file, None if there is none with a ``[tool.gpuprobe]`` table. ``baseline`` is an
    absolute path. ``runs``: the settings of each named run, completed by those of the project.
    """

    path: Path | None = None
    gpu: str | None = None
    run: tuple[str, ...] | None = None
    steps: int | None = None
    baseline: Path | None = None
    hazards: bool | None = None
    compute: str | None = None
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    runs: Mapping[str, ProjectSettings] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The project's folder, "" without a file."""
        return "" if self.path is None else str(self.path.parent)


def read_project(start: str | os.PathLike[str] = ".") -> ProjectSettings:
    """The settings in the nearest ``pyproject.toml``, in the folder ``start`` or above it.

    Raises ConfigError for a file that cannot be read, an unknown key or an invalid value; on Python
    3.10, which has no TOML reader, also if ``tomli`` is not installed and the file has a
    ``[tool.gpuprobe]`` table.
    """
    here = Path(start).resolve()
    for folder in (here, *here.parents):
        path = folder / _NAME
        if path.is_file():
            return _read(path)
    return ProjectSettings()


def _read(path: Path) -> ProjectSettings:
    shown = os.path.relpath(path)
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read {shown}: {reason}") from error
    if not re.search(r"gpuprobe", text):
        return ProjectSettings()  # most projects: skip the parser
    document = _parse(text, shown)
    tool = document.get("tool")
    table = tool.get("gpuprobe") if isinstance(tool, dict) else None
    if table is None:
        return ProjectSettings()
    settings = from_plain(_ProjectTable, table, f"{shown}: [tool.gpuprobe]", ConfigError)
    common = _settings(settings, path, f"{shown}: [tool.gpuprobe.tolerance]")
    return replace(common, runs=_runs(settings, common, shown))


def _settings(table: _RunTable, path: Path, where: str) -> ProjectSettings:
    return ProjectSettings(
        path=path,
        gpu=table.gpu,
        run=table.run,
        steps=table.steps,
        baseline=None if table.baseline is None else path.parent / table.baseline,
        hazards=table.hazards,
        compute=table.compute,
        tolerances=_tolerances(table.tolerance, where),
    )


def _runs(table: _ProjectTable, common: ProjectSettings, shown: str) -> dict[str, ProjectSettings]:
    """The settings of each run, completed by the ``common`` ones."""
    from gpuprobe.analysis.baseline.text import NAME

    if table.runs and table.run is not None:
        raise ConfigError(
            f"{shown}: [tool.gpuprobe]: run and runs exclude each other",
            hint="make it a run with a name, too: [tool.gpuprobe.runs.NAME]",
        )
    found = {}
    for name, row in table.runs.items():
        where = f"{shown}: [tool.gpuprobe.runs.{name:.80}]"
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{shown}: [tool.gpuprobe.runs]: {name!r:.80} is no name of a run",
                hint="use letters, digits, '_', '-' and '.', at most 64",
            )
        if row.run is None:
            raise ConfigError(f"{where}: run is missing", hint='such as run = "train.py"')
        assert common.path is not None
        own = _settings(row, common.path, f"{where[:-1]}.tolerance]")
        both = {
            item.name: getattr(common, item.name)
            for item in fields(own)
            if getattr(own, item.name) is None
        }
        found[name] = replace(own, **both, tolerances={**common.tolerances, **own.tolerances})
    return found


def _parse(text: str, shown: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib as reader  # 5 ms, only if the file has settings for gpuprobe
    else:
        try:
            import tomli as reader
        except ImportError:
            raise ConfigError(
                f"{shown} has settings for gpuprobe, but Python 3.10 cannot read TOML",
                hint="pip install tomli, or use Python 3.11 or later",
            ) from None
    try:
        return reader.loads(text)
    except (reader.TOMLDecodeError, ValueError) as error:  # ValueError: a number of 5,000 digits
        raise ConfigError(f"{shown} is not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{shown} is not valid TOML: it is nested too deeply") from None


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("expected a non-empty string")
    if "\0" in value:
        raise ValueError(f"expected text without null bytes, found {value!r:.80}")
    return value


def _command(value: str | list[str]) -> tuple[str, ...]:
    try:
        words = shlex.split(value) if isinstance(value, str) else list(value)
    except ValueError as error:
        raise Malformed(f"{error}: {value!r:.80}") from None
    if any("\0" in word for word in words):
        raise Malformed(f"expected text without null bytes, found {value!r:.80}")
    if words[:1] == ["python"]:
        words = words[1:]
    if not words or words == ["-m"]:
        raise Malformed(
            f"it contains nothing to run: {value!r:.80}",
            hint='such as "train.py" or "-m package.train --fast"',
        )
    return tuple(words)


def _compute(value: str) -> str:
    if value not in ("auto", "real", "shapes"):
        raise Malformed(f"expected auto, real or shapes, found {value!r:.80}")
    return value


_Text = Annotated[str, Parsed(str, _text)]


@closed
@dataclass(frozen=True)
class _RunTable:
    """The table of a run in the file."""

    gpu: _Text | None = None
    run: Annotated[tuple[str, ...], Parsed(str | list[str], _command)] | None = None
    steps: Annotated[int, Bounds(1)] | None = None
    baseline: _Text | None = None
    hazards: bool | None = None
    compute: Annotated[str, Parsed(str, _compute)] | None = None
    tolerance: dict[str, Any] = field(default_factory=dict)


@closed
@dataclass(frozen=True)
class _ProjectTable(_RunTable):
    """The table ``[tool.gpuprobe]`` in the file."""

    runs: dict[str, _RunTable] = field(default_factory=dict)


def _tolerances(table: Mapping[str, Any], where: str) -> dict[str, Tolerance]:
    from gpuprobe.analysis.baseline.model import METRICS

    for name in table:
        if name not in METRICS:
            problem = unknown_key(name, METRICS)
            raise ConfigError(f"{where}: {problem}", hint=problem.hint)
    return {name: tolerance_of(name, value, where) for name, value in table.items()}


def tolerance_of(name: str, value: object, where: str = "") -> Tolerance:
    """The tolerance of a metric: ``"2%"``, ``"64 MiB"``, both (``"2%, 64MiB"``: the larger counts),
    a number of bytes or of times, or ``{relative = 0.02, absolute = "64 MiB"}``.

    Raises ConfigError for an invalid amount.
    """
    from gpuprobe.analysis.baseline.model import Tolerance

    found = _amount(value)
    if found is None:
        prefix = f"{where}: " if where else ""
        raise ConfigError(
            f"{prefix}expected an amount such as 2% or 64MiB for {name}, found {value!r:.80}"
        )
    return Tolerance(*found)


def _amount(value: object) -> tuple[float, int] | None:
    """(share, amount); None for an invalid value."""
    if isinstance(value, dict):
        share = value.get("relative", 0)
        rest = _amount(value.get("absolute", 0))
        if isinstance(share, str) and (match := _SHARE.fullmatch(share)):
            share = float(match[1]) / 100
        good = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not good or not 0 <= share <= _MOST_SHARE:
            return None
        if rest is None or rest[0] or set(value) - {"relative", "absolute"}:
            return None
        return float(share), rest[1]
    if isinstance(value, int) and not isinstance(value, bool):
        return (0.0, value) if 0 <= value <= _MOST_AMOUNT else None
    if not isinstance(value, str):
        return None
    relative, absolute = 0.0, 0
    for part in value.split(","):
        if match := _SHARE.fullmatch(part):
            relative = float(match[1]) / 100
        elif match := _SIZE.fullmatch(part):
            amount = float(match[1]) * _UNITS[match[2].upper()]
            if amount > _MOST_AMOUNT:
                return None
            absolute = int(amount)
        else:
            return None
    return (relative, absolute) if relative <= _MOST_SHARE else None
