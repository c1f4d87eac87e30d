"""Torch memory snapshots as recordings.

The files may come from anywhere. What ``torch.cuda.memory._snapshot()`` returns in this process is
decoded by `gpuprobe.torch_support.snapshots.trace_of`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gpuprobe._version import __version__
from gpuprobe.errors import NotARecording, SnapshotError
from gpuprobe.model.io.files import open_regular, stored_bytes
from gpuprobe.model.run.recording import SCHEMA_VERSION, LoadedTraces, RankRecording, Recording
from gpuprobe.model.run.session import BlindSpot, Environment, Session
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.recording.snapshot.answer import answer_of, read_in_child
from gpuprobe.recording.snapshot.child import PendingRead
from gpuprobe.torch_support.irregularities import CONSEQUENCES
from gpuprobe.torch_support.snapshots import Decoded

_NOT_IN_SNAPSHOT = Unavailable("not in a torch snapshot", ReadStatus.UNSUPPORTED)


def read_snapshot(path: str | os.PathLike[str], pending: PendingRead | None = None) -> Recording:
    """Read a torch memory snapshot (``torch.cuda.memory._dump_snapshot``), of any schema since
    torch 2.0, as a recording with one rank, no steps, and one trace per device. ``pending``: of
    this file, where a process reads it already.

    The file is never trusted: it is read in a separate process that resolves no names and has
    limits on memory and time, so nothing in it is run. Raises NotARecording if the file does not
    exist, SnapshotError if it is invalid.
    """
    path = Path(path)
    try:
        process = None if pending is None else pending.take()
        if process is not None:
            decoded = answer_of(process)
        else:
            with open_regular(path) as stream:
                decoded = read_in_child(stream, stored_bytes(stream.fileno()))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotARecording(f"there is no file {path}") from error
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from error
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}", hint=error.hint) from error.__cause__
    return _recording(str(path), decoded)


def _recording(path: str, decoded: Decoded) -> Recording:
    traces = decoded.traces
    times = [trace.events.time_us for trace in traces if trace.events.time_us]
    session = Session(
        started_at=min((column[0] for column in times), default=0) / 1e6,
        pid=0,
        argv=(),
        level="trace",
        devices=tuple(trace.device for trace in traces),
    )
    confs = [trace.settings.conf for trace in traces if trace.settings is not None]
    environment = Environment(
        gpuprobe=__version__,
        python="unknown",
        platform="unknown",
        hostname="unknown",
        torch=_NOT_IN_SNAPSHOT,
        cuda_runtime=_NOT_IN_SNAPSHOT,
        cuda_driver=_NOT_IN_SNAPSHOT,
        allocator_conf=confs[0] if confs else "",
        cuda_visible_devices=_NOT_IN_SNAPSHOT,
        total_memory=_NOT_IN_SNAPSHOT,
    )
    rank = RankRecording(
        session=session,
        environment=environment,
        blind_spots=tuple(_blind_spots(decoded)),
        traces=LoadedTraces(lambda: traces),
    )
    return Recording(path, SCHEMA_VERSION, (rank,), kind="snapshot")


def _blind_spots(decoded: Decoded) -> Iterator[BlindSpot]:
    yield BlindSpot(
        "memory taken outside torch's caching allocator (CUDA context, NCCL, libraries)",
        "a snapshot does not contain it; the driver's 'used' includes it",
    )
    for what, count in decoded.irregular.items():
        yield BlindSpot(f"{count} {what}", CONSEQUENCES[what])
    for name, count in decoded.foreign.items():
        yield BlindSpot(
            f"trace entries with the action {name!r}: {count:,}",
            "they are unknown allocator actions and were skipped",
        )
    for trace in decoded.traces:
        if not len(trace.events):
            yield BlindSpot(
                f"the history of {trace.device} before the snapshot",
                "it has no events: torch.cuda.memory._record_memory_history() was not on",
            )
        elif not trace.events.stack or not any(trace.events.stack):
            yield BlindSpot(
                f"where in the code memory was allocated on {trace.device}",
                "the events have no stacks, so lines are unknown",
            )
