"""A baseline as text that people review: sorted, one row per line, units beside every number,
without times and absolute paths."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from gpuprobe.analysis.baseline.model import METRICS, PEAK, Baseline, Tolerance
from gpuprobe.analysis.compare.accounts import Account, LineShare
from gpuprobe.analysis.peak.high_water import Share
from gpuprobe.errors import DataError
from gpuprobe.model.document import check_version, header
from gpuprobe.model.text import human_bytes

__all__ = ["SCHEMA", "VERSION", "dumps", "loads"]

SCHEMA: Final = "gpuprobe.baseline"
VERSION: Final = (2, 0)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 1.1: ``accounts``, ``places`` and ``stopped_after``; ``tolerance`` holds what was chosen, not the
  defaults too. What a line calls is in ``places``, once.
* 2.0: ``gpuprobe``, the version that wrote it. 1.x is still read.
"""

_HINT: Final = "delete it, and gpuprobe baseline update writes a new one"
_BEGIN: Final = '{\n "a'  # accounts, or at_peak: the first key


def dumps(baseline: Baseline) -> str:
    """The baseline as reviewable JSON, ASCII only."""
    peak = baseline.accounts.get(PEAK, Account(0))
    document: dict[str, Any] = {
        **header(SCHEMA, VERSION),
        "environment": dict(baseline.environment),
        "steps": baseline.steps,
        "metrics": {
            name: _size(value) if METRICS[name][0] == "bytes" else {"count": value}
            for name, value in baseline.metrics.items()
        },
        "tolerance": {
            name: {"relative": tolerance.relative, "absolute": tolerance.absolute}
            for name, tolerance in (baseline.tolerances or {}).items()
        },
        "phases": {name: _size(value) for name, value in baseline.phases.items()},
        "at_peak": {
            "categories": _of_shares(peak.categories),
            "modules": _of_shares(peak.modules),
            "lines": _of_lines(peak),
        },
        "accounts": _of_accounts(baseline.accounts),
        "places": {
            line.key: {"calls": line.calls}
            for account in baseline.accounts.values()
            for line in account.lines
            if line.calls
        },
    }
    if baseline.stopped_after is not None:
        document["stopped_after"] = baseline.stopped_after
    return "".join(_rendered(document)) + "\n"


def _size(value: int) -> dict[str, Any]:
    return {"bytes": value, "text": human_bytes(value)}


def _of_shares(rows: Iterable[Share[str]]) -> dict[str, Any]:
    return {row.key: {**_size(row.bytes), "blocks": row.blocks} for row in rows}


def _of_lines(account: Account) -> dict[str, Any]:
    if account.unit == "count":
        return {line.key: {"count": line.bytes} for line in account.lines}
    return {
        line.key: {
            **_size(line.bytes),
            "blocks": line.blocks,
            **_of_categories(line),
            **({"until": line.until} if line.until else {}),
        }
        for line in account.lines
    }


def _of_categories(line: LineShare) -> dict[str, Any]:
    """One category, or as a row of several: ``activation 1024, temporary 512``."""
    if not line.categories or line.categories == (("unknown", line.bytes),):
        return {}
    if len(line.categories) == 1:
        return {"category": line.category}
    return {"category": ", ".join(f"{name} {size}" for name, size in line.categories)}


def _categories(text: str, size: int) -> tuple[tuple[str, int], ...]:
    """What `_of_categories` wrote."""
    if not text:
        return (("unknown", size),)
    if " " not in text:
        return ((text, size),)
    pairs = (part.rpartition(" ") for part in text.split(", "))
    return tuple((name, int(number)) for name, _, number in pairs)


def _of_accounts(accounts: Mapping[str, Account]) -> dict[str, Any]:
    """All but the peak's; one that is the same as an earlier one only says so."""
    found: dict[str, Any] = {}
    seen: list[tuple[str, dict[str, Any]]] = []
    if PEAK in accounts:
        seen.append((PEAK, _of_lines(accounts[PEAK])))
    for name in sorted(accounts):
        account = accounts[name]
        if name == PEAK:
            continue
        rows = _of_lines(account)
        same = next((other for other, lines in seen if lines and lines == rows), None)
        total = {"count": account.total} if account.unit == "count" else _size(account.total)
        if same is not None:
            found[name] = {"total": total, "same_as": same}
        else:
            found[name] = {"total": total, "lines": rows}
            seen.append((name, rows))
    return found


def _rendered(value: Any, depth: int = 0) -> Iterator[str]:
    """JSON with sorted keys, in which an object of plain values is one line."""
    if not isinstance(value, dict) or not any(isinstance(v, dict) for v in value.values()):
        yield json.dumps(value, sort_keys=True, ensure_ascii=True)
        return
    pad = " " * (depth + 1)
    yield "{"
    for index, key in enumerate(sorted(value)):
        yield f"{',' if index else ''}\n{pad}{json.dumps(key, ensure_ascii=True)}: "
        yield from _rendered(value[key], depth + 1)
    yield f"\n{' ' * depth}}}"


