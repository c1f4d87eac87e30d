"""The traces of a snapshot, received from the process that reads it
(`gpuprobe.recording.snapshot.worker`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from array import array
from typing import IO, Any

from gpuprobe.analysis.trace.ledger import prepare
from gpuprobe.analysis.trace.lifetimes import Lifetimes
from gpuprobe.errors import DataError, InternalError, SnapshotError
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.memory import Block, BlockState, Segment, TraceAction
from gpuprobe.model.trace import (
    COLUMNS,
    AllocatorSettings,
    Annotation,
    EventColumns,
    Frame,
    MemoryTrace,
    StackTable,
)
from gpuprobe.recording.snapshot.child import start_reading
from gpuprobe.recording.snapshot.worker import MAGIC, RECORD, decode_stream
from gpuprobe.torch_support.snapshots import Decoded, add_baseline

_INDICES = frozenset(("action", "stack", "module", "phase", "pool"))


def read_in_child(stream: IO[bytes], size: int) -> Decoded:
    """Read and decode in a child process. ``stream`` is a real file at its start.

    Raises what `answer_of` raises, and InternalError where the child could not be run.
    """
    if not sys.executable:  # an embedded interpreter: there is no program to start
        return decode_stream(stream, size)
    return answer_of(start_reading(stream, size))


def answer_of(child: subprocess.Popen[bytes]) -> Decoded:
    """The traces that a child of `start_reading` sends.

    Raises SnapshotError if the file is invalid, or exceeded the child's limits; InternalError if
    the child failed otherwise.
    """
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        try:
            with gc_paused():
                answer = receive(child.stdout)
        except EOFError:
            talk = child.stderr.read(10_000).decode("utf-8", "replace").strip()
            raise _ended(child.wait(), talk) from None
        except BaseException:
            child.kill()
            child.wait()
            raise
    # The result is complete. Releasing the memory of a large snapshot takes the system a tenth of
    # a second, which nothing here has to wait for.
    threading.Thread(target=child.wait, name="gpuprobe-reaper", daemon=True).start()
    if isinstance(answer, SnapshotError):
        raise answer
    return answer


def _ended(code: int, talk: str) -> SnapshotError | InternalError:
    """The error if a child ended before its answer was complete."""
    if code < 0 or "MemoryError" in talk:
        return SnapshotError(
            "reading the file crashed or exceeded its limits: torch did not write it",
            hint="do not unpickle this file",
        )
    last = talk.splitlines()[-1] if talk else f"exit code {code}"
    return InternalError(f"the process that reads snapshots failed: {last}")


def receive(stream: IO[bytes]) -> Decoded | SnapshotError:
    """Read what the child wrote. Raises EOFError where it ends early, InternalError for
    anything that it does not write.
    """
    arrived: dict[str, _Arrived] = {}
    try:
        if _exactly(stream, len(MAGIC)) != MAGIC:
            raise ValueError("it has no valid start")
        while True:
            length, device, _, count = RECORD.unpack(_exactly(stream, RECORD.size))
            name = _exactly(stream, length).decode()
            if name not in ("layout", "rest"):
                arrived.setdefault(f"cuda:{device}", _Arrived()).take(name, stream, count)
                continue
            plain = json.loads(_exactly(stream, count))
            if name == "rest":
                break
            arrived.setdefault(plain["device"], _Arrived()).account(plain)
        if stream.read(1):
            raise ValueError("it has no valid end")
        if "error" in plain:
            return SnapshotError(str(plain["error"]), hint=str(plain["hint"]))
        traces = [arrived[entry["device"]].whole(entry) for entry in plain["traces"]]
        return Decoded(traces, _counts(plain["foreign"]), _counts(plain["irregular"]))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, DataError) as error:
        raise InternalError(
            f"the process that reads snapshots returned invalid data: {error}"
        ) from error


class _Arrived:
    """The part of a trace that has been received."""

    def __init__(self) -> None:
        self._events = EventColumns()
        self._most: dict[str, int] = {}  # of the columns that are indices of something
        self._ends = Lifetimes(self._events)
        self._trace: MemoryTrace | None = None

    def take(self, name: str, stream: IO[bytes], count: int) -> None:
        """Read the next part of a column. Raises KeyError for an unknown column, ValueError for one
        of the wrong length.
        """
        values = array(COLUMNS[name])
        values.fromfile(stream, count)
        getattr(self._events, name).extend(values)
        if name in _INDICES and values:
            self._most[name] = max(self._most.get(name, 0), max(values))
        if name == "size":  # the last of the columns that lifetimes of blocks need
            rows = len(self._events)
            if not rows == len(self._events.address) == len(self._events.size):
                raise ValueError("columns of several lengths")
            self._ends.extend()

    def account(self, plain: dict[str, Any]) -> None:
        """Compute the accounts of the trace, before its stacks have been received."""
        if self._trace is not None:
            raise ValueError("a second layout")
        settings = plain["settings"]
        self._trace = trace = MemoryTrace(
            device=plain["device"],
            events=self._events,
            lifetimes=self._ends,
            pools=[(low, high) for low, high in plain["pools"]],
            segments=tuple(_segment(entry) for entry in plain["segments"]),
            settings=None if settings is None else from_plain(AllocatorSettings, settings),
        )
        self._check(action=len(TraceAction), pool=len(trace.pools))
        add_baseline(trace)
        prepare(trace)

    def whole(self, plain: dict[str, Any]) -> MemoryTrace:
        """The complete trace."""
        trace = self._trace
        if trace is None:
            raise ValueError("no layout")
        trace.stacks = stacks = StackTable.of(
            plain["strings"],
            [Frame(file, line, name) for file, line, name in plain["frames"]],
            [tuple(stack) for stack in plain["stacks"]],
        )
        if any(index >= len(stacks.frames) for stack in stacks.stacks for index in stack):
            raise ValueError("a stack's frame")
        trace.complete = plain["complete"]
        trace.annotations = tuple(Annotation(*entry) for entry in plain["annotations"])
        texts = len(stacks.strings)
        self._check(stack=len(stacks.stacks), module=texts, phase=texts)
        return trace

    def _check(self, **limits: int) -> None:
        """Raises ValueError for a column that is not as long as the others, or has an index of at
        least its limit.
        """
        rows = len(self._events)
        for name in COLUMNS:
            if len(getattr(self._events, name)) not in (0, rows) or (
                self._most.get(name, -1) >= limits.get(name, 1 << 64)
            ):
                raise ValueError(f"column {name}")


def _counts(plain: dict[str, Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in plain.items()}


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _segment(plain: list[Any]) -> Segment:
    device, address, total, stream, kind, (low, high), expandable, stack, blocks = plain
    states = {state.value: state for state in BlockState}
    return Segment(
        device=device,
        address=address,
        total_size=total,
        stream=stream,
        segment_type=kind,
        pool_id=(low, high),
        is_expandable=expandable,
        blocks=tuple(Block(at, size, asked, states[s], st) for at, size, asked, s, st in blocks),
        stack=stack,
    )
