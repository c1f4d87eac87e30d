"""CUDA graphs of a virtual device: capture notes what is launched, replay does it again.

What was captured is kept as a list of calls over numbered storages, not as tensors: those would
stay alive, and a graph's intermediate results live in its private pool, where their memory is
used again within the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gpuprobe.hazards.rules import ALSO_WRITTEN
from gpuprobe.patching import Patches
from gpuprobe.virtual.generators import drawing_from
from gpuprobe.virtual.machine import Machine, is_meta
from gpuprobe.virtual.torch_patches import keys


class _Tensor:
    """A tensor of a captured call: a window on a numbered storage."""

    __slots__ = ("dtype", "meta", "offset", "size", "slot", "stride")

    def __init__(self, tensor: Any, slot: int) -> None:
        self.slot = slot
        self.dtype = tensor.dtype
        self.size = tuple(tensor.size())
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.meta = is_meta(tensor)


class Capture:
    """The calls of one graph. `note` is called by the dispatch mode."""

    def __init__(self, machine: Machine, index: int) -> None:
        self._machine = machine
        self._generator = machine.generators.default[index]
        self._numbers = self._generator.numbers()  # they are drawn at each replay
        self._offset = self._generator.get_offset()
        self._drawn = 0  # by how much the calls advance the generator's offset
        self._slots: list[tuple[weakref.ref[Any], int, bool]] = []
        self._slot_of: dict[int, int] = {}
        self._made: set[int] = set()  # slots whose storages the capture made
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.accesses: Any = None  # what the hazard engine keeps of a capture
        # A capture runs nothing on a GPU. Here it does, to have results to go on with: what was
        # there before is put back at its end.
        self._before: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def about_to_run(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what ``func`` is to overwrite of memory from before the capture."""
        if self._machine.shapes:
            return
        schema = func._schema
        also = ALSO_WRITTEN.get(schema.name.rpartition("::")[2], ())
        for at, argument in enumerate(schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or argument.name in also:
                value = args[at] if at < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        self._keep(tensor.untyped_storage())

    def about_to_write(self, tensor: Any) -> None:
        """Keep what compiled code is to overwrite of memory from before the capture."""
        self._keep(tensor.untyped_storage())

    def _keep(self, storage: Any) -> None:
        key = storage._cdata
        slot = self._slot_of.get(key)
        made = slot is not None and slot in self._made and self._slots[slot][0]() is storage
        if key not in self._before and not made:
            with keys.below():
                copy = torch.UntypedStorage(storage.nbytes())
                copy.copy_(storage)
            self._before[key] = (weakref.ref(storage), copy)

    def put_back(self) -> None:
        """The end of the capture: nothing has happened to memory from before it."""
        with keys.below():
            for reference, copy in self._before.values():
                storage = reference()
                if storage is not None and storage.nbytes() == copy.nbytes():
                    storage.copy_(copy)
        self._before.clear()
        self._drawn = self._generator.get_offset() - self._offset
        self._generator.set_numbers(self._numbers)
        self._generator.advance(-self._drawn)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = (func, self._pack(args), self._pack(kwargs))
        known = len(self._slots)
        self._calls.append((*given, self._pack(result)))
        self._made.update(range(known, len(self._slots)))

    def _pack(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage._cdata
            slot = self._slot_of.get(key)
            if slot is None or self._slots[slot][0]() is None:
                slot = self._slot_of[key] = len(self._slots)
                self._slots.append((weakref.ref(storage), storage.nbytes(), is_meta(value)))
            return _Tensor(value, slot)
        if isinstance(value, (list, tuple)):
            return type(value)(self._pack(item) for item in value)
        if isinstance(value, dict):
            return {name: self._pack(item) for name, item in value.items()}
        return value

    def replay(self) -> None:
        """Do everything again, into the same memory. Nothing without values."""
        self._generator.advance(self._drawn)
        if self._machine.shapes:
            return
        from torch.utils._python_dispatch import _disable_current_modes

        scratch: dict[int, Any] = {}
        drawing = drawing_from(self._generator)
        with _disable_current_modes(), keys.below(), torch.no_grad(), drawing:
            for func, args, kwargs, result in self._calls:
                got = func(*self._unpack(args, scratch), **self._unpack(kwargs, scratch))
                self._store(got, result, scratch)

    def _storage(self, slot: int, scratch: dict[int, Any]) -> Any:
        found = scratch.get(slot)
        if found is None:
            reference, nbytes, _ = self._slots[slot]
            found = reference()
            if found is None:
                found = torch.UntypedStorage(nbytes)
            scratch[slot] = found
        return found

    def _unpack(self, value: Any, scratch: dict[int, Any]) -> Any:
        if isinstance(value, _Tensor):
            made = torch.empty(0, dtype=value.dtype)
            storage = self._storage(value.slot, scratch)
            return made.set_(storage, value.offset, value.size, value.stride)
        if isinstance(value, (list, tuple)):
            return type(value)(self._unpack(item, scratch) for item in value)
        if isinstance(value, dict):
            return {name: self._unpack(item, scratch) for name, item in value.items()}
        return value

    def _store(self, got: Any, wanted: Any, scratch: dict[int, Any]) -> None:
        """Put a result where the captured call's result lies."""
        if isinstance(wanted, _Tensor):
            target = self._unpack(wanted, scratch)
            if target.data_ptr() != got.data_ptr():
                target.copy_(got)
        elif isinstance(wanted, (list, tuple)):
            for one, other in zip(got, wanted, strict=True):
                self._store(one, other, scratch)


class CUDAGraph:
    """``torch.cuda.CUDAGraph``."""

    _machine: Machine  # the one that is in use
    _new_pool: Callable[[], tuple[int, int]]
    # Of the class, for what torch's compiler makes without `__init__`.
    _capture: Capture | None = None
    _pool: tuple[int, int] | None = None
    _index = 0
    _open = False
    _keep = False

    def __init__(self, keep_graph: bool = False) -> None:
        """``keep_graph``: as torch has it; there is no graph of CUDA's to keep."""
        self._keep = bool(keep_graph)

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", **kwargs: Any
    ) -> None:
        machine = self._machine
        if machine.capture is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self._pool = pool if pool is not None else self._new_pool()
        self._index = machine.local.device
        stream = machine.stream(self._index)
        machine.devices[self._index].sim.begin_capture(self._pool[1], frozenset({stream}))
        self._capture = machine.capture = Capture(machine, self._index)
        self._open = True
        if machine.observer is not None:
            machine.observer.capture_begin(self._index, stream)

    def capture_end(self) -> None:
        if not self._open or self._pool is None or self._capture is None:
            raise RuntimeError("capture_end was called without capture_begin")
        machine = self._machine
        self._open = False
        machine.capture = None
        machine.devices[self._index].sim.end_capture(self._pool[1])
        observer, machine.observer = machine.observer, None  # these copies are not the program's
        try:
            self._capture.put_back()
        finally:
            machine.observer = observer
        if machine.observer is not None:
            self._capture.accesses = machine.observer.capture_end(self._index)

    def instantiate(self) -> None:
        return None

    def raw_cuda_graph(self) -> int:
        """A handle, which no other library can use. Raises RuntimeError as torch does."""
        if not self._keep:
            raise RuntimeError(
                "You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized "
                "with keep_graph=true"
            )
        if self._capture is None or self._open:
            raise RuntimeError(
                "You cannot access the raw cudaGraph_t instance until capture_end() has been called"
            )
        return id(self._capture)

    def raw_cuda_graph_exec(self) -> int:
        """A handle, which no other library can use. Raises RuntimeError as torch does."""
        if self._capture is None or self._open:
            raise RuntimeError(
                "You cannot access the raw cudaGraphExec_t instance until instantiate() has been "
                "called"
            )
        return id(self)

    def replay(self) -> None:
        if self._capture is None or self._open:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        machine = self._machine
        if machine.observer is not None:
            stream = machine.stream(self._index)
            machine.observer.graph_launch(self._capture.accesses, self._index, stream)
        self._capture.replay()

    def reset(self) -> None:
        if self._pool is not None and self._capture is not None:
            self._machine.devices[self._index].sim.release_pool(self._pool[1])
        self._capture = None

    def pool(self) -> tuple[int, int]:
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        return None

    def debug_dump(self, path: str) -> None:
        raise RuntimeError("the graph of a virtual GPU has no nodes to dump")

    def __del__(self) -> None:
        if not self._machine.closed and not self._open:
            self.reset()


def install(machine: Machine, patches: Patches) -> None:
    handles = itertools.count(1)
    devices = machine.devices

    def new_pool() -> tuple[int, int]:
        return (0, next(handles))

    def is_capturing() -> bool:
        return machine.capture is not None

    graph = type(
        "CUDAGraph", (CUDAGraph,), {"_machine": machine, "_new_pool": staticmethod(new_pool)}
    )
    for module in (torch.cuda, torch.cuda.graphs):
        names = {"CUDAGraph": graph, "graph_pool_handle": new_pool}
        patches.set_each(module, {**names, "is_current_stream_capturing": is_capturing})
    # The stream that captures by default is made once: it must be one of these devices.
    patches.set(torch.cuda.graphs.graph, "default_capture_stream", None)
    # Functions of their own: to a compiler, each is what it took the place of.
    below = {
        "_graph_pool_handle": lambda: new_pool(),
        "_cuda_isCurrentStreamCapturing": lambda: is_capturing(),
    }
    patches.set_each(torch.cuda.graphs, below)

    def begin(index: int, pool: tuple[int, int]) -> None:
        devices[index].sim.begin_capture(pool[1])

    def end(index: int, pool: tuple[int, int]) -> None:
        devices[index].sim.end_capture(pool[1])

    def release(index: int, pool: tuple[int, int]) -> None:
        devices[index].sim.release_pool(pool[1])

    pools = {
        "_cuda_beginAllocateToPool": begin,
        "_cuda_beginAllocateCurrentThreadToPool": begin,
        "_cuda_endAllocateToPool": end,
        "_cuda_releasePool": release,
    }
    patches.set_each(torch._C, {"_CUDAGraph": graph, **below, **pools})
    memory = torch.cuda.memory
    patches.set_each(memory, {name: call for name, call in pools.items() if hasattr(memory, name)})
