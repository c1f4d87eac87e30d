"""The sections on allocations that failed, and what a run needs that ended so."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence

from gpuprobe.errors import ConfigError
from gpuprobe.model.report import OutOfMemory, Report
from gpuprobe.model.text import human_bytes, plural
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.sections.parts import (
    Code,
    Facts,
    Line,
    Part,
    Section,
    amount,
    items,
)

_ESTIMATED_STEPS = 3
"""The steps of an estimate, by default."""


def failure_sections(report: Report, *, full: bool) -> list[Section]:
    """Why allocations failed; of many, the last ones, as a program may retry."""
    ended = failed_allocation(report)
    shown = report.out_of_memory[-(3 if full else 2 if ended else 1) :]
    parts: list[Part] = []
    several = len(report.ranks) > 1
    for failure in shown:
        if several or len(report.devices) > 1:
            of = f" of rank {failure.rank}" if several else ""
            parts.append(Line(f"On {failure.device}{of}:", "item"))
        if not full and (_has_cause(report) or not ended):
            # Another layout of the same memory would only fail later.
            parts.append(Line(_failed_allocation(failure), "item"))
            continue
        parts += items(failure.sentences)
        if full:
            parts.append(Facts(tuple(_figures(failure))))
    others = len(report.out_of_memory) - len(shown) + report.earlier_failures
    if others:
        parts.append(Line(f"Not shown: {plural(others, 'earlier failure')}", "item"))
    if ended and any(isinstance(failure.fits_with, Unavailable) for failure in shown):
        text = "Allocator settings with which this allocation fits: gpuprobe replay --search"
        parts.append(Line(text, "item"))
    why = _no_account(report)
    if why:
        parts.append(Line(f"unknown: {why}"))
    command = estimate_command(report)
    if command:
        parts.append(Line(estimate_reason(report), "item"))
        parts.append(Code(f"$ {command}"))
    if not parts:
        return []
    title = "Why it ran out of memory" if ended else "Allocations that failed, and were caught"
    return [Section(title, tuple(parts), "out-of-memory", "Out of memory")]


def _has_cause(report: Report) -> bool:
    return not isinstance(report.causes, Unavailable) and bool(report.causes)


def failed_allocation(report: Report) -> bool:
    """Whether the last thing that is known of the program is that its memory ran out. A snapshot
    does not show whether the program continued.
    """
    snapshot = report.recording.kind == "snapshot" and bool(report.out_of_memory)
    return ended_out_of_memory(report) or snapshot


def ended_out_of_memory(report: Report) -> bool:
    """Whether the program failed for lack of GPU memory. One that caught the error continued."""
    error = report.recording.error
    return error is not None and error.out_of_memory


def failed_step(report: Report) -> int | None:
    """The index of the step in which the program failed; None if it did not, or in none."""
    error = report.recording.error
    last = None if error is None else report.steps.rows.last_of(error.rank)
    return None if last is None else last.step.index


def estimate_reason(report: Report) -> str:
    """What `estimate_command` is for, as the line above it."""
    if _has_cause(report):
        return "Whether it still grows after a change, and whether it fits then:"
    return "What the whole run needs, and what would make it fit:"


def estimate_command(report: Report, gpu: str = "") -> str:
    """The command that measures what a run needs that ended out of memory: the recording only has
    the part before that. "" for another run, or if the start of its program is unknown. ``gpu`` is
    the name of the GPU in the catalogue, by default that of the recorded one.
    """
    argv, world_size = report.session.argv, report.session.world_size
    if not ended_out_of_memory(report) or not is_script(argv):
        return ""
    gpu = gpu or recorded_gpu(report)
    ranks = [f"--ranks={world_size}"] if world_size > 1 else []
    separator = ["--"] if argv[1:] else []
    last = failed_step(report)
    reached = 0 if last is None else last + 1
    steps = [f"--steps={reached}"] if reached > _ESTIMATED_STEPS else []  # as far as the run came
    options = ["--gpu", gpu, *steps, *ranks]
    return shlex.join(["gpuprobe", "estimate", *options, argv[0], *separator, *argv[1:]])


def is_script(argv: Sequence[str]) -> bool:
    """Whether a command line is that of a script, and not of a notebook's kernel."""
    return bool(argv) and argv[0].endswith(".py") and not argv[0].endswith("kernel_launcher.py")


def recorded_gpu(report: Report) -> str:
    """The GPU with the highest peak by its name in the catalogue, or all that a process had, as
    ``2xt4``: those that were simulated, or else those up to the last that it used. A placeholder if
    one is unknown.
    """
    from gpuprobe.catalogue.file import all_models, by_key, key_of  # reads a file

    try:
        known = by_key(all_models())
    except ConfigError:  # in a catalogue of the user
        return "GPU"
    names = []
    for index in _gpus_to_simulate(report):
        model = known.get(key_of(report.gpus[index])) if index < len(report.gpus) else None
        if model is None:
            return "GPU"
        names.append(model.name)
    groups = [(name, len([*same])) for name, same in itertools.groupby(names)]
    return ",".join(f"{n}x{name}" if n > 1 else name for name, n in groups) or "GPU"


def _gpus_to_simulate(report: Report) -> range:
    """The indices of `recorded_gpu`."""
    if (peak := _cuda_index(report.peak.device)) is None:
        return range(0)
    if report.session.world_size > 1:  # each rank gets one
        return range(peak, peak + 1)
    used = [index for row in report.devices if (index := _cuda_index(row.device)) is not None]
    if report.session.virtual:
        return range(len(report.gpus))
    return range(max(used, default=peak) + 1)


def _cuda_index(device: str | None) -> int | None:
    kind, _, index = (device or "").partition(":")
    return int(index) if kind == "cuda" and index.isdecimal() else None


def _failed_allocation(failure: OutOfMemory) -> str:
    request = f"{human_bytes(failure.asked)} at {failure.place}"
    return (
        f"The allocation that failed: {request}, with {human_bytes(failure.allocated)} allocated."
    )


def _figures(failure: OutOfMemory) -> Iterator[tuple[str, str]]:
    yield "line", str(failure.place)
    for label, value in (
        ("requested", failure.asked),
        ("needed from the driver", failure.needed),
        ("free on the device", failure.device_free),
        ("torch could use", failure.could_use),
        ("allocated", failure.allocated),
        ("reserved", failure.reserved),
        ("largest hole", failure.largest_hole),
        ("largest usable hole", failure.usable_hole),
        ("in private pools", failure.private_pools),
    ):
        yield label, amount(value)
    yield "limit of the program's own", "yes" if failure.limited else "no"
    if not isinstance(failure.fits_with, Unavailable):
        yield "fits with", "; ".join(failure.fits_with) or "no other setting"


def _no_account(report: Report) -> str:
    """Why an out-of-memory error of the run was not recorded; "" if it was, or without one."""
    error = report.recording.error
    if error is None or not error.out_of_memory or report.out_of_memory:
        return ""
    if report.session.level != "trace":
        return "needs a recording at level trace: gpuprobe run --level trace"
    step = failed_step(report) or 0
    return f"the failure was not traced; gpuprobe run --trace-steps {step} (or all) traces its step"
