"""CUDA streams and events as identities."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprobe.model.values import StreamId

__all__ = ["Stream"]


@dataclass(frozen=True, slots=True)
class Stream:
    """A CUDA stream: a queue of work on one device.

    ``stream_id`` is the ``cudaStream_t`` as an integer; 0 is the legacy default stream.
    ``blocking`` streams wait for, and are waited for by, the legacy default stream (the
    CUDA runtime's rule for streams made without ``cudaStreamNonBlocking``); the streams torch
    hands out are non-blocking.
    """

    device: str
    stream_id: StreamId
    priority: int = 0
    blocking: bool = False
    name: str = ""

    @property
    def is_default(self) -> bool:
        return self.stream_id == 0
