"""Streams and events of virtual devices.

Work is done at once, in program order, so nothing ever waits; what is kept is the order that the
program asked for, which the hazard engine checks. Times between events are the host's.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

POOL: Final = 32
"""Streams per priority and device; the next ones are these again, in turn. Source:
``kStreamsPerPool`` in ``c10/cuda/CUDAStream.cpp``."""
PRIORITIES: Final = 4
"""Priorities that have pools: 0, the lowest, to -3. CUDA has more, down to -5 on every GPU of the
catalogue. Source: ``max_compile_time_stream_priorities`` in ``c10/cuda/CUDAStream.h``."""
_DEVICE_TYPE: Final = 1  # c10::DeviceType::CUDA


class Stream:
    """``torch.cuda.Stream``. ``number`` is 0 for the default stream."""

    _api: Streams  # of the machine that is in use
    number: int
    device_index: int

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        number = kwargs.get("stream_id")
        if number is None:
            if isinstance(device, Stream):
                device = device.device
            index = cls._api._device(device)
            number = cls._api.next_of_pool(index, priority)
        else:
            index = kwargs.get("device_index", cls._api.local.device)
        self.number = int(number)
        self.device_index = index
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def stream_id(self) -> int:
        return self.number

    cuda_stream = stream_id
    native_handle = stream_id
    _cdata = stream_id

    def __cuda_stream__(self) -> tuple[int, int]:
        """The version of the protocol, and the handle: for other libraries."""
        return 0, self.number

    @property
    def device_type(self) -> int:
        return _DEVICE_TYPE

    @property
    def priority(self) -> int:
        if not 0 < self.number <= PRIORITIES * POOL:
            return 0
        return -((self.number - 1) // POOL)

    @property
    def _as_parameter_(self) -> Any:
        import ctypes

        return ctypes.c_void_p(self.number)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest."""
        return 0, 1 - PRIORITIES

    def query(self) -> bool:
        self._api.notify("stream_synchronize", self.device_index, self.number)
        return True

    def is_capturing(self) -> bool:
        return self._api.machine.capture is not None

    def synchronize(self) -> None:
        self._api.machine.devices[self.device_index].finish(self.number)
        self._api.notify("stream_synchronize", self.device_index, self.number)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        if event is None:
            event = self._api.Event()
        event.record(self)
        return event

    def __enter__(self) -> Any:  # torch.Stream is a context manager since 2.7
        local = self._api.local
        local.entered_streams.append((local.device, self._api.machine.stream(self.device_index)))
        self._api.set_by_id(self.number, self.device_index)
        return self

    def __exit__(self, *error: Any) -> None:
        local = self._api.local
        device, stream = local.entered_streams.pop()
        self._api.machine.switch(self.device_index, stream)
        local.device = device

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Stream)
            and other.number == self.number
            and other.device_index == self.device_index
        )

    def __hash__(self) -> int:
        return hash((self.number, self.device_index))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.number:#x}>"


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``: a stream that other code made."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> Any:
        return super().__new__(
            cls,
            stream_id=cls._api.number_of(int(stream_ptr)),
            device_index=_index_of(device),
            device_type=_DEVICE_TYPE,
        )


