"""What reports a program's use of torch's CUDA to an event source.

torch's own trace of the GPU (``torch._C._activate_gpu_trace``) is not used. Its hooks run Python
code when C++ frees memory, also while an exception propagates, which is then lost; and it cannot be
switched off again. Instead:

* a kernel in Python shows what every operator reads and writes (`operator_calls`);
* methods of streams, events and graphs are replaced, those of C's classes too;
* a call of a graph that torch compiled counts as one use of its inputs and results: its own kernels
  are no operators;
* a weak reference to each storage reports the end of its memory;
* waits in C++, those of the autograd engine and of collectives, are modelled
  (`gpuprobe.hazard_watch.order`).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, UntypedStorage

from gpuprobe.hazard_watch import host_access
from gpuprobe.hazard_watch.device import PINNED, RegisteredMemory, untraced
from gpuprobe.hazard_watch.names import backward_frames, site_at_hand
from gpuprobe.hazard_watch.node_streams import lifetime_of
from gpuprobe.hazard_watch.source import EventSource
from gpuprobe.hazard_watch.streams import CapturedGraph
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import (
    DeviceSynchronize,
    Event,
    EventRecord,
    EventSynchronize,
    EventWait,
    GraphReplay,
    RecordStream,
    StreamSynchronize,
    StreamWait,
)
from gpuprobe.patching import Patches, when_imported
from gpuprobe.torch_support.compiled_calls import follow_compiled_calls
from gpuprobe.torch_support.memory_history import history
from gpuprobe.torch_support.operator_calls import watch
from gpuprobe.user_frames import PACKAGE, folder_of, outside

_AUTOGRAD: Final = f"{folder_of(torch)}autograd/"
_VALUES: Final = f"{PACKAGE}native/values/"
_COMPILER: Final = "torch._inductor.compile_fx"
_Report: TypeAlias = Callable[..., Event | None]
"""What a call means for the engine, from its result and its arguments."""
_OF_THE_HOST: Final = (EventSynchronize, StreamSynchronize, DeviceSynchronize, GraphReplay)
"""Events that no graph captures; within a capture, its own engine gets the others."""


def install(source: EventSource, patches: Patches) -> None:
    """Report to ``source`` until ``patches`` are undone."""
    patches.add(lambda: source.guarded(source.drain))  # after all other patches are undone
    _CudaHooks(source).install(patches)
    host_access.install(source, patches)
    for part in (source.collectives, source.processes, source.blocks, source.creations):
        part.install(patches)
    patches.add(watch(source.operator))
    patches.add(history.install())
    if torch.cuda.is_initialized():
        for index in source.machine.devices:
            source.machine.switched(index, source.machine.stream(index))


class _CudaHooks:
    """Reports to ``source`` what is not an operator, and the calls of backward passes."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._machine = source.machine
        self._events: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id of the object
        self._numbers = itertools.count(1)

    def install(self, patches: Patches) -> None:
        """Report until ``patches`` are undone."""
        self._backward(patches)
        self._streams(patches)
        self._methods(patches)
        function = torch.autograd.Function
        patches.set(function, "apply", self._applying(vars(function)["apply"]))
        guarded = self._source.guarded
        follow_compiled_calls(
            patches,
            functools.partial(guarded, self._source.graph_called),
            functools.partial(guarded, self._source.graph_returned),
        )
        patches.add(when_imported(_COMPILER, lambda: self._compiling(patches)))

    def _compiling(self, patches: Patches) -> None:
        """Allow the synchronisations of torch's compiler, which reads the constants of a graph, in
        torch 2.15 also before it compiles the graph. Called when it has been imported.
        """
        module: Any = sys.modules[_COMPILER]
        for name in ("_compile_fx_inner", "_recursive_joint_graph_passes"):
            if hasattr(module, name):
                patches.set(module, name, self._allowed(getattr(module, name)))

    def _allowed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose synchronisations are no findings."""
        source = self._source

        @functools.wraps(original)
        def allowed(*args: Any, **kwargs: Any) -> Any:
            source.allowed += 1
            try:
                return original(*args, **kwargs)
            finally:
                source.allowed -= 1

        return allowed

    def _backward(self, patches: Patches) -> None:
        """Track the lines that call backward passes, and report the passes."""
        original = torch.autograd.graph._engine_run_backward
        source = self._source

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if _in_value_computation():
                return original(*args, **kwargs)
            backward_frames.append(sys._getframe(1))
            source.backward_begins(args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                source.backward_ends()
                backward_frames.pop()

        for module in (torch.autograd.graph, torch.autograd):
            if getattr(module, "_engine_run_backward", None) is original:
                patches.set(module, "_engine_run_backward", run_backward)

    def _streams(self, patches: Patches) -> None:
        """Patch methods and functions that order streams, or that wait for them."""
        event, stream = torch.cuda.Event, torch.cuda.Stream
        methods: dict[Any, dict[str, _Report]] = {
            event: {
                "record": self._recorded,
                "wait": self._waited,
                "query": self._event_done,
                "synchronize": self._event_done,
            },
            stream: {"query": self._stream_done, "synchronize": self._stream_done},
        }
        for owner, reports in methods.items():
            for name, report in reports.items():
                patches.set(owner, name, self._reporting(getattr(owner, name), report))
        # Of classes in C, which accelerators other than CUDA share.
        generic: dict[Any, dict[str, _Report]] = {
            torch.Event: methods[event],
            torch.Stream: {
                **methods[stream],
                "record_event": self._event_made,
                "wait_event": self._event_awaited,
                "wait_stream": self._stream_awaited,
                "__enter__": self._switched,
                "__exit__": self._switched,
            },
        }
        for owner, reports in generic.items():
            for name, report in reports.items():
                if name in vars(owner):
                    original = vars(owner)[name]
                    patches.add(_set_in_c(owner, name, self._reporting(original, report)))
        functions: dict[str, _Report] = {
            "_cuda_setStream": self._switched,
            "_accelerator_setStream": self._switched,
            "_cuda_synchronize": self._device_done,
            "_accelerator_synchronizeDevice": self._device_done,
        }
        for name, report in functions.items():
            if hasattr(torch._C, name):
                patches.set(torch._C, name, self._reporting(getattr(torch._C, name), report))

    def _methods(self, patches: Patches) -> None:
        """Patch methods of tensors, graphs and memory that are not operators."""
        from torch.cuda import memory

        graph = torch.cuda.CUDAGraph
        reports: tuple[tuple[Any, str, _Report], ...] = (
            (torch.Tensor, "record_stream", self._stream_recorded),
            (torch.Tensor, "tolist", self._listed),
            (torch.UntypedStorage, "resize_", self._storage_resized),
            (graph, "capture_begin", self._capture_began),
            (graph, "capture_end", self._capture_ended),
            (graph, "replay", self._replayed),
        )
        for owner, name, report in reports:
            patches.set(owner, name, self._reporting(getattr(owner, name), report))
        original_empty, original_numpy = memory.empty_cache, torch.Tensor.numpy

        def empty_cache() -> None:
            original_empty()
            self._source.guarded(self._source.empty_cache)

        def numpy(this: Any, *args: Any, **kwargs: Any) -> Any:
            array = original_numpy(this, *args, **kwargs)
            return self._source.aliased(this, array) if self._is_pinned(this) else array

        for module in (memory, torch.cuda):
            patches.set(module, "empty_cache", empty_cache)
        runtime: Any = torch._C._cudart
        registered: dict[str, Callable[..., None]] = {
            "cudaHostRegister": self._registered,
            "cudaHostUnregister": self._unregistered,
        }
        for function, reporter in registered.items():
            patches.set(runtime, function, self._after(getattr(runtime, function), reporter))
        patches.set(torch.Tensor, "numpy", numpy)

    def _reporting(self, original: Any, report: _Report) -> Callable[..., Any]:
        """``original``, followed by ``report`` with its result and its arguments."""
        source = self._source

        def apply(*args: Any, **kwargs: Any) -> None:
            event = report(*args, **kwargs)
            if event is not None:
                (source.engine if isinstance(event, _OF_THE_HOST) else source.active).apply(event)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            source.guarded(apply, result, *args, **kwargs)
            return result

        return method

    def _after(self, original: Any, report: Callable[..., None]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            result = original(*args)
            if not int(result):
                self._source.guarded(report, *args)
            return result

        return function

    def _applying(self, apply: Any) -> Any:
        """``torch.autograd.Function.apply`` creates the nodes that accumulate the gradients of its
        leaves, though it runs without recording gradients itself. ``apply``: a class method, since
        torch 2.15 of C.
        """
        source = self._source

        @functools.wraps(apply.__get__(None, torch.autograd.Function))
        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            result = apply.__get__(None, kind)(*args, **kwargs)
            if torch.is_grad_enabled():
                source.guarded(source.machine.leaves_used, args, {}, untraced)
            return result

        return classmethod(applied)

    def _number(self, event: torch.Event) -> int:
        """The identity of an event while it exists."""
        lifetime = lifetime_of(event)
        found = self._events.get(id(event))
        if found is None or found[0]() is not lifetime:
            number = next(self._numbers)

            def gone(_: object, key: int = id(event)) -> None:
                self._events.pop(key, None)
                self._source.event_ended(number)

            found = self._events[id(event)] = weakref.ref(lifetime, gone), number
        return found[1]

    def _actor(self, engine: Engine, stream: torch.Stream | None) -> int:
        """The actor of a stream, or of the current one."""
        machine = self._machine
        if stream is None:
            index = _device()
            return engine.stream(index, machine.stream(index))
        return engine.stream(*machine.number_of(stream))

    # -- the events of calls, by their result and arguments

    def _recorded(
        self, _: object, event: torch.Event, stream: torch.Stream | None = None
    ) -> EventRecord:
        actor = self._actor(self._source.active, stream)
        return EventRecord(self._number(event), actor, site_at_hand())

    def _event_made(
        self, event: torch.Event, stream: torch.Stream, *_: object, **__: object
    ) -> EventRecord:
        return self._recorded(None, event, stream)

    def _waited(
        self, _: object, event: torch.Event, stream: torch.Stream | None = None
    ) -> EventWait:
        actor = self._actor(self._source.active, stream)
        return EventWait(self._number(event), actor, site_at_hand())

    def _event_awaited(self, _: object, stream: torch.Stream, event: torch.Event) -> EventWait:
        return self._waited(None, event, stream)

    def _stream_awaited(self, _: object, stream: torch.Stream, other: torch.Stream) -> StreamWait:
        engine = self._source.active
        return StreamWait(self._actor(engine, stream), self._actor(engine, other), site_at_hand())

    def _event_done(self, done: bool | None, event: torch.Event) -> EventSynchronize | None:
        """A wait, or a query: True counts as a wait of the host."""
        return None if done is False else EventSynchronize(self._number(event), site_at_hand())

    def _stream_done(self, done: bool | None, stream: torch.Stream) -> StreamSynchronize | None:
        """A wait, or a query, as of events."""
        if done is False:
            return None
        return StreamSynchronize(self._actor(self._source.engine, stream), site_at_hand())

    def _device_done(self, _: object, index: int | None = None) -> DeviceSynchronize:
        return DeviceSynchronize(_device() if index is None else index, site_at_hand())

    def _stream_recorded(
        self, _: object, tensor: Tensor, stream: torch.Stream
    ) -> RecordStream | None:
        touched = self._source.touch(tensor)
        if touched is None:
            return None
        return RecordStream(touched[0], self._actor(self._source.active, stream))

    def _switched(self, *_: object, **__: object) -> None:
        index = _device()
        self._machine.switched(index, self._machine.stream(index))

    # -- memory

    def _storage_resized(self, _: object, storage: UntypedStorage, *__: object) -> None:
        self._source.resized(storage)

    def _registered(self, address: int, nbytes: int, flags: int) -> None:
        self._machine.registered[address] = RegisteredMemory(address, nbytes)

    def _unregistered(self, address: int) -> None:
        self._source.unregistered(address)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not tensor.is_cuda and self._machine.place_of(tensor) == PINNED

    def _listed(self, _: object, tensor: Tensor) -> None:
        if self._is_pinned(tensor):
            self._source.host_use(tensor, False, "tolist")

    def _capture_began(
        self, _: None, graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any
    ) -> None:
        self._machine.integers.capturing = True
        self._source.capture_begin()

    def _capture_ended(self, _: None, graph: torch.cuda.CUDAGraph) -> None:
        self._machine.integers.capturing = False
        graph._gpuprobe_accesses = self._source.capture_end()

    def _replayed(self, _: None, graph: torch.cuda.CUDAGraph) -> GraphReplay | None:
        """All that was captured, as one operation, including memory of the graph's own pool and its
        results.
        """
        captured: CapturedGraph | None = getattr(graph, "_gpuprobe_accesses", None)
        if captured is None:  # captured before the check: its accesses are unknown
            self._source.uncharged_graphs += 1
            return None
        actor = self._actor(self._source.engine, None)
        return GraphReplay(captured.number, actor, list(captured.accesses), site_at_hand())


def _in_value_computation() -> bool:
    """Whether a backward pass is run to compute an operator's values, on a simulated GPU."""
    frame = outside(sys._getframe(2), _AUTOGRAD)
    return frame is not None and frame.f_code.co_filename.startswith(_VALUES)


def _set_in_c(kind: Any, name: str, value: object) -> Callable[[], None]:
    """Replace a method of a class that C defines; return a function that restores it. Python does
    not allow setting it: its dictionary is changed, followed by ``PyType_Modified``, "after any
    manual modification of the attributes" (C API).
    """
    (methods,) = (one for one in gc.get_referents(vars(kind)) if type(one) is dict)
    before = methods[name]

    def replace(method: Any) -> None:
        methods[name] = method
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))

    replace(value)
    return lambda: replace(before)


def _device() -> int:
    return int(torch.cuda.current_device())
