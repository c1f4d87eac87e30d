"""Every storage on the CPU, from allocation to free: level ``trace`` without an allocator history.

The results of each operator are recorded (`gpuprobe.torch_support.operator_calls`); a weak
reference to each new storage reports when it is freed. So the account is exact at operator
boundaries: what an operator allocates and frees internally is not included (`BLIND_SPOTS`, which
are in the recording).
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch._ops import OpOverload

from gpuprobe.analysis.trace.categories import BUCKET, UNSHARDED, data_parallel_mark
from gpuprobe.clocks import time_ns
from gpuprobe.model.actions import ALLOC, FREE_COMPLETED
from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.run.session import BlindSpot
from gpuprobe.model.trace import EventColumns, Frame, LiveColumns, MemoryTrace, StackTable
from gpuprobe.model.values import Bytes, Unavailable
from gpuprobe.patching import patch
from gpuprobe.sampler.base import DeviceMark
from gpuprobe.sampler.failures import from_program
from gpuprobe.sampler.tracing.calls import ModuleNames
from gpuprobe.sampler.tracing.tensors import Known, passed_tensors, plain_tensors
from gpuprobe.torch_support.callers import passed_on
from gpuprobe.torch_support.operator_calls import Below, left_out, watch
from gpuprobe.torch_support.tensors import spans_memory
from gpuprobe.user_frames import program_stack

BLIND_SPOTS = (
    BlindSpot(
        "memory that one operator allocates and frees within itself (CPU scratch buffers)",
        "peaks are exact at operator boundaries, and may be higher inside an operator",
    ),
    BlindSpot(
        "storages created outside torch's dispatcher (NumPy arrays, shared memory)",
        "they are counted from their first use by an operator",
    ),
)

# The defaults of a `DeviceWindow`: the CPU allocator has no cache to report on, and a reason
# repeated in every window would be most of a recording.
_NO_CACHE = Unavailable("not collected")
_NO_RESERVED = AllocatorCounts().reserved
_BACKWARD_FILE = "<autograd>"
# The autograd node with which FSDP2 (torch 2.6 to 2.13) reduces and scatters gradients.
_FSDP_REDUCES = "RegisterPostBackwardFunctionBackward"
_LASTING = frozenset(
    {
        Category.PARAMETER,
        Category.GRADIENT,
        Category.OPTIMIZER_STATE,
        Category.BUFFER,
        Category.INPUT,
        Category.KV_CACHE,
    }
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_function_modes = torch._C._len_torch_function_stack
_TO_COPY = torch.ops.aten._to_copy.default
_BY_WHOM = {BUCKET: Category.GRADIENT_BUCKET, UNSHARDED: Category.GATHERED_PARAMETER}


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A live storage, as the weak reference whose callback reports that it is freed.

    The callback is C code: Python drops what is raised in one, and in a callback in Python that
    could be a KeyboardInterrupt.
    """

    __slots__ = ("address", "category", "freed_in", "key", "module", "nbytes", "path", "stack")

    key: int
    address: int
    nbytes: int
    path: str  # phase path at its allocation
    freed_in: str | None
    stack: int
    module: int
    category: Category