# -- and back


def loads(text: str, where: str = "the baseline") -> Baseline:
    """Read what `dumps` wrote. Raises DataError for anything else, UnsupportedSchema for a
    newer major version."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise _none(where)
        version = check_version(document, VERSION, where, hint=_HINT)
        return _baseline(document, where, newer=version > VERSION)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        if not _may_be_one(text):
            raise _none(where) from None
        raise DataError(
            f"{where} is damaged: {type(error).__name__}: {error}",
            hint=_HINT,
        ) from error


def _none(where: str) -> DataError:
    return DataError(
        f"{where} is not a gpuprobe baseline",
        hint="name another file: gpuprobe baseline update writes one",
    )


def _may_be_one(text: str) -> bool:
    """Whether this is, or begins as, what `dumps` writes. Nobody is told to delete anything else:
    it may be a source file."""
    return SCHEMA in text or text.startswith(_BEGIN) or _BEGIN.startswith(text)


def _baseline(document: Mapping[str, Any], where: str, *, newer: bool) -> Baseline:
    tolerances = {
        str(name): Tolerance(_share(row.get("relative", 0)), _whole(row.get("absolute", 0)))
        for name, row in document.get("tolerance", {}).items()
    }
    for name in tolerances:
        if name not in METRICS and not newer:
            near = difflib.get_close_matches(name, METRICS, n=1)
            raise DataError(
                f"{where} has a tolerance for an unknown metric {name!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(METRICS)}",
            )
    stopped = document.get("stopped_after")
    return Baseline(
        environment={str(k): str(v) for k, v in document["environment"].items()},
        steps=_whole(document["steps"]),
        metrics={
            str(name): _whole(row["bytes"] if "bytes" in row else row["count"])
            for name, row in document["metrics"].items()
            if name in METRICS
        },
        phases={str(name): _whole(row["bytes"]) for name, row in document["phases"].items()},
        accounts=_accounts(document),
        tolerances={name: value for name, value in tolerances.items() if name in METRICS},
        stopped_after=None if stopped is None else _whole(stopped),
    )


def _accounts(document: Mapping[str, Any]) -> dict[str, Account]:
    at_peak = document["at_peak"]
    places = {
        str(key): str(row["calls"]) for key, row in document.get("places", {}).items()
    } or {  # version 1.0
        str(key): " ".join(str(name) for name in row["calls"])
        for key, row in at_peak["lines"].items()
        if "calls" in row
    }
    found: dict[str, Account] = {}
    if any(at_peak[by] for by in ("lines", "categories", "modules")):
        lines = _lines(at_peak["lines"], places)
        found[PEAK] = Account(
            sum(line.bytes for line in lines),
            lines,
            _shares(at_peak["categories"]),
            _shares(at_peak["modules"]),
        )
    rest = document.get("accounts", {})
    for name in sorted(rest, key=lambda name: ("same_as" in rest[name], name)):
        row = rest[name]
        unit = "count" if "count" in row["total"] else "bytes"
        total = _signed(row["total"][unit])
        if "same_as" in row:
            lines = found[row["same_as"]].lines
        else:
            lines = _lines(row["lines"], places)
        found[str(name)] = Account(total, lines, unit=unit)
    return found


def _lines(rows: Mapping[str, Any], places: Mapping[str, str]) -> tuple[LineShare, ...]:
    found = []
    for key, row in rows.items():
        if "count" in row:
            count = _signed(row["count"])
            found.append(LineShare(str(key), count, count, calls=places.get(key, "")))
            continue
        size, blocks = _signed(row["bytes"]), _signed(row["blocks"])
        categories = _categories(str(row.get("category", "")), size)
        until = str(row.get("until", ""))
        found.append(LineShare(str(key), size, blocks, categories, until, places.get(key, "")))
    return tuple(sorted(found, key=lambda line: (-line.bytes, line.key)))


def _whole(value: Any) -> int:
    """Sizes, counts and steps are whole numbers from 0: JSON, and those who edit it, know others.
    Raises ValueError for them."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"expected a whole number from 0, found {value!r:.40}")
    return value


def _signed(value: Any) -> int:
    """As `_whole`; growth, and what no trace explains, may be below 0."""
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return -_whole(-value)
    return _whole(value)


def _share(value: Any) -> float:
    """A share of 1, from 0. Raises ValueError; NaN is none, and no limit is beyond it."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e6:
        raise ValueError(f"expected a share such as 0.02, found {value!r:.40}")
    return float(value)


def _shares(rows: Mapping[str, Any]) -> tuple[Share[str], ...]:
    found = [
        Share(str(key), _signed(row["bytes"]), _signed(row["blocks"])) for key, row in rows.items()
    ]
    return tuple(sorted(found, key=lambda share: (-share.bytes, share.key)))
