"""A baseline of a training run's memory, and what changed since.

A baseline is a small JSON text that people review in pull requests: sorted, with units beside
every number, without times and absolute paths. It keeps what a check compares (metrics with
their tolerances) and the account of the peak (categories, modules, lines), so that a check can
say what grew; each part of that account sums to the peak.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from gpuprobe.analysis.diff import DiffRow, join_rows, line_infos
from gpuprobe.analysis.frames import UserFrame, is_user_frame
from gpuprobe.analysis.highwater import HighWater, Share, by_category, by_line, by_module
from gpuprobe.analysis.matching import LineInfo, match_lines, match_modules
from gpuprobe.analysis.peaks import PeakSite, device_peaks, high_water_at
from gpuprobe.errors import DataError, UnsupportedSchema
from gpuprobe.model.recording import Recording
from gpuprobe.model.session import DeviceWindow, Step
from gpuprobe.model.text import human_bytes, human_delta
from gpuprobe.model.values import Unavailable

__all__ = [
    "METRICS",
    "SCHEMA",
    "VERSION",
    "Baseline",
    "CheckResult",
    "MetricResult",
    "Setting",
    "Tolerance",
    "baseline_of",
    "check_baseline",
    "dumps",
    "loads",
]

SCHEMA: Final = "gpuprobe.baseline"
VERSION: Final = (1, 1)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 1.1: ``stopped_after``; ``tolerance`` holds what was chosen, not the defaults too.
"""

_WARM_UP: Final = 2  # steps: optimizer state is born in the first, caches settle by the second


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much more than the baseline is accepted: the larger of a share and an amount."""

    relative: float = 0.0
    absolute: int = 0

    def limit(self, value: int) -> int:
        """The largest accepted value."""
        return value + max(int(value * self.relative), self.absolute)

    def text(self, unit: str) -> str:
        """In words: ``2%``, ``64.0 MiB``, ``2% or 64.0 MiB``, ``nothing``."""
        parts = [f"{self.relative * 100:g}%"] if self.relative else []
        if self.absolute:
            parts.append(human_bytes(self.absolute) if unit == "bytes" else str(self.absolute))
        return " or ".join(parts) or "nothing"


METRICS: Final[dict[str, tuple[str, Tolerance]]] = {
    "peak_allocated": ("bytes", Tolerance(relative=0.01)),
    "peak_reserved": ("bytes", Tolerance(relative=0.02, absolute=2 << 20)),
    "steady_allocated": ("bytes", Tolerance(relative=0.01)),
    "growth_per_step": ("bytes", Tolerance(absolute=1024)),
    "device_allocs_after_warm_up": ("count", Tolerance()),
    "implicit_syncs_per_step": ("count", Tolerance()),
    "races": ("count", Tolerance()),
}
"""What is compared, in which unit, and what is accepted where nothing else is said. Reserved
memory moves in segments of 2 MiB and more."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """``metrics``: name to value, bytes or counts; ``at_peak``: categories and modules to
    bytes; ``lines`` the user's lines at the peak, with file names relative to the project.
    ``phases``: peak allocated of each phase, over all steps. ``stopped_after``: the optimizer
    steps that the program was ended after, None where it ran to its end.
    """

    environment: Mapping[str, str]
    steps: int
    metrics: Mapping[str, int]
    phases: Mapping[str, int]
    categories: tuple[Share, ...] = ()
    modules: tuple[Share, ...] = ()
    lines: tuple[Share, ...] = ()
    infos: tuple[LineInfo, ...] = ()
    tolerances: Mapping[str, Tolerance] | None = None
    stopped_after: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """Something a check was told: in words, and by whom (``command line``, ``baseline``,
    ``pyproject.toml``, ``default``)."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of a check. ``limit`` is the largest accepted value; ``accepted`` the tolerance
    in words, and ``source`` where that comes from."""

    name: str
    unit: str
    before: int
    after: int
    limit: int
    accepted: str = ""
    source: str = "default"

    @property
    def regressed(self) -> bool:
        return self.after > self.limit

    @property
    def delta(self) -> int:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found. ``rows``: by ``category``, ``module`` and ``line``, each summing to
    the change of the peak; None where a side has no trace. ``cause``: the first thing to look
    at, in words. ``mismatches``: how the environments differ; such a check is not passed.
    """

    metrics: tuple[MetricResult, ...]
    phases: tuple[MetricResult, ...]
    rows: Mapping[str, tuple[DiffRow, ...]] | None
    cause: str
    mismatches: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()

    @property
    def regressions(self) -> tuple[MetricResult, ...]:
        return tuple(metric for metric in self.metrics if metric.regressed)

    @property
    def ok(self) -> bool:
        return not self.regressions and not self.mismatches


