"""Turning lists of frame dictionaries into interned stacks, quickly.

A snapshot has a list of frames per event, and many of these lists are equal. torch shares the
frame dictionaries (and, within one dump, often the lists), and pickle keeps that sharing. So a
list that was seen before is known by its identity, and equal lists of the same dictionaries
are compared by identity of their items, which C does at a nanosecond each.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from gpuprobe.model.trace import StackTable
from gpuprobe.recording.snapshot.oddities import Oddities

_CROWDED = 8
"""So many stacks that look alike at two frames are told apart by a key of all frames."""

_LONG = 2048
"""Frames of a stack that is not compared with others: each comparison of two lists takes as long as
they are, and a file can refer to them at every event. Python stops a recursion at 1,000 frames."""

_SAMPLE = 256
"""So many events tell whether lists are shared. A wrong guess costs time only."""


class StackInterner:
    """Fills a `StackTable`. The dictionaries and lists it was given must stay alive and
    unchanged as long as it is used, since it knows them by identity.
    """

    def __init__(self, table: StackTable, odd: Oddities | None = None) -> None:
        self._table = table
        self._odd = odd or Oddities()
        self._frames: dict[int, int] = {}  # id of a frame's dict -> frame index
        self._lists: dict[int, int] = {}  # id of a list -> stack index
        # What a list looks like at two frames -> pairs (list, stack index).
        self._looks: dict[Any, list[tuple[Any, int]]] = {}
        self._exact: dict[tuple[int, ...], int] = {}

    def one(self, frames: Any) -> int:
        """The stack index of one list of frames."""
        found = self._lists.get(id(frames))
        if found is None:
            found = self._lists[id(frames)] = self._add(frames)
        return found

    def column(self, events: list[Any]) -> array[int] | None:
        """The stack index of every event; None where none has frames. May be called for one
        stretch of the events after the other.
        """
        try:
            return self._column(events, itemgetter("frames"))
        except (KeyError, TypeError):  # TypeError: something that is no list
            if not any(event.get("frames") for event in events):
                return None
            listed = self._odd.frames
            return array("I", [self.one(listed(event.get("frames"))) for event in events])

    def _column(self, events: list[Any], get: Callable[[Any], Any]) -> array[int]:
        some = [id(get(event)) for event in events[:_SAMPLE]]
        if len(set(some)) * 2 <= len(some):
            return array("I", map(self.one, map(get, events)))
        return self._unshared(map(get, events))

    def _unshared(self, lists: Iterable[Any]) -> array[int]:
        """Most events have a list of their own."""
        result: list[int] = []
        append = result.append
        looks, exact = self._looks, self._exact
        find, identity = looks.get, id
        last: Any = None
        index = 0
        for frames in lists:
            count = len(frames)
            if count > _LONG:
                index, last = self.one(frames), None
                append(index)
                continue
            if frames == last:  # both halves of a free have the stack of the first
                append(index)
                continue
            last = frames
            try:
                look = (count, identity(frames[count >> 2]), identity(frames[count >> 1]))
            except IndexError:
                index = self.one(frames)
                append(index)
                continue
            alike = find(look)
            if alike is None:
                index = self._add(frames)
                looks[look] = [(frames, index)]
            elif len(alike) > _CROWDED:
                key = tuple(map(id, frames))
                known = exact.get(key)
                if known is None:
                    known = exact[key] = self._add(frames)
                index = known
            else:
                for seen, index in alike:  # noqa: B007
                    if seen == frames:
                        break
                else:
                    index = self._add(frames)
                    alike.append((frames, index))
            append(index)
        return array("I", result)

    def _add(self, frames: Any) -> int:
        if not isinstance(frames, (list, tuple)):
            frames = self._odd.frames(frames)
        self._odd.stack(len(frames))
        known = self._frames
        ids = []
        for frame in frames:
            index = known.get(id(frame))
            if index is None:
                index = known[id(frame)] = self._odd.index(self._table, frame)
            ids.append(index)
        return self._table.stack(tuple(ids))
