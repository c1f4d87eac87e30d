"""Tensors sent to other processes, as the hazard engine sees them.

``torch.multiprocessing`` sends a CUDA tensor as a handle to its memory, with an event that the
receiver waits for, and keeps the memory until the receiver lets go (``reductions.py``,
``reduce_tensor``). What nobody orders is a later write by the sender: the other process counts
as reading from the moment of sending until it is heard of.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.patching import Patches

__all__ = ["PROCESSES", "Processes"]

PROCESSES: Final = -2
"""The device of the actor that stands for all other processes."""


class Processes:
    """What one watch knows of other processes."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.sent = 0
        self._local = threading.local()

    def install(self, patches: Patches) -> None:
        """Follow the ways to send and to hear."""
        from multiprocessing import connection, process, queues, synchronize

        pipes: Any = connection._ConnectionBase

        def sending(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def send(this: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
                self._sending(value)
                self._local.sending = True
                try:
                    return original(this, value, *args, **kwargs)
                finally:
                    self._local.sending = False

            patches.set(owner, name, functools.wraps(original)(send))

        def hearing(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def hear(this: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(this, *args, **kwargs)
                if result is not False:  # a wait that timed out
                    self._heard()
                return result

            patches.set(owner, name, functools.wraps(original)(hear))

        # A queue pickles in a thread of its own, some time later: what counts is the call.
        sends: tuple[tuple[Any, str], ...] = (
            (queues.Queue, "put"),
            (queues.SimpleQueue, "put"),
            (pipes, "send"),
        )
        for owner, name in sends:
            sending(owner, name)
        heard: tuple[tuple[Any, str], ...] = (
            (pipes, "recv"),
            (pipes, "recv_bytes"),
            (pipes, "poll"),
            (process.BaseProcess, "join"),
            (synchronize.Event, "wait"),
            (synchronize.Condition, "wait"),
            (synchronize.Barrier, "wait"),
        )
        for owner, name in heard:
            hearing(owner, name)
        share: Callable[..., Any] = torch.UntypedStorage._share_cuda_

        def _share_cuda_(storage: Any, *args: Any, **kwargs: Any) -> Any:
            feeder = threading.current_thread().name.startswith("QueueFeederThread")
            if not feeder and not getattr(self._local, "sending", False):
                self._sending(torch.empty(0, device=storage.device).set_(storage))
            return share(storage, *args, **kwargs)

        patches.set(torch.UntypedStorage, "_share_cuda_", _share_cuda_)

    def _sending(self, value: Any) -> None:
        """The other process may read from now on what was written so far."""
        source = self._source
        accesses: list[Any] = []
        source._add(accesses, list(_tensors(value)), False)
        if not accesses:
            return
        self.sent += len(accesses)
        engine = source.engine
        actor = engine.stream(PROCESSES, 0)
        for index in range(len(source.machine.devices)):
            engine.order(actor, engine.stream(index, source.machine.stream(index)))
        for address, _, _ in accesses:
            engine.record_stream(address, actor)  # its memory is kept
        engine.launch(actor, "receiver", accesses, source.site(), "process")

    def _heard(self) -> None:
        """Another process was heard of: it is taken to be done with what it was sent."""
        if self.sent:
            engine = self._source.engine
            engine.stream_synchronize(engine.stream(PROCESSES, 0), self._source.site())


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
