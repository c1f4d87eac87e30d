"""Lines by their text: how a baseline's file names places, so that it stays the same when lines
shift.

A label is ``file in function: text``, with ``#2`` where the file has the same text again. Where the
line lies is found by the digest of its statement in the file's source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuprobe.analysis.blame.source import Source
from gpuprobe.model.io.codec import Malformed
from gpuprobe.model.place import Place, parse_place


@dataclass(frozen=True, slots=True)
class Label:
    """``at``: the digest of the statement, ``/n`` for the n-th that is equal, ``+n`` for a line
    further down in it; "" where the source is not known, and the text is the place itself."""

    text: str
    at: str = ""


def labels_of(keys: Iterable[str], sources: Mapping[str, Source]) -> dict[str, Label]:
    """From places (``file:line in function``) to labels; no two are the same."""
    found: dict[str, Label] = {}
    for key in sorted(set(keys)):
        found[key] = _label(key, sources)
    twice = {text for text, n in Counter(label.text for label in found.values()).items() if n > 1}
    return {
        key: Label(key) if label.text in twice or (label.at and label.text in found) else label
        for key, label in found.items()
    }


def _label(key: str, sources: Mapping[str, Source]) -> Label:
    place = parse_place(key)
    source = sources.get(place.file) if isinstance(place, Place) else None
    if source is None or not isinstance(place, Place) or place.line not in source.by_line:
        return Label(key)
    text = source.lines[place.line - 1].strip() if place.line <= len(source.lines) else ""
    if not text:
        return Label(key)
    statement = source.statements[source.by_line[place.line]]
    equal = [item.start for item in source.statements if item.exact == statement.exact]
    at = statement.exact
    if len(equal) > 1:
        at += f"/{equal.index(statement.start) + 1}"
    if place.line > statement.start:
        at += f"+{place.line - statement.start}"
    same = [number for number, line in enumerate(source.lines, 1) if line.strip() == text]
    if len(same) > 1:
        text += f" #{same.index(place.line) + 1}"
    function = f" in {place.function}" if place.function else ""
    return Label(f"{place.file}{function}: {text}", at)


def place_of(text: str, at: str, sources: Mapping[str, Source]) -> str:
    """The place that a label stands for. Raises Malformed where its statement is not there."""
    if not at:
        return text
    names = [name for name in sources if text.startswith((f"{name} in ", f"{name}: "))]
    digest, _, offset = at.partition("+")
    digest, _, ordinal = digest.partition("/")
    number = int(ordinal or 1) - 1
    if not names or not (offset or "0").isdigit() or number < 0:
        raise Malformed(f"places[{text!r}] is not a file in 'sources'")
    file = max(names, key=len)
    equal = [item.start for item in sources[file].statements if item.exact == digest]
    if number >= len(equal):
        raise Malformed(f"places[{text!r}]: {file} has no statement {at!r}")
    rest = text[len(file) :].removeprefix(" in ")
    function = rest.partition(": ")[0] if not rest.startswith(":") else ""
    return str(Place(file, equal[number] + int(offset or 0), function))
