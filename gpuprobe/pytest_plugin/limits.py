"""The limits of a test, from its marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gpuprobe.errors import ConfigError

if TYPE_CHECKING:
    import pytest

    from gpuprobe.analysis.baseline.model import Tolerance

__all__ = ["Limits", "limits_of", "size_of"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes; None: no limit. ``regression``: the accepted increase over the baseline, by
    metric, that of the predicted time as well. ``group``: the test's heading in the summary.
    """

    max_peak: int | None = None
    max_reserved: int | None = None
    regression: Mapping[str, Tolerance] | None = None
    max_syncs: int | None = None
    no_hazards: bool = False
    leaks: bool = True
    group: str = ""


_NAMES = (*(field.name for field in fields(Limits)), "step_time")


def size_of(value: object) -> int:
    """``"2 GiB"``, ``"512MB"`` or a number of bytes. Raises ConfigError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
        if isinstance(value, str)
        else None
    )
    if match is None:
        raise ConfigError(f"expected a size such as '2 GiB', found {value!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def limits_of(item: pytest.Item) -> Limits:
    """The limits of all of a test's marks, including those of its class and module. The nearest
    mark takes precedence.

    Raises ConfigError, naming the test, for an unknown or invalid limit.
    """
    given: dict[str, object] = {}
    try:
        for mark in item.iter_markers("gpu_memory"):  # the nearest is first
            unknown = set(mark.kwargs) - set(_NAMES)
            if unknown or mark.args:
                raise ConfigError(
                    f"unknown limit {', '.join(sorted(unknown)) or 'without a name'}",
                    hint=f"there are: {', '.join(_NAMES)}",
                )
            given = {**mark.kwargs, **given}
        return Limits(
            max_peak=_size(given, "max_peak"),
            max_reserved=_size(given, "max_reserved"),
            regression=_regression(given.get("regression"), given.get("step_time")),
            max_syncs=_count(given.get("max_syncs")),
            no_hazards=_flag(given, "no_hazards", False),
            leaks=_flag(given, "leaks", True),
            group=_group(given.get("group", "")),
        )
    except ConfigError as error:
        raise ConfigError(f"{item.nodeid}: gpu_memory: {error}", hint=error.hint) from None


def _size(given: Mapping[str, object], name: str) -> int | None:
    value = given.get(name)
    return None if value is None else size_of(value)


def _regression(memory: object, time: object) -> dict[str, Tolerance] | None:
    if memory is None and time is None:
        return None
    from dataclasses import replace

    from gpuprobe.analysis.baseline.model import METRICS
    from gpuprobe.gate.plan import tolerances

    timed = {} if time is None else tolerances([f"step_time={time}"])
    if memory is None:
        return timed
    found = tolerances([f"{name}={memory}" for name in ("peak_allocated", "peak_reserved")]) | timed
    # Reserved memory changes in whole segments: a small share of a small test is less than one.
    segment = METRICS["peak_reserved"][1].absolute
    reserved = found["peak_reserved"]
    found["peak_reserved"] = replace(reserved, absolute=max(reserved.absolute, segment))
    return found


def _count(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ConfigError(f"max_syncs must be a whole number from 0, found {value!r}")


def _flag(given: Mapping[str, object], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{name} must be True or False, found {value!r}")


def _group(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ConfigError(f"group must be text, found {value!r}")
