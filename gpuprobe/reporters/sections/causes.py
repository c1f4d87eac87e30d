"""A cause of memory: its sentence, the fix, and what that saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.model.causes import EDIT_TRIED, Bound, Certainty, Effect, MemoryCause
from gpuprobe.model.place import Place
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.sections.parts import Code, Line, Part


def cause_parts(cause: MemoryCause) -> Iterator[Part]:
    """The cause as an item of a numbered list."""
    yield Line(cause.sentence, "numbered", code=True)
    label, place = cause_line(cause)
    if place and not cause.effect.patch:  # which has the line
        yield Line(place, label=label, indent=5, code=True)
    if cause.remedy:
        yield Line(cause.remedy, label="fix", indent=5)
    if cause.code and not cause.effect.patch:
        yield Code(cause.code)
    yield Line(effect_text(cause.effect), label="saves", indent=5)
    if cause.effect.patch:
        yield Code(cause.effect.patch, indent=0)  # as git apply accepts it


def cause_line(cause: MemoryCause) -> tuple[str, str]:
    """The line to look at, and its label: the one that stores what holds the memory, or else the
    one that allocates it. Empty if the sentence has it, or if it is unknown.
    """
    label, place = ("at", cause.kept_at) if cause.kept_at else ("allocated at", cause.made_at)
    if not isinstance(place, Place) or not place.file:
        return "", ""
    line = f"{place.file}:{place.line}"
    return ("", "") if line in cause.sentence else (label, line)


_BOUNDS: Final = {
    Bound.EXACT: ("", ""),
    Bound.OR_MORE: ("at most ", " or more"),
    Bound.OR_LESS: ("at least ", " or less"),
}


def effect_text(effect: Effect) -> str:
    """What a remedy saves, and how that is known."""
    if isinstance(effect.after, Unavailable):
        return f"not tried: {effect.after.reason}"
    reserved = " reserved" if effect.reserved else ""
    saves, needs = _BOUNDS[effect.bound]
    text = (
        f"{saves}{human_bytes(effect.before - effect.after)}: {human_bytes(effect.after)}{needs} "
        f"instead of {human_bytes(effect.before)}{reserved}"
    )
    untried = "" if effect.note.startswith(EDIT_TRIED) else "not tried; "
    how = {
        Certainty.TRIED: "tried: the changed program was run",
        Certainty.REPLAYED: f"{untried}the trace was replayed {effect.assumed}",
        Certainty.UNTRIED: "not tried",
    }[effect.certainty]
    return f"{text} ({how}{f'; {effect.note}' if effect.note else ''})"
