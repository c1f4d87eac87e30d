"""The memory that NCCL takes on the GPU for its buffers, outside torch's allocator.

A communicator has *channels*, and in each of them a *connection* to every rank that it exchanges
data with directly. The buffers of a connection that is on the GPU have fixed sizes, whatever is
sent (NCCL 2.18 to 2.27, ``src/init.cc`` and ``src/include/device.h``):

* Simple: ``NCCL_BUFFSIZE``, 4 MiB by default;
* LL: 8 lines * 512 threads * 8 steps * 16 bytes = 512 KiB;
* LL128: 120 elements * 640 threads * 8 steps * 8 bytes = 4.7 MiB;
* two more of 2 MiB, the unit in which memory is mapped, for messages between sender and receiver.

The first three are one allocation, of 10 MiB, 14 MiB in all. This agrees with a measurement: 3.28
GB for an all-to-all among 8 H100 with 32 channels, which is 7 * 32 connections of 14.6 MB
(github.com/NVIDIA/nccl/issues/1685).

The number of connections depends on the machine. The minimum is none: ranks without peer access
exchange data through buffers in host memory. The maximum is 32 channels (``MAXCHANNELS``) with a
ring and a tree of one parent and two children; sends from rank to rank have a separate connection
to each rank on the same machine (github.com/NVIDIA/nccl/issues/1450: one buffer serves all others).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuprobe.model.values import Bytes

_MIB: Final = 2**20
_SIMPLE: Final = 4 * _MIB
_LL: Final = 8 * 512 * 8 * 16
_LL128: Final = 120 * 640 * 8 * 8
_UNIT: Final = 2 * _MIB
_CHANNELS: Final = 32
_RING_AND_TREE: Final = 4
_ON_ONE_MACHINE: Final = 8
"""The largest number of GPUs that reach each other without a network: HGX and DGX machines of A100
to B200."""
_ALL_PAIRS: Final = ("all_to_all", "gather", "scatter")
"""Operations that NCCL implements by sends from rank to rank."""


@dataclass(slots=True)
class Communicator:
    """The use of one process group of NCCL. ``peers`` are the ranks of the group that this rank
    sent to or received from individually.
    """

    ranks: int
    collective: bool = False
    peers: set[int] = field(default_factory=set)

    def used(self, op: str, peer: int | None) -> None:
        """Add an operation; ``peer``: the rank that it is exchanged with, None if unknown."""
        if op in ("send", "recv"):
            self.peers.add(-1 if peer is None else peer)
        elif op in _ALL_PAIRS:
            self.peers |= set(range(self.ranks - 1))
        else:
            self.collective = True

    @property
    def connections(self) -> int:
        """The largest number of connections in each channel."""
        if self.ranks < 2:
            return 0
        return _RING_AND_TREE * self.collective + min(len(self.peers), _ON_ONE_MACHINE - 1)


def buffers(
    communicators: Iterable[Communicator], environ: Mapping[str, str] = os.environ
) -> tuple[Bytes, Bytes]:
    """The minimum and maximum in bytes. Reads ``NCCL_BUFFSIZE`` and ``NCCL_MAX_NCHANNELS`` from
    ``environ``.
    """
    simple = _number(environ, "NCCL_BUFFSIZE", _SIMPLE)
    channels = min(_CHANNELS, _number(environ, "NCCL_MAX_NCHANNELS", _CHANNELS))
    mapped = -(-(simple + _LL + _LL128) // _UNIT) * _UNIT
    connections = sum(one.connections for one in communicators)
    return Bytes(0), Bytes(connections * channels * (mapped + 2 * _UNIT))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else default
