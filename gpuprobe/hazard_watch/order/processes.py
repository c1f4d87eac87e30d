"""Tensors sent to other processes.

``torch.multiprocessing`` sends a CUDA tensor as a handle to its memory, with an event that the
receiver waits for, and keeps the memory until the receiver releases it (``reductions.py``,
``reduce_tensor``). A later write by the sender is not ordered: the other process counts as reading
from the moment of sending until the sender receives anything from it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.hazard_watch.names import site_at_hand
from gpuprobe.hazard_watch.order.source import OrderSource
from gpuprobe.hazards.events import (
    BlockAccess,
    Launch,
    RecordStream,
    StreamOrder,
    StreamSynchronize,
)
from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import tensors_in

PROCESSES: Final = -2
"""The device of the actor that represents all other processes."""


class Processes:
    """The exchange of one check with other processes."""

    def __init__(self, source: OrderSource) -> None:
        self._source = source
        self.sent = 0
        self._local = threading.local()

    def install(self, patches: Patches) -> None:
        """Report sending to other processes, and receiving from them."""
        from multiprocessing import connection, process, queues, synchronize

        pipes: Any = connection._ConnectionBase
        # A queue pickles in a separate thread, some time later: the call counts.
        for owner, name in ((queues.Queue, "put"), (queues.SimpleQueue, "put"), (pipes, "send")):
            patches.set(owner, name, self._before_sending(getattr(owner, name)))
        for owner, name in (
            (pipes, "recv"),
            (pipes, "recv_bytes"),
            (pipes, "poll"),
            (process.BaseProcess, "join"),
            (synchronize.Event, "wait"),
            (synchronize.Condition, "wait"),
            (synchronize.Barrier, "wait"),
        ):
            patches.set(owner, name, self._after_waiting(getattr(owner, name)))
        share: Callable[..., Any] = torch.UntypedStorage._share_cuda_

        def _share_cuda_(storage: Any, *args: Any, **kwargs: Any) -> Any:
            feeder = threading.current_thread().name.startswith("QueueFeederThread")
            if not feeder and not getattr(self._local, "sending", False):
                self._report_sending(torch.empty(0, device=storage.device).set_(storage))
            return share(storage, *args, **kwargs)

        patches.set(torch.UntypedStorage, "_share_cuda_", _share_cuda_)

    def _before_sending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def send(this: Any, value: object, *args: Any, **kwargs: Any) -> Any:
            self._report_sending(value)
            self._local.sending = True
            try:
                return original(this, value, *args, **kwargs)
            finally:
                self._local.sending = False

        return send

    def _after_waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            if result is not False:  # a wait that timed out
                self._responded()
            return result

        return wait

    def _report_sending(self, value: object) -> None:
        """The other process may read from here on; it is ordered after earlier writes."""
        source = self._source
        accesses: list[BlockAccess] = []
        source.add_accesses(accesses, list(tensors_in(value)), False)
        if not accesses:
            return
        self.sent += len(accesses)
        engine = source.engine
        actor = engine.stream(PROCESSES, 0)
        for index in range(len(source.machine.devices)):
            engine.apply(StreamOrder(actor, engine.stream(index, source.machine.stream(index))))
        for address, _, _ in accesses:
            engine.apply(RecordStream(address, actor))  # its memory is kept
        site = site_at_hand()
        engine.apply(Launch(actor, "receiver", accesses, site, "process"))
        source.record_names(actor, accesses, site)

    def _responded(self) -> None:
        """Another process responded: it counts as done with all that was sent."""
        if self.sent:
            engine = self._source.engine
            engine.apply(StreamSynchronize(engine.stream(PROCESSES, 0), site_at_hand()))
