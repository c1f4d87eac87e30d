"""The edits to try for a cause: where in the program its remedy belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.run.holders import Holder
from gpuprobe.remedies.edits import (
    DeleteAfterUse,
    Detach,
    Edit,
    InsertCall,
    MapLocationCpu,
    ToCpu,
    Where,
    apply,
)
from gpuprobe.remedies.text import ProgramText, Refused

_MOST = 3


class EditCandidate(NamedTuple):
    """An edit of the file ``path``."""

    path: str
    edit: Edit


def files_of(group: HeldGroup, script: str) -> list[str]:
    """The files of the program in which a remedy may belong, the likeliest first."""
    places = [group.main.made_at, group.main.last_use]
    found = [place.file for place in places if isinstance(place, Place)]
    holder = "" if group.holder is None else group.holder.file
    return [name for name in dict.fromkeys([holder, *found, script]) if name.endswith(".py")]


def candidates(
    answer: Answer, group: HeldGroup, path: str, text: ProgramText
) -> list[EditCandidate]:
    """The edits of a file that apply, at most three."""
    found = []
    for edit in _edits(answer.edit, group, path, text):
        if not isinstance(apply(text, [edit]), Refused):
            found.append(EditCandidate(path, edit))
        if len(found) == _MOST:
            break
    return found


def _edits(kind: EditKind, group: HeldGroup, path: str, text: ProgramText) -> Iterator[Edit]:
    made, used = (_line_in(place, path) for place in (group.main.made_at, group.main.last_use))
    if kind in (EditKind.DETACH, EditKind.TO_CPU):
        for line in _lines_with(text, _stored_name(group.holder)):
            yield Detach(line) if kind is EditKind.DETACH else ToCpu(line, detach=True)
    elif kind is EditKind.DELETE and group.holder is not None and group.holder.path:
        name = group.holder.path[0].label
        for line in dict.fromkeys([used, made]):
            if line:
                yield DeleteAfterUse(line, name)
    elif kind is EditKind.MAP_LOCATION and made:
        yield MapLocationCpu(made)
    elif kind is EditKind.COLLECT and made:
        yield InsertCall(made, "gc.collect()", Where.END_OF_LOOP)


def _line_in(place: Place | NoPlace | None, path: str) -> int:
    return place.line if isinstance(place, Place) and place.file == path else 0


def _stored_name(holder: Holder | None) -> str:
    """The last name of a path: ``sum`` of ``meter.sum.grad_fn``."""
    labels = [] if holder is None else [step.label for step in holder.path]
    names = [re.fullmatch(r"\.?([A-Za-z_]\w*)", label) for label in labels]
    known = [name[1] for name in names if name and name[1] not in ("grad_fn", "grad", "saved")]
    return known[-1] if known else ""


def _lines_with(text: ProgramText, name: str) -> Iterator[int]:
    """The lines with a name, in order; the edit itself finds whether they store something."""
    if name:
        word = re.compile(rf"\b{re.escape(name)}\b")
        lines = text.data.decode("utf-8", "replace").splitlines()
        yield from (number for number, line in enumerate(lines, 1) if word.search(line))
