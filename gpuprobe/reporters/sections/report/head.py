"""The first five lines of a report: verdict, cause, fix, what that saves, and the command for more.

Text, HTML and JSON have the same sentences. What is unknown is named, with the reason.
"""

from __future__ import annotations

import shlex

from gpuprobe.causes.recorded import GROWTH
from gpuprobe.model.causes import MemoryCause
from gpuprobe.model.needs import Need
from gpuprobe.model.report import AT_STEP_END, CategoryTable, Head, OutOfMemory, Report, ShareTable
from gpuprobe.model.text import human_bytes, plural
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.sections.causes import cause_line, effect_text
from gpuprobe.reporters.sections.parts import Facts, Section, capitalized, named, peak_text
from gpuprobe.reporters.sections.report.failures import (
    estimate_command,
    failed_allocation,
    failed_step,
    is_script,
    recorded_gpu,
)

_STATUS = {
    "complete": "complete",
    "failed": "the program failed",
    "incomplete": "incomplete",
    "running": "still running",
    "unfinished": "no end, or not yet",
}

_WIDTH = 7
_WORTH = 0.01
"""The share of the peak from which a cause is that of the peak. Smaller ones may grow."""


def head_section(report: Report) -> Section:
    """The five lines."""
    head = head_of(report)
    rows = [
        ("verdict", head.verdict),
        ("cause", head.cause),
        ("fix", head.fix),
        ("saves", head.saves),
        ("more", head.more),
    ]
    return Section(parts=(Facts(tuple(row for row in rows if row[1]), _WIDTH),), name="head")


def head_of(report: Report) -> Head:
    """The five lines as sentences; an empty one if there is none."""
    cause = main_cause(report)
    if cause is not None:
        code = "" if cause.code in cause.remedy else f": {cause.code}"
        fix = cause.remedy + code
        label, place = cause_line(cause)
        text = f"{cause.sentence} ({label} {place})" if place else cause.sentence
        return Head(_verdict(report), text, fix, effect_text(cause.effect), _more(report))
    text, fix, saves = _without_cause(report)
    return Head(_verdict(report), text, fix, saves, _more(report))


def main_cause(report: Report) -> MemoryCause | None:
    """The cause with the most memory; None if it is unknown, or if there is none that is worth a
    part of the peak.
    """
    if isinstance(report.causes, Unavailable):
        return None
    worth = (one for one in report.causes if one.bytes >= _WORTH * one.effect.before)
    return next(worth, None)


# -- the verdict


def _verdict(report: Report) -> str:
    """How the run ended, and its peak."""
    if failed_allocation(report):
        return _out_of_memory(report)
    text, error = status_text(report), report.recording.error
    if error is not None and not _interrupted(report):
        text += f" ({error.type})"
    failures = len(report.out_of_memory) + report.earlier_failures
    if failures:
        text += (
            f"; {plural(failures, 'allocation')} failed for lack of memory, and the program went on"
        )
    return f"{text}. {_peak(report)}"


def status_text(report: Report) -> str:
    """How the program ended, in words."""
    return "interrupted (Ctrl-C)" if _interrupted(report) else _STATUS[report.recording.status]


def _interrupted(report: Report) -> bool:
    error = report.recording.error
    return error is not None and error.type == KeyboardInterrupt.__name__


def _peak(report: Report) -> str:
    peak = report.peak
    if peak.measure is None:
        return "Nothing was measured: the recording has no steps and no trace"
    what = "resident in the process" if peak.measure == "host_rss" else f"on {peak.device}"
    where = [f"rank {peak.rank}"] if len(report.ranks) > 1 else []
    where += [peak.phase] if peak.phase else []
    where += [f"step {peak.step}"] if peak.step is not None else []
    place = f", in {', '.join(where)}" if where else ""
    return f"Peak {peak_text(peak.amount)} {what}{place}"


def _out_of_memory(report: Report) -> str:
    step = failed_step(report)
    where = "" if step is None else f" in step {step}"
    if not report.out_of_memory:
        return f"out of memory{where}. {_peak(report)}"
    failure = report.out_of_memory[-1]
    return (
        f"out of memory{where}: {human_bytes(failure.asked)} requested at {failure.place}, with "
        f"{human_bytes(failure.allocated)} allocated of the {_could_use(failure)} that torch could "
        "use"
    )


