"""Whether a changed program prints what the unchanged one prints.

Programs print figures of their memory, which a remedy changes on purpose, and durations, which
differ from run to run. All other differences mean that the program computes something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import Final


class OutputComparison(str, Enum):
    """How the output of a changed program compares with that of the unchanged one."""

    SAME = "the same output"
    OTHER_MEMORY = "the same output, apart from figures of memory"
    VARYING = "the same output, apart from numbers that differ from run to run"
    DIFFERENT = "other output"


_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\bnan\b)")
_UNCOMPUTED: Final = "nan"
"""What is printed for a value that a simulated GPU did not compute: it computes all for some
seconds, so that a run may stop at another step than the next."""
_TIME: Final = re.compile(r"\s*(?:s|ms|us|µs|ns|sec|secs|seconds?|min|it/s|steps/s)\b")
_UNITS: Final = (1, 1 << 10, 1 << 20, 1 << 30, 10**3, 10**6, 10**9)


def compared(
    original: str, changed: str, memory: Iterable[int], again: str | None = None
) -> OutputComparison:
    """Compare two outputs. ``memory``: the figures in bytes that the changed program has queried;
    ``again``: the output of another run of the unchanged one.
    """
    if original == changed:
        return OutputComparison.SAME
    before, after = _NUMBER.split(original), _NUMBER.split(changed)
    if _words(before) != _words(after):
        return OutputComparison.DIFFERENT
    repeated = _NUMBER.split(again) if again is not None else []
    if len(repeated) != len(before):
        repeated = before
    labels = _labels(original)
    varying = {
        label
        for label, one, other in zip(labels, before[1::2], repeated[1::2], strict=True)
        if one != other or one == _UNCOMPUTED
    }
    figures = tuple(dict.fromkeys(memory))
    found = OutputComparison.SAME
    for at in range(1, len(before), 2):
        if before[at] == after[at]:
            continue
        if _is_memory(after[at], figures):
            found = found if found is OutputComparison.VARYING else OutputComparison.OTHER_MEMORY
        elif labels[at // 2] in varying or _TIME.match(after[at + 1]):
            found = OutputComparison.VARYING
        else:
            return OutputComparison.DIFFERENT
    return found


def _labels(text: str) -> list[tuple[tuple[str, ...], int]]:
    """What each number is: its place in lines of the same words. A duration that two runs print
    alike in one line, rounded to 0.000, differs in another.
    """
    found = []
    for line in text.split("\n"):
        parts = _NUMBER.split(line)
        words = tuple(" ".join(part.split()) for part in parts[::2])
        found += [(words, number) for number in range(len(parts) // 2)]
    return found


def _words(parts: list[str]) -> list[list[str]]:
    """The text between the numbers, without the white space that aligns them."""
    return [part.split() for part in parts[::2]]


def _is_memory(number: str, figures: Iterable[int]) -> bool:
    """Whether a printed number is one of these figures, in a usual unit, rounded or truncated."""
    if number == _UNCOMPUTED:
        return False
    mantissa = re.split(r"[eE]", number)[0]
    digits = len(mantissa.partition(".")[2])
    step = 10.0**-digits
    if mantissa != number:
        step *= 10.0 ** int(re.split(r"[eE]", number)[1])
    value = float(number)
    return any(
        -0.5001 * step <= figure / unit - value < step * 1.0001
        for figure in figures
        for unit in _UNITS
    )
