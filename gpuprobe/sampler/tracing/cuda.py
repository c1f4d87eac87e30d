"""Allocator history on CUDA: level ``trace`` with torch's own caching allocator.

torch's memory history is switched on for one step at a time, with Python stacks only
(``stacks="all"`` makes a dump a hundred times slower), and read at the end of the step. As soon as
the program records a history itself, it has that alone (`gpuprobe.torch_support.memory_history`),
and no trace is taken.

cuBLAS's workspaces are identified here too. Up to 2.14 torch allocates one for each handle and
stream at its first matrix product and keeps it (``getCurrentCUDABlasHandle`` in
``aten/src/ATen/cuda/CublasHandlePool.cpp``). The history has only the line of that product, and on
newer GPUs the size alone, 32 MiB, proves nothing: a workspace is the first block of that size for a
stream and a thread that no tensor owns when the step ends. Since 2.15 torch allocates one for each
product and frees it at once, unless ``TORCH_CUBLAS_WORKSPACE_CACHE`` is set
(``CUDABlasHandleWithWorkspace`` in ``ATen/cuda/CUDAContextLight.h``): a block of that size that is
freed before the next one is allocated, and no operator's result.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from gpuprobe.allocator.settings import with_memory_fraction
from gpuprobe.analysis.trace.categories import BACKWARD, Marks
from gpuprobe.catalogue.gpu_model import chosen_workspace, cublas_workspace
from gpuprobe.model.actions import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from gpuprobe.model.memory import Block, BlockState, Category, Segment
from gpuprobe.model.run.session import BlindSpot
from gpuprobe.model.trace import AllocatorSettings, EventColumns, Frame, MemoryTrace, StackTable
from gpuprobe.sampler.hooks.discover import live_tensors
from gpuprobe.sampler.tracing.calls import BackwardCalls, ModuleCalls
from gpuprobe.sampler.tracing.tensors import Known, plain_tensors
from gpuprobe.sampler.tracing.uses import Uses
from gpuprobe.torch_support import compiled_code
from gpuprobe.torch_support.memory_history import history
from gpuprobe.torch_support.snapshots import trace_of
from gpuprobe.torch_support.version import installed
from gpuprobe.user_frames import PACKAGE, name_of

BLIND_SPOTS = (
    BlindSpot(
        "device memory taken outside torch's caching allocator (NCCL, CUDA context, libraries)",
        "'allocated' and 'reserved' do not include it; the driver's 'used' does",
    ),
    BlindSpot(
        "the modules of backward passes on CUDA, outside compiled code",
        "their allocations are '(no module)', except gradients of parameters",
    ),
)

FOREIGN_HISTORY = BlindSpot(
    "the allocator's history, from the program's first call of _record_memory_history on",
    "no trace was taken of these steps, to keep the program's history intact; counters are "
    "complete",
)

OTHER_ALLOCATOR = BlindSpot(
    "the allocator's history: the program uses another allocator, which keeps none",
    "no trace was taken; counters are those of that allocator",
)

Place = tuple[str, int]  # device, address


class CudaTrace:
    """Takes one trace per device and step."""

    def __init__(self) -> None:
        self._awaits_cuda = False
        self._before = Before({}, {}, StackTable())
        self._walked: Mapping[int, Known] | None = None  # what `_before` is from
        self.modules = ModuleCalls()
        self.backward = BackwardCalls()
        self._workspaces = Workspaces()
        self.uses: Uses | None = None
        """What watches the uses of memory, if they are."""

    def begin(self) -> BlindSpot | None:
        """Start the history of a step; returns the reason if that is not possible: the program
        records its own, or uses another allocator.

        If the program has not used a GPU yet, the history starts when CUDA is initialised: the
        trace then contains what a program allocates first, its model.
        """
        if not _keeps_history():
            return OTHER_ALLOCATOR
        if not torch.cuda.is_initialized():
            if not self._awaits_cuda:
                self._awaits_cuda = True
                torch.cuda._lazy_call(self._begin_late)
            return None
        if not history.start():
            return FOREIGN_HISTORY
        self._begin_calls()
        return None

    def _begin_late(self) -> None:
        """Start the history late: the program initialises CUDA, and torch makes the calls that it
        had queued.
        """
        # The program may have changed the allocator meanwhile.
        if self._awaits_cuda and _keeps_history() and history.start():
            self._begin_calls()
        self._awaits_cuda = False

    def _begin_calls(self) -> None:
        self.modules.begin()
        self.backward.begin()

    def collect(self, step: int, known: Mapping[int, Known]) -> list[MemoryTrace]:
        """The traces of the step that ends now. ``known``: of a walk."""
        before = self._before
        if known is not self._walked:
            now = by_place(known)
            self._before = before._replace(known=now, origins=before.kept(now))
            self._walked = known
        if not history.on:
            return []
        live = self._before.add_live
        traces = layout_now(step, self._before.known, before, self._complete, live)
        self._walked = None  # the next step keeps fewer origins
        self.stop()
        return traces

    def now(self, step: int, known: Mapping[int, Known]) -> list[MemoryTrace]:
        """Every device's current layout, with the history and the calls recorded so far."""
        return layout_now(step, by_place(known), self._before, self._complete)

    def _complete(self, trace: MemoryTrace) -> None:
        """Add what the history does not contain: calls of modules and backward passes,
        workspaces.
        """
        self.backward.complete(trace)
        self.modules.complete(trace)
        uses = self.uses is not None and self.uses.complete(trace)
        self._workspaces.name(trace, uses=uses)

    def stop(self) -> None:
        """Switch the history off, if gpuprobe has started it."""
        self._awaits_cuda = False
        if history.on:
            history.stop()
            compiled_code.forget_calls()
            self.modules.end()
            self.backward.end()