def baseline_of(
    recording: Recording,
    *,
    device: str = "",
    syncs: int | None = None,
    races: int | None = None,
    root: str = "",
    is_user: UserFrame = is_user_frame,
) -> Baseline:
    """The baseline that a recording stands for. ``device`` names the GPU in words; ``syncs``
    and ``races`` are counts of the whole run, where hazards were looked for; ``root`` is the
    project's folder, default the program's working directory.

    Raises DataError for a recording without full steps or without device memory.
    """
    sites = [site for site in device_peaks(recording) if not isinstance(site.amount, Unavailable)]
    if not sites:
        raise DataError("the recording has no allocated memory in it: nothing to check")
    site = max(sites, key=lambda found: found.amount.at_least)  # type: ignore[union-attr]
    steps = [step for step in site.rank.steps if step.ended_by != "end"]
    if not steps:
        raise DataError("the recording has no full training step in it")
    root = root or site.rank.session.cwd
    mark = high_water_at(site)
    environment = site.rank.environment
    torch = "" if isinstance(environment.torch, Unavailable) else environment.torch
    found = Baseline(
        environment={
            "allocator": environment.allocator_conf,
            "device": device or site.device.partition(":")[0],
            "level": site.rank.session.level,
            "torch": ".".join(torch.partition("+")[0].split(".")[:2]),
        },
        steps=len(steps),
        metrics=_metrics(site, steps, syncs, races),
        phases=_phases(site, steps),
    )
    if not isinstance(mark, HighWater):
        return found
    lines = [replace(s, key=_relative(s.key, root)) for s in by_line(mark, is_user)]
    infos = [
        replace(info, key=_relative(info.key, root), file=_relative(info.file, root))
        for info in line_infos(mark, is_user)
    ]
    return replace(
        found,
        categories=tuple(by_category(mark)),
        modules=tuple(by_module(mark)),
        lines=tuple(lines),
        infos=tuple(infos),
    )


def _relative(name: str, root: str) -> str:
    """A path below the project without the project's folder; others keep their last parts."""
    name = name.replace("\\", "/")
    folder = root.replace("\\", "/").rstrip("/") + "/"
    if len(folder) > 1 and name.startswith(folder):
        return name[len(folder) :]
    if name.startswith("/"):
        return posixpath.join("...", *name.strip("/").split("/")[-2:])
    return name


def _window(step: Step, device: str) -> DeviceWindow | None:
    return next((window for window in step.windows if window.device == device), None)


