"""An explanation: the verdict, each cause with its holder, fix and effect, and what is needed."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.causes import Explanation, RunEnd
from gpuprobe.model.needs import Need
from gpuprobe.model.text import human_bytes
from gpuprobe.reporters.sections.causes import cause_parts
from gpuprobe.reporters.sections.parts import Line, Part, Section, bulleted
from gpuprobe.reporters.sections.report.needs import needs_parts

_FEW = 3


def explain_sections(found: Explanation, *, full: bool = False) -> list[Section]:
    """Verdict, causes, and what the memory is needed for. ``full``: every cause and line."""
    causes = found.causes if full else found.causes[:_FEW]
    parts: list[Part] = []
    for cause in causes:
        parts += cause_parts(cause)
    if found.smaller is not None:
        parts.append(Line(f"try: {found.smaller.text}"))
        parts += [Line(found.smaller.code)] if found.smaller.code else []
        parts.append(Line(f"why: {found.smaller.evidence}; not tried"))
    if len(found.causes) > len(causes):
        parts.append(Line(f"… {len(found.causes) - len(causes)} more: -v shows them"))
    sections = [Section(parts=(Line(_verdict(found), indent=0), *parts), name="verdict")]
    if found.ranks:
        sections.append(Section("Other ranks", tuple(bulleted(found.ranks)), "ranks"))
    # Without a cause, what is known is which lines have the memory, and what uses it.
    needs = needs_parts(found.needs, full=full, needed=not found.causes)
    sections.append(Section("What it is needed for", tuple(needs), "needs"))
    if found.notes:
        sections.append(Section("Not looked at", bulleted(found.notes), "notes"))
    return sections


_MUCH: Final = 8
"""The part of the peak, an eighth, from which memory that is freed late is more than a little."""


def _verdict(found: Explanation) -> str:
    """How much, whether it fits, and how much of it is needed."""
    where = f" in {found.phase}" if found.phase else ""
    step = f", step {found.step}" if found.step is not None else ""
    fits = "fits" if found.allocated <= found.capacity else "does not fit"
    if found.ended is RunEnd.STOPPED:
        fits += f", until it was stopped {found.detail}"
    if found.ended is RunEnd.EPOCH:
        fits += f"; its epoch was ended {found.detail}"
    if found.ended is RunEnd.OUT_OF_MEMORY:
        fits = "it ran out of memory; without a limit it takes this much"
    when = "at the peak"
    if found.failed:
        when, fits = "when an allocation failed", "it ran out of memory"
    head = (
        f"{found.program} on {found.gpu}: {human_bytes(found.allocated)} allocated {when}"
        f"{where}{step}, of {human_bytes(found.capacity)}: {fits}."
    )
    needless = found.needs.bytes_of(*(need for need in Need if need.needless))
    if found.causes:
        return head
    much = _MUCH * needless >= found.needs.total
    late = (
        f"{human_bytes(needless)} are freed {'' if much else 'a little '}later than they could be"
        if needless
        else "nothing is freed later than it could be"
    )
    if found.late_variable:
        late += f", {found.late_variable}"
    if not found.searched:
        return f"{head} No cause was found, and not everything was checked (below); {late}."
    if much:
        most = human_bytes(found.needs.freed_after_use)
        return (
            f"{head} {late[0].upper()}{late[1:]}, but no single cause of it was found: if every "
            f"block were freed after its last use, {most} would be the most. Otherwise, less "
            f"memory takes {found.needs.smaller}."
        )
    return (
        f"{head} All of it is needed by all that was checked ({late}): less memory takes "
        f"{found.needs.smaller}."
    )
