"""Streams and events of virtual devices.

Work is done at once, in program order, so nothing ever waits; what is kept is the order that the
program asked for, which the hazard engine judges. Times between events are the host's.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Final

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

__all__ = ["install"]

POOL: Final = 32
"""Streams per priority and device; the next ones are these again, in turn. Source:
``kStreamsPerPool`` in ``c10/cuda/CUDAStream.cpp``."""
_LOW, _HIGH = 0, -1
_DEVICE_TYPE: Final = 1  # c10::DeviceType::CUDA


def install(machine: Machine, patches: Patches) -> None:
    local = machine.local
    turns = {
        (index, priority): itertools.cycle(range(POOL))
        for index in range(len(machine.devices))
        for priority in (_LOW, _HIGH)
    }
    events = itertools.count(1)
    external: dict[int, int] = {}

    def index_of(device: Any) -> int:
        return int(torch.cuda._utils._get_device_index(device, optional=True))

    def notify(name: str, *args: Any) -> None:
        if machine.observer is not None:
            getattr(machine.observer, name)(*args)

    class Stream:
        """``torch.cuda.Stream``. ``number`` is 0 for the default stream."""

        number: int
        device_index: int

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            self = super().__new__(cls)
            number = kwargs.get("stream_id")
            if number is None:
                if isinstance(device, Stream):
                    device = device.device
                index = index_of(device)
                level = _HIGH if priority < 0 else _LOW
                turn = next(turns[(index, level)])
                number = 1 + turn + (POOL if level == _HIGH else 0)
            else:
                index = kwargs.get("device_index", local.device)
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

        @property
        def device_type(self) -> int:
            return _DEVICE_TYPE

        @property
        def cuda_stream(self) -> int:
            return self.number

        @property
        def priority(self) -> int:
            return _HIGH if POOL < self.number <= 2 * POOL else _LOW

        @property
        def _as_parameter_(self) -> Any:
            import ctypes

            return ctypes.c_void_p(self.number)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return _LOW, _HIGH

        def query(self) -> bool:
            notify("stream_synchronize", self.device_index, self.number)
            return True

        def is_capturing(self) -> bool:
            return machine.capture is not None

        def synchronize(self) -> None:
            machine.devices[self.device_index].finish(self.number)
            notify("stream_synchronize", self.device_index, self.number)

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            if event is None:
                event = Event()
            event.record(self)
            return event

        def __enter__(self) -> Any:  # torch.Stream is a context manager since 2.7
            saved = (local.device, local.streams.get(self.device_index, 0))
            local.__dict__.setdefault("entered_streams", []).append(saved)
            local.device = self.device_index
            machine.switch(self.device_index, self.number)
            return self

        def __exit__(self, *error: Any) -> None:
            device, stream = local.__dict__["entered_streams"].pop()
            machine.switch(self.device_index, stream)
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
            number = int(stream_ptr)
            if not 0 <= number <= 2 * POOL + len(external):  # those are handles of our own
                number = external.setdefault(number, 2 * POOL + 1 + len(external))
            return super().__new__(
                cls, stream_id=number, device_index=index_of(device), device_type=_DEVICE_TYPE
            )

    class Event:
        """``torch.cuda.Event``."""

        number: int
        _time: float | None
        _where: tuple[int, int] | None

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            self = super().__new__(cls)
            self.number = next(events)
            self._time = None
            self._where = None
            return self

        def __init__(
            self,
            enable_timing: Any = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
            device: Any = None,
        ) -> None:
            # torch.Event takes a device first, torch.cuda.Event does not.
            self._timing = enable_timing if isinstance(enable_timing, bool) else False
            self.enable_timing = self._timing

        @property
        def cuda_event(self) -> int:
            return self.number

        @property
        def event_id(self) -> int:
            return self.number

        @property
        def device(self) -> Any:
            return None if self._where is None else torch.device("cuda", self._where[0])

        def record(self, stream: Any = None) -> None:
            if stream is None:
                stream = current_stream()
            self._time = time.perf_counter()
            self._where = (stream.device_index, stream.number)
            notify("event_record", self.number, stream.device_index, stream.number)

        def wait(self, stream: Any = None) -> None:
            if stream is None:
                stream = current_stream()
            notify("event_wait", self.number, stream.device_index, stream.number)

        def query(self) -> bool:
            notify("event_query", self.number)
            return True

        def synchronize(self) -> None:
            if self._where is not None:
                machine.devices[self._where[0]].finish(self._where[1])
            notify("event_synchronize", self.number)

        def elapsed_time(self, end: Any) -> float:
            if not (self._timing and end._timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self._time is None or end._time is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return (end._time - self._time) * 1000.0

        def ipc_handle(self) -> bytes:
            return self.number.to_bytes(64, "little")

        @classmethod
        def from_ipc_handle(cls, device: Any, handle: bytes) -> Any:
            return cls(interprocess=True)

        def __del__(self) -> None:
            if machine.observer is not None and not machine.closed:
                machine.observer.event_destroyed(self.number)

        def __repr__(self) -> str:
            return f"<torch.cuda.Event {self.number:#x}>"

    def current_stream(device: Any = None) -> Any:
        index = index_of(device)
        return Stream(stream_id=local.streams.get(index, 0), device_index=index)

    def default_stream(device: Any = None) -> Any:
        return Stream(stream_id=0, device_index=index_of(device))

    def set_stream(stream: Any) -> None:
        if stream is None:
            return
        local.device = stream.device_index
        machine.switch(stream.device_index, stream.number)

    def set_by_id(stream_id: int, device_index: int, device_type: int) -> None:
        local.device = device_index
        machine.switch(device_index, stream_id)

    def get_current(index: int) -> tuple[int, int, int]:
        return local.streams.get(index, 0), index, _DEVICE_TYPE

    def synchronize(device: Any = None) -> None:
        index = index_of(device)
        found = machine.devices[index]
        for number in range(2 * POOL + 1 + len(external)):
            found.finish(number)
        notify("device_synchronize", index)

    for module in (torch.cuda, torch.cuda.streams):
        patches.set(module, "Stream", Stream)
        patches.set(module, "ExternalStream", ExternalStream)
        patches.set(module, "Event", Event)
    original = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        """Streams that are made current within are told apart from those that were before."""
        before, local.base = local.base, dict(local.streams)
        try:
            return original(*args, **kwargs)
        finally:
            local.base = before

    patches.set_all(torch.autograd.graph, {"_engine_run_backward": run_backward}, "torch.autograd")
    names: dict[str, Any] = {
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "_set_stream_by_id": set_by_id,
        "synchronize": synchronize,
        "get_stream_from_external": lambda pointer, device=None: ExternalStream(pointer, device),
    }
    patches.set_all(torch.cuda, names, "torch.cuda.")
    for name, value in {
        "_cuda_getCurrentStream": get_current,
        "_cuda_getDefaultStream": lambda index: (0, index, _DEVICE_TYPE),
        "_cuda_setStream": set_by_id,
        "_cuda_getCurrentRawStream": lambda index: local.streams.get(index, 0),
        "_cuda_synchronize": lambda: synchronize(local.device),
        "_cuda_sleep": lambda cycles: None,
        "_cuda_set_sync_debug_mode": lambda mode: setattr(machine, "sync_debug_mode", mode),
        "_cuda_get_sync_debug_mode": lambda: machine.sync_debug_mode,
    }.items():
        patches.set(torch._C, name, value)