def by_place(walked: Mapping[int, Known]) -> dict[Place, Known]:
    """What a walk found, by its place."""
    return {item[:2]: item for item in walked.values()}


def _keeps_history() -> bool:
    """Whether CUDA's allocator is torch's own: with others, recordHistory and snapshot raise."""
    backend = getattr(torch._C, "_cuda_getAllocatorBackend", None)  # none in a CPU build
    return backend is None or backend() == "native"


class Before(NamedTuple):
    """What is known at the end of a step of the blocks that are alive, for the trace of the next
    step: of those that this one frees, a snapshot has only the frees.
    """

    known: dict[Place, Known]
    origins: dict[Place, tuple[int, int]]
    """Stack and module, as indices of `table`: tuples of numbers alone, thousands of them, do not
    make Python's collector run more often."""
    table: StackTable

    def add_live(self, trace: MemoryTrace, owners: dict[int, tuple[EventColumns, int]]) -> None:
        """Note what allocated the blocks that are alive at the end of a trace: ``owners``."""
        table = self.table
        stacks: dict[int, int] = {}
        modules: dict[int, int] = {}
        for segment in trace.segments:
            for block in segment.blocks:
                if block.state is not BlockState.ALLOCATED or block.address not in owners:
                    continue
                rows, i = owners[block.address]
                stack, module = rows.stack[i], rows.module[i]
                if stack not in stacks:
                    frames = map(table.frame, trace.stacks.frames_of(stack))
                    stacks[stack] = table.stack(tuple(frames))
                if module not in modules:
                    modules[module] = table.string(trace.stacks.strings[module])
                self.origins[trace.device, block.address] = stacks[stack], modules[module]

    def kept(self, now: dict[Place, Known]) -> dict[Place, tuple[int, int]]:
        """The origins of the blocks that have the same place and the same role as before."""
        origins, before = self.origins, self.known.get
        return {
            place: origins[place]
            for place, item in now.items()
            if place in origins and before(place) == item
        }