def _could_use(failure: OutOfMemory) -> str:
    if isinstance(failure.could_use, Unavailable):
        return "memory"
    return human_bytes(failure.could_use)


# -- without a cause


def _without_cause(report: Report) -> tuple[str, str, str]:
    """Cause, fix and effect if no memory is known to be there without need."""
    first = report.advice[0] if report.advice else None
    fix = "" if first is None else first.text + (f" {first.code}" if first.code else "")
    saves = "" if first is None else first.saves or "not tried"
    if failed_allocation(report) and report.out_of_memory:
        failure = report.out_of_memory[-1]
        fits = () if isinstance(failure.fits_with, Unavailable) else failure.fits_with
        if fits and not failure.nearly_full:
            best = min(fits, key=lambda text: text.count(","))
            fix = f"PYTORCH_CUDA_ALLOC_CONF={best}"
            saves = (
                "replayed: with this setting no allocation of the trace fails; whether the rest "
                "of the run fits is unknown"
            )
        return f"{failure.sentences[0]} {capitalized(_largest(report))}", fix, saves
    if first is not None and _on_cpu(report):
        return first.evidence, fix, ""
    if isinstance(report.causes, Unavailable):
        return f"unknown ({report.causes.reason}); {_largest(report)}", fix, saves
    needless = 0
    if not isinstance(report.needs, Unavailable):
        needless = report.needs.bytes_of(*(need for need in Need if need.needless))
    why = "all that was traced is needed"
    if needless:
        why = f"{human_bytes(needless)} of the peak are not used again"
    text = f"none found: {why}; {_largest(report)}"
    smaller = "" if isinstance(report.needs, Unavailable) else report.needs.smaller
    return text, fix or smaller, saves or "not tried"


def _on_cpu(report: Report) -> bool:
    """Whether a program that had a simulated GPU did not use it: the advice knows."""
    return any(one.id == "unused-gpu" for one in report.advice)


def _largest(report: Report) -> str:
    """The largest category and line."""
    found = []
    for table in (report.categories, report.top_lines):
        if isinstance(table, (CategoryTable, ShareTable)) and table.rows:
            row = max(table.rows, key=lambda one: one.bytes)
            rest = table.remainder.bytes
            by_name = isinstance(table, CategoryTable) and table.at == AT_STEP_END
            if by_name and not isinstance(rest, Unavailable) and rest > row.bytes:
                found.append(f"{human_bytes(rest)} that no named tensor explains")
            else:
                found.append(f"{named(row.key)} {human_bytes(row.bytes)}")
    return f"the most: {', at '.join(found)}" if found else "its parts are unknown"


# -- more

_EXPLAINED_ON = "h100-80gb"
"""The GPU of ``gpuprobe explain``, by default."""


def _more(report: Report) -> str:
    """The command that shows more."""
    argv = report.session.argv
    alone = is_script(argv) and report.session.world_size == 1
    if alone and not _on_cpu(report):
        if grows_unheld(report):
            return f"{explain_command(report)}   (searches for what holds it)"
        if isinstance(report.causes, Unavailable) and report.session.level != "trace":
            gpu = recorded_gpu(report) if report.session.virtual else "GPU"
            options = [] if gpu == "GPU" else ["--gpu", gpu]
            return shlex.join(["gpuprobe", "run", "--level", "trace", *options, *argv])
        if not isinstance(report.needs, Unavailable):
            caused = main_cause(report) is not None
            does = "finds what holds it, and tries the fix" if caused else "looks closer"
            return f"{explain_command(report)}   ({does})"
    command = estimate_command(report)
    return command or f"gpuprobe report -v {shlex.quote(report.recording.path)}"


def grows_unheld(report: Report) -> bool:
    """Whether the main cause is memory that grows, of which the recording knows no holder, and
    `explain_command` can search for one.
    """
    cause, session = main_cause(report), report.session
    if cause is None or cause.rule != GROWTH or cause.holder is not None or _on_cpu(report):
        return False
    return is_script(session.argv) and session.world_size == 1


def explain_command(report: Report, gpu: str = "") -> str:
    """The command that explains the program on the GPU it was recorded on; ``gpu`` as for
    `estimate_command`.
    """
    gpu = gpu or recorded_gpu(report)
    options = [] if gpu in (_EXPLAINED_ON, "GPU") else ["--gpu", gpu]
    return shlex.join(["gpuprobe", "explain", *options, *report.session.argv])