def _metrics(
    site: PeakSite, steps: list[Step], syncs: int | None, races: int | None
) -> dict[str, int]:
    found: dict[str, int] = {}
    assert not isinstance(site.amount, Unavailable)
    found["peak_allocated"] = site.amount.at_least
    if not isinstance(site.reserved, Unavailable):
        found["peak_reserved"] = site.reserved.at_least
    windows = [window for step in steps if (window := _window(step, site.device)) is not None]
    ends = [window.end.allocated for window in windows]
    known = [int(end) for end in ends if not isinstance(end, Unavailable)]
    if known:
        found["steady_allocated"] = known[-1]
    settled = known[_WARM_UP:]
    if len(settled) > 1:
        # Every step's growth: one that frees now and then does not hide one that leaks.
        changes = sorted(two - one for one, two in pairwise(settled))
        found["growth_per_step"] = max(0, changes[len(changes) // 2])
    counts = [window.activity for window in windows[_WARM_UP:]]
    allocs = [item.device_allocs for item in counts if not isinstance(item, Unavailable)]
    if allocs:
        found["device_allocs_after_warm_up"] = sum(allocs)
    if syncs is not None:
        found["implicit_syncs_per_step"] = -(-syncs // len(steps))
    if races is not None:
        found["races"] = races
    return found


def _phases(site: PeakSite, steps: list[Step]) -> dict[str, int]:
    found: dict[str, int] = {}
    for step in steps:
        for phase in step.phases:
            for window in phase.windows:
                peak = window.peak_allocated
                if window.device == site.device and not isinstance(peak, Unavailable):
                    found[phase.path] = max(found.get(phase.path, 0), peak.at_least)
    return found


# -- comparing


def check_baseline(
    before: Baseline,
    after: Baseline,
    tolerances: Mapping[str, Tolerance] | None = None,
    sources: Mapping[str, str] | None = None,
) -> CheckResult:
    """Compare a run with its baseline. Tolerances: the call's, else the baseline's, else those
    of `METRICS`. ``sources``: in words, where the call's come from."""
    chosen = {**(before.tolerances or {}), **(tolerances or {})}
    told = {
        **dict.fromkeys(before.tolerances or {}, "baseline"),
        **dict.fromkeys(tolerances or {}, "call"),
        **(sources or {}),
    }
    metrics = []
    cautions = []
    for name, (unit, default) in METRICS.items():
        if name not in before.metrics:
            continue
        if name not in after.metrics:
            cautions.append(f"{name} is in the baseline, and was not measured now")
            continue
        one, two = before.metrics[name], after.metrics[name]
        tolerance = chosen.get(name, default)
        source = told.get(name, "default")
        metrics.append(
            MetricResult(name, unit, one, two, tolerance.limit(one), tolerance.text(unit), source)
        )
    peak = chosen.get("peak_allocated", METRICS["peak_allocated"][1])
    phases = tuple(
        MetricResult(name, "bytes", size, after.phases[name], peak.limit(size))
        for name, size in sorted(before.phases.items())
        if name in after.phases
    )
    mismatches = tuple(
        f"{key}: {before.environment.get(key, '')!r} in the baseline, "
        f"{after.environment.get(key, '')!r} now"
        for key in ("device", "torch", "allocator")
        if before.environment.get(key, "") != after.environment.get(key, "")
    )
    rows = _rows(before, after) if before.categories and after.categories else None
    if rows is None:
        cautions.append("no trace on one side: what grew is not known (use level trace)")
    return CheckResult(
        metrics=tuple(metrics),
        phases=phases,
        rows=rows,
        cause=_cause(rows),
        mismatches=mismatches,
        cautions=tuple(cautions),
    )


def _rows(before: Baseline, after: Baseline) -> dict[str, tuple[DiffRow, ...]]:
    lines = match_lines(before.infos, after.infos)
    for share in before.lines:
        lines.setdefault(share.key, share.key)
    named = [
        {share.key: share.bytes for share in side if not share.key.startswith("(")}
        for side in (before.modules, after.modules)
    ]
    same = {share.key: share.key for share in before.modules}
    return {
        "category": join_rows(
            before.categories, after.categories, {s.key: s.key for s in before.categories}
        ),
        "module": join_rows(before.modules, after.modules, same | match_modules(*named)),
        "line": join_rows(before.lines, after.lines, lines),
    }


def _cause(rows: Mapping[str, tuple[DiffRow, ...]] | None) -> str:
    """The line that grew most, with the category and the module that grew most."""
    if rows is None:
        return ""
    grown = {
        by: [row for row in found if row.delta > 0 and not row.key.startswith("(")]
        for by, found in rows.items()
    }
    if not grown["line"]:
        return ""
    line = grown["line"][0]
    text = f"{human_delta(line.delta)} at {line.key}"
    if grown["category"]:
        text += f": {grown['category'][0].key}"
    if line.blocks_after != line.blocks_before:
        count = line.blocks_after - line.blocks_before
        text += f"; {abs(count)} {'more' if count > 0 else 'fewer'} blocks"
    return text


# -- as text


def dumps(baseline: Baseline) -> str:
    """The baseline as reviewable JSON: sorted keys, one row per line, units beside bytes."""

    def size(value: int) -> dict[str, Any]:
        return {"bytes": value, "text": human_bytes(value)}

    def shares(rows: Iterable[Share]) -> dict[str, Any]:
        return {row.key: {**size(row.bytes), "blocks": row.blocks} for row in rows}

    shapes = {info.key: info for info in baseline.infos}
    document = {
        "schema": SCHEMA,
        "version": list(VERSION),
        "environment": dict(baseline.environment),
        "steps": baseline.steps,
        **({} if baseline.stopped_after is None else {"stopped_after": baseline.stopped_after}),
        "metrics": {
            name: size(value) if METRICS[name][0] == "bytes" else {"count": value}
            for name, value in baseline.metrics.items()
        },
        "tolerance": {
            name: {"relative": tolerance.relative, "absolute": tolerance.absolute}
            for name, tolerance in (baseline.tolerances or {}).items()
        },
        "phases": {name: size(value) for name, value in baseline.phases.items()},
        "at_peak": {
            "categories": shares(baseline.categories),
            "modules": shares(baseline.modules),
            "lines": {
                share.key: {
                    **size(share.bytes),
                    "blocks": share.blocks,
                    **(
                        {
                            "file": shapes[share.key].file,
                            "line": shapes[share.key].line,
                            "function": shapes[share.key].function,
                            "calls": list(shapes[share.key].shape),
                        }
                        if share.key in shapes
                        else {}
                    ),
                }
                for share in baseline.lines
            },
        },
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


def loads(text: str, where: str = "the baseline") -> Baseline:
    """Read what `dumps` wrote. Raises DataError for anything else, UnsupportedSchema for a
    newer major version."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise DataError(
                f"{where} is not a gpuprobe baseline",
                hint="name another file: gpuprobe baseline update writes one",
            )
        major = _whole(document["version"][0])
        if major > VERSION[0]:
            raise UnsupportedSchema(
                f"{where} was written by a newer gpuprobe (baseline version {major})",
                hint="upgrade gpuprobe",
            )
        at_peak = document["at_peak"]
        infos = tuple(
            LineInfo(
                key,
                str(row["file"]),
                _whole(row["line"]),
                str(row["function"]),
                tuple(str(name) for name in row["calls"]),
                _whole(row["bytes"]),
            )
            for key, row in at_peak["lines"].items()
            if "file" in row
        )
        return Baseline(
            environment={str(k): str(v) for k, v in document["environment"].items()},
            steps=_whole(document["steps"]),
            metrics={
                str(name): _whole(row["bytes"] if "bytes" in row else row["count"])
                for name, row in document["metrics"].items()
                if name in METRICS
            },
            phases={str(name): _whole(row["bytes"]) for name, row in document["phases"].items()},
            categories=_shares(at_peak["categories"]),
            modules=_shares(at_peak["modules"]),
            lines=_shares(at_peak["lines"]),
            infos=infos,
            tolerances={
                str(name): Tolerance(_share(row.get("relative", 0)), _whole(row.get("absolute", 0)))
                for name, row in document.get("tolerance", {}).items()
            },
            stopped_after=_count(document.get("stopped_after")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DataError(
            f"{where} is damaged: {type(error).__name__}: {error}",
            hint="delete it, and gpuprobe baseline update writes a new one",
        ) from error


def _count(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _whole(value: Any) -> int:
    """Sizes, counts and lines are whole numbers from 0: JSON, and those who edit it, know others.
    Raises ValueError for them."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"expected a whole number from 0, found {value!r:.40}")
    return value


def _share(value: Any) -> float:
    """A share of 1, from 0. Raises ValueError; NaN is none, and no limit is beyond it."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e6:
        raise ValueError(f"expected a share such as 0.02, found {value!r:.40}")
    return float(value)


def _shares(rows: Mapping[str, Any]) -> tuple[Share, ...]:
    found = [
        Share(str(key), _whole(row["bytes"]), _whole(row["blocks"])) for key, row in rows.items()
    ]
    return tuple(sorted(found, key=lambda share: (-share.bytes, share.key)))