def layout_now(
    step: int,
    known: Mapping[Place, Known],
    before: Before | None = None,
    complete: Callable[[MemoryTrace], None] | None = None,
    done: Callable[[MemoryTrace, dict[int, tuple[EventColumns, int]]], None] | None = None,
) -> list[MemoryTrace]:
    """Every device's current segments, with any history. ``before``: what was known when that
    history began; ``complete`` adds what was noted since; ``done`` gets each trace, and the row
    that allocated the last block at each address.
    """
    if not torch.cuda.is_initialized() or not _keeps_history():
        return []
    snapshot = history.read()
    compiled_code.in_program_lines(snapshot)
    used = {segment["device"] for segment in snapshot["segments"]}
    traces = []
    for index, events in enumerate(snapshot["device_traces"]):
        # A snapshot, of the program or of torch, is noted for each GPU.
        if index in used or any(event["action"] != "snapshot" for event in events):
            trace = trace_of(snapshot, index)
            _name_cells(trace.stacks)
            trace.step = step
            trace.settings = with_memory_fraction(
                trace.settings or AllocatorSettings(), _memory_fraction(index)
            )
            _drop_own_frames(trace.stacks)
            for column in ("category", "module", "stack"):
                for rows in (trace.baseline, trace.events):
                    getattr(rows, column).extend([0] * (len(rows) - len(getattr(rows, column))))
            if before is not None and trace.complete:
                _name_baseline(trace, before)
            if complete is not None:
                complete(trace)
            owners = _last_owners(trace)
            _stacks_of_blocks(trace, owners)
            _categorise(trace, owners, known)
            if done is not None:
                done(trace, owners)
            traces.append(trace)
    return traces


def _memory_fraction(device: int) -> float:
    """The part of the device that the program lets itself use; a snapshot does not have it."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # since torch 2.8
    return 1.0 if read is None else float(read(device))


def _drop_own_frames(table: StackTable) -> None:
    """Remove gpuprobe's own frames from all stacks."""
    own = {i for i, frame in enumerate(table.frames) if frame.filename.startswith(PACKAGE)}
    if own:
        table.stacks[:] = [
            tuple(i for i in stack if i not in own) if own.intersection(stack) else stack
            for stack in table.stacks
        ]


def _name_cells(table: StackTable) -> None:
    """Name the cells of a notebook instead of their temporary files."""
    if "IPython" in sys.modules:
        table.frames[:] = [one._replace(filename=name_of(one.filename)) for one in table.frames]


def _last_owners(trace: MemoryTrace) -> dict[int, tuple[EventColumns, int]]:
    """The row that allocated the last block at each address: columns and index."""
    last: dict[int, tuple[EventColumns, int]] = {
        address: (trace.baseline, i) for i, address in enumerate(trace.baseline.address)
    }
    events = trace.events
    for i, (action, address) in enumerate(zip(events.action, events.address, strict=True)):
        if action == ALLOC:
            last[address] = (events, i)
    return last


def _stacks_of_blocks(trace: MemoryTrace, owners: dict[int, tuple[EventColumns, int]]) -> None:
    """Replace the stacks of the layout's blocks by the complete ones of the rows that allocated
    them.
    """

    def completed(block: Block) -> Block:
        if block.state is BlockState.INACTIVE or block.address not in owners:
            return block
        rows, i = owners[block.address]
        stack = rows.stack[i]
        if stack == block.stack:
            return block
        return Block(block.address, block.size, block.requested_size, block.state, stack)

    def with_stacks(segment: Segment) -> Segment:
        blocks = tuple(map(completed, segment.blocks))
        same = all(map(operator.is_, blocks, segment.blocks))
        return segment if same else replace(segment, blocks=blocks)

    trace.segments = tuple(map(with_stacks, trace.segments))


def _name_baseline(trace: MemoryTrace, before: Before) -> None:
    """Set what was known of the blocks that existed when the trace began."""
    rows, table, earlier = trace.baseline, trace.stacks, before.table
    completed: dict[tuple[int, int], int] = {}
    for i, address in enumerate(rows.address):
        place = trace.device, address
        stack, module = before.origins.get(place, (0, 0))
        if stack:
            key = stack, rows.stack[i]
            if key not in completed:
                frames = tuple(map(table.frame, earlier.frames_of(stack)))
                # The block has what an earlier history had.
                more = set(frames) > set(table.stacks[rows.stack[i]])
                completed[key] = table.stack(frames) if more else rows.stack[i]
            rows.stack[i] = completed[key]
        name = earlier.strings[module]
        item = before.known.get(place)
        if item is not None:
            rows.category[i] = item.category.code
            name = item.module or name
        rows.module[i] = table.string(name)