class CpuTrace:
    """Records CPU storages between `start` and `stop`; a `MemorySource` for device ``cpu``."""

    def __init__(self, path: Callable[[], str], on_fault: Callable[[Exception], None]) -> None:
        self.active = False
        self._path = path
        self._thread = 0
        self._end: Callable[[], None] = lambda: None
        self._on_fault = on_fault
        self._left_out = left_out.calls
        self._live: dict[int, _Storage] = {}
        self._freed: deque[_Storage] = deque()  # not accounted for yet
        self._allocated = 0
        self._peak = 0
        self._events: list[tuple[int, _Storage, int, str]] = []
        self._baseline: list[_Storage] = []
        self._stacks = StackTable()
        self._stack_ids: dict[
            tuple[CodeType | int, ...], int
        ] = {}  # code and instruction, alternating
        self._restore: Callable[[], None] = lambda: None
        self._category_of_stack: dict[int, Category] = {}  # for stacks that determine it
        self._kept: Counter[int] = Counter()  # by stack: storages that calls of a model keep
        self._made: Counter[int] = Counter()  # by stack: all, since the first was kept
        self._here: tuple[int, int] | None = None  # stack and module of the current operator
        self._origin: dict[int, tuple[int, int]] = {}  # autograd node number -> stack, module
        self._backward_stacks: dict[tuple[int, str], int] = {}
        self._sequence = 0
        self._modules: list[int] = [0]
        self._names = ModuleNames()

    # -- switching on and off

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin recording; ``tensors`` are those that already exist."""
        self.active = True
        self._thread = threading.get_ident()
        for tensor in tensors:
            self._record_tensor(tensor, no_origin=True)
        self._events.clear()  # they existed before: baseline, not events
        self._baseline = list(self._live.values())
        self._peak = self._allocated
        self._sequence = torch._C._autograd._get_sequence_nr()
        # FSDP2 frees and allocates whole parameters by resizing their storages, without an
        # operator.
        self._restore = patch(torch.UntypedStorage, "resize_", self._wrapped_resize())
        self._end = watch(self.handle)

    def stop(self) -> None:
        """Stop recording."""
        self.active = False
        self._restore()
        self._end()
        self._live.clear()
        self._freed.clear()

    def missed(self) -> BlindSpot | None:
        """What this trace does not include, apart from `BLIND_SPOTS`."""
        spot = left_out.since(self._left_out)
        if not spot:
            return None
        return BlindSpot(
            spot, "storages that they create are counted from their first use by another operator"
        )

    # -- called by the recorder

    def read(self) -> tuple[DeviceMark, ...]:
        self._take_freed()
        allocated = Bytes(self._allocated)
        peak, self._peak = self._peak, self._allocated
        counts = AllocatorCounts(allocated, allocated, _NO_RESERVED, allocated)
        return (DeviceMark("cpu", counts, _NO_CACHE, _NO_CACHE, _NO_CACHE, exact_peak=peak),)

    def mark_known(self, known: Mapping[int, Known]) -> None:
        """Set the category and the module of the storages that a walk recognised."""
        self._take_freed()
        live = self._live
        for key, item in known.items():
            storage = live.get(key)
            if storage is not None:
                storage.category = item.category
                if item.module:
                    storage.module = self._stacks.string(item.module)

    def mark_inputs(self, values: object, *, inference: bool = False) -> None:
        """Set the category *input* for tensors that the model was called with; in inference,
        *kv_cache* for those that modules made in earlier calls and those that caches hold.
        """
        for value, state in passed_tensors(values):
            for plain in plain_tensors(value):
                storage = self._live.get(plain.untyped_storage()._cdata)
                if storage is not None and storage.category not in _LASTING:
                    if inference and (state or storage.module):
                        self._keep(storage)
                    else:
                        storage.category = Category.INPUT

    def mark_kept(self, values: object) -> None:
        """Set the category *kv_cache* for state that a model returned for its next call."""
        for value, state in passed_tensors(values):
            for plain in plain_tensors(value) if state else ():
                storage = self._live.get(plain.untyped_storage()._cdata)
                if storage is not None and storage.category not in _LASTING:
                    self._keep(storage)

    def _keep(self, storage: _Storage) -> None:
        storage.category = Category.KV_CACHE
        if storage.stack:
            self._kept[storage.stack] += 1

    def name_modules(self, roots: Iterable[torch.nn.Module]) -> None:
        """Name every module below these roots: ``Class.dotted.path``."""
        self._names.add(roots)

    def enter_module(self, module: torch.nn.Module) -> None:
        self._modules.append(self._stacks.string(self._names.of(module)))

    def leave_module(self) -> None:
        if len(self._modules) > 1:
            self._modules.pop()

    def collect(self, step: int) -> MemoryTrace:
        """All events since the last call, as one trace; the next trace starts."""
        self._resized_elsewhere()
        events, self._events = self._events, []
        baseline, self._baseline = self._baseline, list(self._live.values())
        self._origin.clear()
        trace = MemoryTrace(device="cpu", step=step)
        if self._kept:
            self._name_kept(events)
        copy = _TableCopy(self._stacks, trace.stacks)
        rows = LiveColumns()
        for storage in baseline:
            copy.row(rows, ALLOC, storage, 0, storage.path)
        trace.baseline = rows
        for action, storage, time_us, path in events:
            copy.row(trace.events, action, storage, time_us, path)
        return trace

    def _name_kept(self, events: list[tuple[int, _Storage, int, str]]) -> None:
        """Set the category *kv_cache* for tensors made by modules on lines where most are kept: the
        last one of a sequence was made like those before it, but no call followed that got it.
        """
        made = [storage for action, storage, _, _ in events if action == ALLOC]
        self._made.update(storage.stack for storage in made)
        open_ = Counter(
            storage.stack
            for storage in self._live.values()
            if storage.category is Category.UNKNOWN and storage.stack in self._kept
        )
        usual = {s for s, kept in self._kept.items() if 2 * kept > self._made[s] - open_[s]}
        for storage in made:
            if storage.category is Category.UNKNOWN and storage.module and storage.stack in usual:
                storage.category = Category.KV_CACHE

    def discard(self) -> None:
        """Forget the events since the last `collect`, as if they had been collected."""
        self._resized_elsewhere()
        self._events.clear()
        self._baseline = list(self._live.values())
        self._origin.clear()

    # -- recording

    def handle(self, func: OpOverload, args: Any, kwargs: Any, below: Below) -> Any:
        """Handle an operator: see `gpuprobe.torch_support.operator_calls`."""
        try:
            result = below(func, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again
            args = kwargs = None
            raise passed_on(error)  # noqa: B904 - the same one
        if self.active and threading.get_ident() == self._thread:
            try:
                if _function_modes():  # the program's: what is read here must not reach them
                    with torch._C.DisableTorchFunction():
                        self._record_call(func, args, result)
                else:
                    self._record_call(func, args, result)
            except Exception as error:  # it must not end the training
                if from_program(error):
                    raise
                self.active = False
                self._on_fault(error)
        return result

    def _record_call(self, func: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        # torch.tensor fills its memory internally, then passes it to lift_fresh: that argument is
        # new, and was allocated on this very line.
        self._record(() if func is _LIFT_FRESH else args, result)
        if func is _TO_COPY and type(args[0]) is torch.nn.Parameter:
            self._record_cast(args[0], result)

    def _record(self, args: tuple[Any, ...], result: Any) -> None:
        if self._freed:
            self._take_freed()
        live = self._live
        self._here = None
        for value in args:
            if type(value) in _PLAIN:
                if value.is_cpu and value.layout is torch.strided:
                    storage = value.untyped_storage()
                    if storage._cdata not in live:
                        self._record_alloc(storage, no_origin=True)
            elif type(value) is list or isinstance(value, torch.Tensor):
                self._record_value(value, no_origin=True)
        sequence = torch._C._autograd._get_sequence_nr()
        if sequence != self._sequence:
            if sequence > self._sequence:
                origin = self._here = (self._stack(), self._modules[-1])
                for number in range(self._sequence, sequence):
                    self._origin[number] = origin
            self._sequence = sequence
        if type(result) is torch.Tensor and result.is_cpu and result.layout is torch.strided:
            self._record_storage(result.untyped_storage(), False)  # nearly every operator
        elif result is not None:
            self._record_value(result, no_origin=False)

    def _wrapped_resize(self) -> Callable[..., Any]:
        original = torch.UntypedStorage.resize_

        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
            result = original(storage, *args)
            if self.active and storage.device.type == "cpu":
                try:
                    self._here = (self._stack(), self._modules[-1])
                    self._record_storage(storage, False)
                except Exception as error:  # as in `handle`
                    if from_program(error):
                        raise
                    self.active = False
                    self._on_fault(error)
            return result

        return resize_

    def _record_cast(self, weight: torch.Tensor, result: torch.Tensor) -> None:
        """Handle the conversion of a parameter. autocast does that, and keeps the result until its
        outermost context ends. Whether it was autocast cannot be checked here: it hides itself
        meanwhile.
        """
        if weight.is_leaf and weight.requires_grad and weight.dtype is not result.dtype:
            storage = self._live.get(result.untyped_storage()._cdata)
            if storage is not None:
                storage.category = Category.WEIGHT_CAST

    def _record_value(self, value: object, *, no_origin: bool) -> None:
        if isinstance(value, torch.Tensor):
            self._record_tensor(value, no_origin=no_origin)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._record_value(item, no_origin=no_origin)

    def _record_tensor(self, tensor: torch.Tensor, *, no_origin: bool) -> None:
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            if tensor.is_cpu:
                self._record_storage(tensor.untyped_storage(), no_origin)
            return
        with torch._C.DisableTorchFunctionSubclass():
            for plain in plain_tensors(tensor):
                if plain.is_cpu:
                    self._record_storage(plain.untyped_storage(), no_origin)

    def _record_storage(self, storage: torch.UntypedStorage, no_origin: bool) -> None:
        known = self._live.get(storage._cdata)
        if known is None or known() is None:  # or another storage had this place, and was freed
            self._take_freed()
            self._record_alloc(storage, no_origin=no_origin)
        elif known.nbytes != storage.nbytes():  # resize_: the same storage, different memory
            self._record_free(known)
            self._record_alloc(storage, no_origin=no_origin, like=known)

    def _record_alloc(
        self, storage: torch.UntypedStorage, *, no_origin: bool, like: _Storage | None = None
    ) -> None:
        nbytes = storage.nbytes()
        if not nbytes or spans_memory(nbytes):
            return
        try:
            address = storage.data_ptr()
        except RuntimeError:  # a wrapper (torch.func) without memory
            return
        entry = _Storage(storage, self._freed.append)
        entry.key = storage._cdata
        entry.address = address
        entry.nbytes = nbytes
        entry.path = path = self._path()
        entry.freed_in = None
        entry.category = Category.UNKNOWN if like is None else like.category
        if (
            no_origin
        ):  # it was allocated before or outside the recorded operators: its line is unknown
            entry.stack = entry.module = 0
        else:
            entry.stack, entry.module = self._current_origin()
            if entry.stack in self._category_of_stack:
                entry.category = self._category_of_stack[entry.stack]
        self._live[entry.key] = entry
        self._allocated += nbytes
        if self._allocated > self._peak:
            self._peak = self._allocated
        self._events.append((ALLOC, entry, time_ns() // 1000, path))

    def _take_freed(self) -> None:
        """Account for freed storages: before anything new is recorded, and before each change of
        the phase.
        """
        freed = self._freed
        while freed:
            self._record_free(freed.popleft())

    def _record_free(self, entry: _Storage) -> None:
        """Record that a storage was freed, or changed its size."""
        if self._live.get(entry.key) is not entry:
            return
        del self._live[entry.key]
        self._allocated -= entry.nbytes
        entry.freed_in = path = self._path()
        self._events.append((FREE_COMPLETED, entry, time_ns() // 1000, path))

    def _resized_elsewhere(self) -> None:
        """Find storages that were resized without an operator (``untyped_storage().resize_``)."""
        self._take_freed()
        for entry in list(self._live.values()):
            storage = entry()
            if storage is not None and storage.nbytes() != entry.nbytes:
                self._record_free(entry)
                self._record_alloc(storage, no_origin=True, like=entry)

    # -- places in the program

    def _current_origin(self) -> tuple[int, int]:
        if self._here is not None:
            return self._here
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack(), self._modules[-1]
        stack, module = self._origin.get(node._sequence_nr(), (0, 0))
        if not stack:  # AccumulateGrad, or an earlier graph: the line that called backward
            stack = self._stack()
        key = (stack, node.name())
        found = self._backward_stacks.get(key)
        if found is None:
            table = self._stacks
            frame = table.frame(Frame(_BACKWARD_FILE, 0, key[1]))
            found = self._backward_stacks[key] = table.stack((frame, *table.stacks[stack]))
            if key[1] == _FSDP_REDUCES:
                self._category_of_stack[found] = Category.GRADIENT_BUCKET
        return found, module

    def _stack(self) -> int:
        # The key consists of instructions and not line numbers: CPython has to search for a line.
        frame: FrameType | None = sys._getframe(1)
        key: list[CodeType | int] = []
        while frame is not None:
            key.append(frame.f_code)
            key.append(frame.f_lasti)
            frame = frame.f_back
        found = self._stack_ids.get(tuple(key))
        if found is None:
            found = self._stack_ids[tuple(key)] = self._new_stack(sys._getframe(1))
        return found

    def _new_stack(self, frame: FrameType | None) -> int:
        table = self._stacks
        made = table.stack(tuple(map(table.frame, program_stack(frame))))
        maker = data_parallel_mark(table.frames_of(made))
        if maker:
            self._category_of_stack[made] = _BY_WHOM[maker]
        return made


class _TableCopy:
    """Copies the strings and stacks that a chunk uses, so that each chunk is self-contained."""

    def __init__(self, source: StackTable, target: StackTable) -> None:
        self._source = source
        self._target = target
        self._stacks: dict[int, int] = {0: 0}
        self._modules: dict[int, int] = {0: 0}

    def row(
        self,
        rows: LiveColumns | EventColumns,
        action: int,
        storage: _Storage,
        time_us: int,
        path: str,
    ) -> None:
        stack = self._stacks.get(storage.stack)
        if stack is None:
            source, target = self._source, self._target
            frames = tuple(target.frame(f) for f in source.frames_of(storage.stack))
            stack = self._stacks[storage.stack] = target.stack(frames)
        module = self._modules.get(storage.module)
        if module is None:
            name = self._source.strings[storage.module]
            module = self._modules[storage.module] = self._target.string(name)
        rows.append(
            action,
            storage.address,
            storage.nbytes,
            time_us=time_us,
            stack=stack,
            category=_category(storage).code,
            module=module,
            phase=self._target.string(path),
        )


def _category(storage: _Storage) -> Category:
    """The category of a storage: from a walk, otherwise from the phases that allocated and freed
    it.

    Allocated in the forward pass: still alive when the backward pass began means *activation*,
    otherwise *temporary*; the same for recomputation by checkpointing. Otherwise allocated in the
    backward pass and not a gradient: *autograd_detail*. What the optimizer allocates and frees is
    *temporary*.
    """
    if storage.category is not Category.UNKNOWN:
        return storage.category
    allocated_in, freed_in = _base(storage.path), _base(storage.freed_in)
    if allocated_in in ("forward", "evaluation", "recompute"):
        category = Category.TEMPORARY if freed_in == allocated_in else Category.ACTIVATION
    elif allocated_in == "backward":
        category = Category.AUTOGRAD_DETAIL
    elif allocated_in == "data":
        category = Category.INPUT
    elif not storage.stack:
        return Category.UNKNOWN
    else:
        category = Category.TEMPORARY if freed_in == allocated_in else Category.OTHER
    if storage.freed_in is None:
        storage.category = category  # it stays alive: the same category in the next chunk
    return category


_PHASES = ("backward", "forward", "evaluation", "recompute", "optimizer", "data")


def _base(path: str | None) -> str | None:
    """The phase that decides a category: the innermost known one of a path."""
    if path is None:
        return None
    for name in reversed(path.split("/")):
        if name in _PHASES:
            return name
    return path