class AnyEvent:
    """``torch.Event``, the base of ``torch.cuda.Event``, which is given no device."""

    _api: Streams
    number: int
    _time: float | None
    _where: tuple[int, int] | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self.number = next(cls._api.events)
        self._time = None
        self._where = None
        return self

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._timing = self.enable_timing = bool(enable_timing)

    @property
    def event_id(self) -> int:
        return self.number

    cuda_event = event_id

    @property
    def _as_parameter_(self) -> Any:
        import ctypes

        return ctypes.c_void_p(self.number)

    @property
    def device(self) -> Any:
        return None if self._where is None else torch.device("cuda", self._where[0])

    def record(self, stream: Any = None) -> None:
        if stream is None:
            stream = self._api.current_stream()
        self._time = time.perf_counter()
        self._where = (stream.device_index, stream.number)
        self._api.notify("event_record", self.number, *self._where)

    def wait(self, stream: Any = None) -> None:
        if stream is None:
            stream = self._api.current_stream()
        devices = self._api.machine.devices
        if self._where is not None and self._where[1] in devices[self._where[0]].busy_streams:
            devices[stream.device_index].busy_streams.add(stream.number)
        self._api.notify("event_wait", self.number, stream.device_index, stream.number)

    def query(self) -> bool:
        self._api.notify("event_query", self.number)
        return True

    def synchronize(self) -> None:
        if self._where is not None:
            index, number = self._where
            self._api.machine.devices[index].finish(number, idle=False)  # more may have followed
        self._api.notify("event_synchronize", self.number)

    def elapsed_time(self, end: Any) -> float:
        if not (self._timing and end._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(end._time - self._time) * 1000.0

    def ipc_handle(self) -> bytes:
        return self.number.to_bytes(64, "little")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Any:
        return cls(interprocess=True)

    def __del__(self) -> None:
        if not self._api.machine.closed:
            self._api.notify("event_destroyed", self.number)

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.number:#x}>"


class Event(AnyEvent):
    """``torch.cuda.Event``."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        super().__init__(enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class Streams:
    """The streams of one machine's devices, and the functions of ``torch.cuda`` about them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.local = machine.local
        self.events = itertools.count(1)
        self._turns: dict[tuple[int, int], Iterator[int]] = {}
        self._external: dict[int, int] = {}
        bound = {"_api": self}
        self.Stream: Any = type("Stream", (Stream,), bound)
        self.ExternalStream: Any = type("ExternalStream", (ExternalStream, self.Stream), bound)
        self.AnyEvent: Any = type("Event", (AnyEvent,), bound)
        self.Event: Any = type("Event", (Event, self.AnyEvent), bound)

    def notify(self, event: str, *args: Any) -> None:
        """Report something to whoever observes the machine."""
        if self.machine.unwaited and event.endswith("_synchronize"):
            self.machine.in_flight.host_has_waited()
        if self.machine.observer is not None:
            getattr(self.machine.observer, event)(*args)

    def next_of_pool(self, index: int, priority: int) -> int:
        """The number of a new stream. Raises RuntimeError for a priority below the lowest."""
        if priority > 0:
            raise RuntimeError(
                "Expected cuda stream priority to be less than or equal to 0, got " + str(priority)
            )
        pool = min(-priority, PRIORITIES - 1)
        turns = self._turns.setdefault((index, pool), itertools.cycle(range(POOL)))
        return 1 + next(turns) + pool * POOL

    def number_of(self, handle: int) -> int:
        """The number of a stream that other code made; low handles are those of our own."""
        if 0 <= handle < self._end():
            return handle
        number = self._external.setdefault(handle, self._end())
        if handle in self.machine.created_streams:
            self.machine.blocking_streams.add(number)
        return number

    def _end(self) -> int:
        """The number that follows all others."""
        return PRIORITIES * POOL + 1 + len(self._external)

    def _device(self, device: Any) -> int:
        """The index of a device that the program has. Raises RuntimeError for another
        (``check_gpu`` in ``c10/cuda/CUDAStream.cpp``).
        """
        index = _index_of(device)
        if not 0 <= index < self.machine.count:
            raise RuntimeError(
                f"Device index value {index} is out of index range [0, {self.machine.count})"
            )
        return index

    def current_stream(self, device: Any = None) -> Any:
        index = self._device(device)
        return self.Stream(stream_id=self.machine.stream(index), device_index=index)

    def default_stream(self, device: Any = None) -> Any:
        return self.Stream(stream_id=0, device_index=self._device(device))

    def set_stream(self, stream: Any) -> None:
        if stream is not None:
            self.set_by_id(stream.number, stream.device_index)

    def set_by_id(self, stream_id: int, device_index: int, device_type: int = _DEVICE_TYPE) -> None:
        self.local.device = device_index
        self.machine.switch(device_index, stream_id)

    def get_current(self, index: int) -> tuple[int, int, int]:
        return self.machine.stream(index), index, _DEVICE_TYPE

    def synchronize(self, device: Any = None) -> None:
        index = self._device(device)
        for number in range(self._end()):
            self.machine.devices[index].finish(number)
        self.notify("device_synchronize", index)

    def follow_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Within the backward pass each node's stream is current while it runs."""
        machine = self.machine

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            before = machine.backward_begins()
            try:
                return run(*args, **kwargs)
            finally:
                machine.backward_ended(before)

        return run_backward

    def follow_functions(self, apply: Callable[..., Any]) -> Any:
        """``torch.autograd.Function.apply`` makes the nodes that accumulate the gradients of its
        leaves, though it runs without recording gradients itself.
        """
        machine = self.machine

        @functools.wraps(apply)
        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            result = apply(kind, *args, **kwargs)
            machine.function_applied(args)
            return result

        return classmethod(applied)


def _index_of(device: Any) -> int:
    return int(torch.cuda._utils._get_device_index(device, optional=True))


def install(machine: Machine, patches: Patches) -> None:
    api, local = Streams(machine), machine.local
    classes = {"Stream": api.Stream, "ExternalStream": api.ExternalStream, "Event": api.Event}
    for module in (torch.cuda, torch.cuda.streams):
        patches.set_each(module, classes)
    patches.set(torch, "Event", api.AnyEvent)
    functions: dict[str, Any] = {
        "current_stream": api.current_stream,
        "default_stream": api.default_stream,
        "set_stream": api.set_stream,
        "_set_stream_by_id": api.set_by_id,
        "synchronize": api.synchronize,
        "get_stream_from_external": api.ExternalStream,
    }
    patches.set_all(torch.cuda, functions, "torch.cuda.")
    graph: Any = torch.autograd.graph
    followed = {"_engine_run_backward": api.follow_backward(graph._engine_run_backward)}
    patches.set_all(graph, followed, "torch.autograd")
    function = torch.autograd.Function
    patches.set(function, "apply", api.follow_functions(vars(function)["apply"].__func__))
    below: dict[str, Any] = {
        "_cuda_getCurrentStream": api.get_current,
        "_cuda_getDefaultStream": lambda index: (0, index, _DEVICE_TYPE),
        "_cuda_setStream": api.set_by_id,
        "_cuda_getCurrentRawStream": machine.stream,
        "_cuda_synchronize": lambda: api.synchronize(local.device),
        "_cuda_sleep": lambda cycles: None,
        "_cuda_set_sync_debug_mode": lambda mode: setattr(machine, "sync_debug_mode", mode),
        "_cuda_get_sync_debug_mode": lambda: machine.sync_debug_mode,
    }
    patches.set_each(torch._C, below)