def _categorise(
    trace: MemoryTrace,
    owners: dict[int, tuple[EventColumns, int]],
    known: Mapping[Place, Known],
) -> None:
    """Set the category of the blocks that are alive at the end of the trace, from a walk.

    An address may have had several owners: the walk found the last one.
    """
    for (device, address), item in known.items():
        if device == trace.device and address in owners:
            rows, i = owners[address]
            rows.category[i] = item.category.code
            if item.module:
                rows.module[i] = trace.stacks.string(item.module)


_FREED = (FREE_REQUESTED, FREE_COMPLETED)
_WORKSPACE = Category.WORKSPACE.code
_WORKSPACE_FRAME = Frame("??", 0, "at::cuda::CUDABlasWorkspace")


@functools.cache
def workspace_bytes(device: str) -> int:
    """The size of a workspace on a device, as torch chooses it (bytes)."""
    if hasattr(torch._C, "_cuda_getCublasWorkspaceSize"):  # since torch 2.9
        with torch.cuda.device(device):
            return int(torch._C._cuda_getCublasWorkspaceSize())
    return chosen_workspace(cublas_workspace(torch.cuda.get_device_capability(device), installed()))


class Workspaces:
    """The workspaces in the traces of one recording."""

    def __init__(self) -> None:
        self._places: set[tuple[str, int]] = set()

    def name(self, trace: MemoryTrace, *, uses: bool) -> None:
        """Set the category of the workspaces of a trace, and the name of the function that
        allocates them as the innermost frame. The trace's columns must be filled. ``uses``: they
        contain which blocks operators made tensors on, so that no search for tensors is needed.
        """
        size = workspace_bytes(trace.device)
        for i, address in enumerate(trace.baseline.address):
            if (trace.device, address) in self._places and trace.baseline.size[i] == size:
                trace.baseline.category[i] = _WORKSPACE
        made = trace.events.made if uses else ()
        if installed() >= _OF_EACH_PRODUCT:
            for row in _rows_freed_at_once(trace.events, size):
                if not made or not made[row]:
                    _name_workspace(trace, row)
        rows = list(_kept_rows(trace.events, size))
        if not rows:
            return
        if uses:
            rows = [row for row in rows if not made[row]]
            owned = set[int]()
        else:
            owned = _addresses_of_tensors(trace.device)
        marks = Marks(trace.stacks)
        met: set[tuple[int, bool]] = set()
        for row in rows:
            address = trace.events.address[row]
            stack = trace.events.stack[row]
            key = trace.events.column("stream")[row], bool(marks.of(stack) & BACKWARD)
            if key in met or address in owned:
                continue
            met.add(key)
            self._places.add((trace.device, address))
            _name_workspace(trace, row)


_OF_EACH_PRODUCT = (2, 15)
"""The version of torch from which on it allocates a workspace for each matrix product."""


def _name_workspace(trace: MemoryTrace, row: int) -> None:
    """Set the category of an event, and the function that allocates a workspace as its innermost
    frame.
    """
    trace.events.category[row] = _WORKSPACE
    frames = trace.stacks.stacks[trace.events.stack[row]]
    name = trace.stacks.frame(_WORKSPACE_FRAME)
    trace.events.stack[row] = trace.stacks.stack((name, *frames))


def _rows_freed_at_once(events: EventColumns, size: int) -> Iterator[int]:
    """The allocations of a size that are freed before the next allocation."""
    last = -1
    for row, (action, nbytes) in enumerate(zip(events.action, events.size, strict=True)):
        if action == ALLOC:
            last = row if nbytes == size else -1
        elif action == FREE_REQUESTED and last >= 0 and events.address[row] == events.address[last]:
            yield last
            last = -1


def _kept_rows(events: EventColumns, size: int) -> Iterator[int]:
    """The allocations of a size that are alive at the end of the trace."""
    live: dict[int, int] = {}
    for row, (action, nbytes) in enumerate(zip(events.action, events.size, strict=True)):
        if nbytes != size:
            continue
        if action == ALLOC:
            live[events.address[row]] = row
        elif action in _FREED:
            live.pop(events.address[row], None)
    return iter(sorted(live.values()))


def _addresses_of_tensors(device: str) -> set[int]:
    """The addresses of the storages of all tensors on a device."""
    found = set()
    for tensor in live_tensors():
        for plain in plain_tensors(tensor):
            if plain.is_cuda and str(plain.device) == device:
                found.add(plain.untyped_storage().data_ptr())
    return found
