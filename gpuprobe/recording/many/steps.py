"""Steps of a large recording: their figures in columns, the rest read when it is used."""

from __future__ import annotations

import json
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias, overload

from gpuprobe.errors import DataError
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.files import open_regular
from gpuprobe.model.run.columns import INDEX, TRACED, StepColumns
from gpuprobe.model.run.launches import check_launches
from gpuprobe.model.run.session import Step
from gpuprobe.model.text import plural
from gpuprobe.recording.many.shapes import Shape, Shapes
from gpuprobe.recording.stream import StreamParser, once_named

KEPT_STEPS: Final = 4096
"""Steps that are kept after they were decoded, of all ranks; each takes 10 KB."""

Kept: TypeAlias = OrderedDict[tuple[object, int], Step]
"""Decoded steps of a recording, by the sequence that they belong to and their row in it."""


def _replaced(name: str) -> DataError:
    return DataError(
        f"{name} was changed while it was read", hint="run the command again when it is complete"
    )


class LazySteps(Sequence[Step]):
    """The steps of a rank in order of their index, decoded from the stream when they are used.

    An index raises DataError if the stream is not what it was when its columns were read.
    """

    def __init__(
        self,
        name: str,
        columns: StepColumns,
        starts: Sequence[int],
        lengths: Sequence[int],
        read: Callable[[int, int], bytes],
        traces: dict[int, tuple[str, ...]],
        kept: Kept,
    ) -> None:
        self._name = name  # of the stream
        self.columns = columns
        self._starts = starts
        self._lengths = lengths
        self._read = read
        self._traces = traces  # by row, where a step's names of traces are not those of its line
        self._kept = kept
        self._token = object()  # of these steps among the kept ones

    def __len__(self) -> int:
        return self.columns.rows

    @overload
    def __getitem__(self, row: int) -> Step: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, row: int | slice) -> Step | tuple[Step, ...]:
        if isinstance(row, slice):
            return tuple(self._step(at) for at in range(*row.indices(len(self))))
        at = row + len(self) if row < 0 else row
        if not 0 <= at < len(self):
            raise IndexError("step index out of range")
        return self._step(at)

    def __iter__(self) -> Iterator[Step]:
        return (self._step(at) for at in range(len(self)))

    def __repr__(self) -> str:
        return f"<{plural(len(self), 'step')}>"

    def _step(self, row: int) -> Step:
        key = (self._token, row)
        step = self._kept.get(key)
        if step is None:
            step = self._decoded(row)
            self._kept[key] = step
            if len(self._kept) > KEPT_STEPS:
                self._kept.popitem(last=False)
        return step

    def _decoded(self, row: int) -> Step:
        try:
            plain = json.loads(self._read(self._starts[row], self._lengths[row]))
            if row in self._traces:
                plain["traces"] = list(self._traces[row])
            step = from_plain(Step, plain)
            check_launches(step.launches)
        except (DataError, ValueError, TypeError, RecursionError) as error:
            raise _replaced(self._name) from error
        if step.index != self.columns.number(*INDEX)[row]:
            raise _replaced(self._name)
        return step


class ColumnParser(StreamParser):
    """A `StreamParser` that keeps the columns of steps, and where their lines are."""

    def __init__(
        self, name: str, shapes: Shapes, kept: Kept, read: Callable[[int, int], bytes]
    ) -> None:
        """``read`` returns bytes of the stream, by offset and length."""
        super().__init__(name)
        self._read = read
        self._shapes = shapes
        self._kept_steps = kept
        self._columns = StepColumns()
        self._starts = array("q")
        self._lengths = array("q")
        self._at = 0  # offset of the next line
        self._line = b""  # that is being taken
        self._traces: dict[int, tuple[str, ...]] = {}
        self._shape: Shape | None = None
        self._of: set[Shape] = set()  # whose devices are among this rank's

    def _take_lines(self, lines: list[bytes]) -> None:
        shape = self._shape
        rows: list[tuple[bytes, ...]] = []
        for line in lines:
            length = len(line)
            matched = None if shape is None else shape.match(line)
            if matched is not None:
                rows.append(matched.groups())
            else:
                self._flush(shape, rows)
                rows = []
                found = self._shapes.find(line) if line.startswith(b'{"type":"step"') else None
                if found is not None:
                    shape = self._entered(found[0])
                if found is None or shape is None:
                    super()._take_lines([line])
                    self._at += length + 1
                    continue
                rows.append(found[1])
            self._starts.append(self._at)
            self._lengths.append(length)
            self._at += length + 1
        self._flush(shape, rows)
        self._shape = shape

    def _entered(self, shape: Shape) -> Shape | None:
        """The shape, unless its devices would be too many for this rank."""
        if shape not in self._of:
            try:
                self._add_devices(shape.windows)
            except DataError:
                return None
            self._of.add(shape)
        return shape

    def _flush(self, shape: Shape | None, rows: list[tuple[bytes, ...]]) -> None:
        if shape is not None and rows:
            shape.append(self._columns, rows)

    def _pass_over(self, length: int) -> None:
        self._at += length

    def _take_line(self, line: bytes) -> None:
        self._line = line
        super()._take_line(line)

    def _take_step(self, plain: dict[str, object]) -> None:
        step = self._checked_step(plain)
        if step.traces:
            self._traces[self._columns.rows] = step.traces
        self._columns.append(step)
        self._starts.append(self._at)
        self._lengths.append(len(self._line))
        self._shapes.learn(self._line, step)

    def _sequence(self) -> tuple[Sequence[Step], int]:
        index = self._columns.number(*INDEX)
        columns, starts, lengths, traces = self._columns, self._starts, self._lengths, self._traces
        if any(one >= two for one, two in pairwise(index)):
            # Steps that were written again, or out of order: the last of an index counts.
            last = {number: row for row, number in enumerate(index)}
            rows = [last[number] for number in sorted(last)]
            columns = columns.chosen(rows)
            starts = array("q", map(starts.__getitem__, rows))
            lengths = array("q", map(lengths.__getitem__, rows))
            traces = {at: traces[row] for at, row in enumerate(rows) if row in traces}
        fresh, repeated = once_named(traces)
        for row, names in fresh.items():
            if not names:
                columns.mark(*TRACED)[row] = 0
        steps = LazySteps(self.name, columns, starts, lengths, self._read, fresh, self._kept_steps)
        return steps, repeated


def read_at(path: Path, start: int, length: int) -> bytes:
    """Bytes of a stream's file. Raises DataError where it cannot be read."""
    try:
        with open_regular(path, inside=True) as file:
            file.seek(start, os.SEEK_SET)
            return file.read(length)
    except OSError as error:
        raise DataError(
            f"cannot read the recording {path.parent}: {error.strerror or error}"
        ) from error
