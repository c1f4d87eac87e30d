"""A diagnosis as text: what is wrong first, then what is well, then what nobody looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.machine.diagnosis import Diagnosis, NotChecked, RankDiagnosis
from gpuprobe.model.text import human_bytes, human_ns
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.terminal import Style

__all__ = ["render", "render_ranks", "write", "write_ranks"]

_PLURALS = {Level.ERROR: "errors", Level.WARNING: "warnings", Level.NOTE: "notes"}


def write(diagnosis: Diagnosis, stream: TextIO) -> None:
    """Write the diagnosis of a machine to ``stream``."""
    stream.write("\n".join(render(diagnosis, Style.of(stream))) + "\n")


def write_ranks(diagnosis: RankDiagnosis, stream: TextIO) -> None:
    """Write the diagnosis of a distributed job to ``stream``."""
    stream.write("\n".join(render_ranks(diagnosis, Style.of(stream))) + "\n")


def render(diagnosis: Diagnosis, style: Style) -> Iterator[str]:
    """The lines of the report on a machine."""
    parts = [
        f"driver {_or_none(diagnosis.driver)}",
        *([] if diagnosis.demo else [f"torch {_or_none(diagnosis.torch)}"]),
        "no GPUs" if isinstance(diagnosis.devices, Unavailable) else _gpus(diagnosis.devices),
    ]
    if diagnosis.demo:
        parts.insert(0, f"demo fleet {diagnosis.demo}")
    yield from style.wrapped(f"{_summary(diagnosis.findings)} ({', '.join(parts)})")
    yield from _findings(diagnosis.findings, style)
    if diagnosis.passed:
        yield ""
        listing = "; ".join(_within(info.title) for info in diagnosis.passed)
        yield from style.wrapped(f"Passed ({len(diagnosis.passed)}): {listing}.", rest="  ")
    yield from _not_checked(diagnosis.not_checked, style)


def _or_none(value: str | Unavailable) -> str:
    return "none" if isinstance(value, Unavailable) else value


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _within(title: str) -> str:
    """A title in the middle of a sentence: "No GPU" is "no GPU", but "PCIe" stays."""
    return title[0].lower() + title[1:] if title[1:2].islower() or title[1] == " " else title


def _summary(findings: Sequence[Finding]) -> str:
    counts = []
    for level in Level:
        count = sum(finding.level is level for finding in findings)
        if count:
            counts.append(f"{count} {level.value if count == 1 else _PLURALS[level]}")
    return ", ".join(counts) or "Nothing found"


def _findings(findings: Sequence[Finding], style: Style) -> Iterator[str]:
    for finding in findings:
        yield ""
        lines = list(
            style.wrapped(
                finding.message, first=f"{finding.level.value} {finding.rule}: ", rest="  "
            )
        )
        yield style.heading(lines[0])
        yield from lines[1:]
        for name, value in finding.evidence:
            yield from style.wrapped(f"{name}: {value}", first="  ", rest="    ")
        if finding.fix is not None:
            yield from style.wrapped(finding.fix.text, first="  fix: ", rest="       ")
            if finding.fix.code:  # a command: never wrapped, so that it can be copied
                yield f"       {style.text(finding.fix.code)}"


def _not_checked(entries: Sequence[NotChecked], style: Style) -> Iterator[str]:
    if not entries:
        return
    yield ""
    yield style.heading(f"Not checked ({len(entries)}):")
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        by_reason.setdefault(entry.reason, []).append(f"{entry.rule.id} {entry.rule.kind}")
    for reason, rules in by_reason.items():
        yield from style.wrapped(f"{reason}: {', '.join(rules)}", first="  ", rest="    ")


def render_ranks(diagnosis: RankDiagnosis, style: Style) -> Iterator[str]:
    """The lines of the report on a distributed job."""
    expected = diagnosis.world_size
    number = "an unknown number of" if isinstance(expected, Unavailable) else str(expected)
    backend = "" if isinstance(diagnosis.backend, Unavailable) else f", {diagnosis.backend}"
    yield from style.wrapped(
        f"{_summary(diagnosis.findings)} ({len(diagnosis.joined)} of {number} ranks{backend})"
    )
    yield from _findings(diagnosis.findings, style)
    if diagnosis.steps:
        yield ""
        listing = "; ".join(diagnosis.steps)
        yield from style.wrapped(f"Passed ({len(diagnosis.steps)}): {listing}.", rest="  ")
    if diagnosis.joined:
        skews = {skew.rank: skew for skew in diagnosis.skews}
        yield ""
        yield style.heading("rank  local  clock ahead of rank 0   host and device")
        for place in diagnosis.joined:
            skew = skews.get(place.rank)
            clock = "-"
            if skew is not None:
                sign = "-" if skew.ahead_ns < 0 else ""
                clock = f"{sign}{human_ns(abs(skew.ahead_ns))} ± {human_ns(skew.error_ns)}"
            clock = style.text(clock if style.unicode else clock.replace("±", "+-"))
            where = f"{style.text(place.host)} {style.text(place.device)}"
            yield f"{place.rank:>4}  {place.local_rank:>5}  {clock:<22}  {where}"
    if diagnosis.speeds:
        yield ""
        yield style.heading("all-reduce  latency     bus bandwidth")
        for speed in diagnosis.speeds:
            rate = f"{human_bytes(int(speed.bus_bandwidth))}/s"
            latency = style.text(human_ns(speed.latency_ns))
            yield f"{human_bytes(speed.size):<10}  {latency:<10}  {rate}"
    yield from _not_checked(diagnosis.not_checked, style)
