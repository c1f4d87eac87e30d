"""The uses of memory: for each block, the operators that made a tensor on it and used its values.

The allocator's history has the birth and the death of a block. In between, every operator that
torch runs is handled (`gpuprobe.torch_support.operator_calls`), and the addresses of its tensors
are noted with its number. When the trace of the step is complete, they are matched with the blocks
that were at these addresses then, by the clock of the history, as the calls of modules are
(`gpuprobe.sampler.tracing.calls`). Calls of compiled graphs and replays of CUDA graphs count as one
use of what they touch. Blocks that are alive when a traced step ends are followed into later steps.

Nothing is kept alive and the GPU is not queried: an address is read from the tensor.

A simulated GPU is slower than that anyway, and its uses are always noted. On hardware each operator
waits for Python, so it is an option; `Uses.cost` is how long that was.
"""

from __future__ import annotations

import functools
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch._ops import OpOverload

from gpuprobe.clocks import perf_counter_ns, time_ns
from gpuprobe.model.actions import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import UsesCost
from gpuprobe.model.run.session import LaterUses
from gpuprobe.model.trace import (
    GRAD_OFF,
    GRAD_ON,
    GRAPH_REPLAY,
    Made,
    MemoryTrace,
)
from gpuprobe.patching import Patches
from gpuprobe.sampler.failures import from_program
from gpuprobe.sampler.tracing.flow import (
    CHANGE,
    COMPILED_GRAPH,
    KINDS,
    MADE,
    OVERWRITE,
    USE,
    BlockColumns,
    Flow,
    Note,
    Origin,
)
from gpuprobe.sampler.tracing.flow import Operator as Done
from gpuprobe.sampler.tracing.inspection import requested
from gpuprobe.sampler.tracing.nccl_calls import NcclCall, follow_nccl_calls
from gpuprobe.sampler.tracing.pinned import PinnedTensors, pins
from gpuprobe.sampler.tracing.places import OperatorPlaces
from gpuprobe.sampler.tracing.work import WorkTrace
from gpuprobe.torch_support.callers import passed_on
from gpuprobe.torch_support.compiled_calls import follow_compiled_calls
from gpuprobe.torch_support.kernels import (
    HIDDEN_VIEWS,
    OVERWRITES,
    makes_view,
    runs_kernel,
    takes_shape,
)
from gpuprobe.torch_support.operator_calls import unhandled, watch
from gpuprobe.torch_support.tensors import parts, size_of

MOST_USES: Final = 1 << 24
"""Uses of one step that are noted, in 40 bytes each. A step with more has none: a program without
steps would fill the memory."""
_WAITING: Final = 1 << 16
"""Values of uses, `_VALUES` each, that wait to be moved to columns: these take less memory, but are
quicker to fill with many values at once."""
_VALUES: Final = 5
_MANY: Final = 8
"""Tensors in a list from which on they are noted together: that takes six lists, which Python's
collector visits."""
_CALL: Final = 5
"""Values of an operator: when it began (nanoseconds on the clock of the history), its place,
whether gradients were on, the phase, and what it does."""
_BEGAN, _PLACE, _GRAD, _PHASE, _ABOUT = range(_CALL)

_FILLS: Final = frozenset(("zero_", "fill_", "_foreach_zero_"))
_FILLED: Final = frozenset(
    """zeros ones full empty rand randn randint arange zeros_like ones_like full_like empty_like
    rand_like randn_like new_zeros new_ones new_full new_empty scalar_tensor empty_strided
    new_empty_strided bernoulli eye linspace""".split()  # noqa: SIM905 - a list to be read
)
_COPIES: Final = frozenset(
    """clone _to_copy copy_ repeat cat stack index_select repeat_interleave _foreach_copy_ roll flip
    constant_pad_nd contiguous _reshape_copy expand_copy tile""".split()  # noqa: SIM905 - a list to be read
)
"""Operators that make tensors of what is there: from nothing, and of others' elements."""

_COPY: Final = Made.COPY
_WORKSPACE = Category.WORKSPACE.code
_FREES = (FREE_REQUESTED, FREE_COMPLETED)
_NEVER: Final = 1 << 62
_grad_enabled: Final = torch.is_grad_enabled
_Tensor: Final = torch.Tensor
_data_address: Final = torch.Tensor.data_ptr
_first_element: Final = torch.Tensor.storage_offset
_is_dense: Final = torch.Tensor.is_contiguous
_is_cuda: Final = attrgetter("is_cuda")
_nbytes: Final = attrgetter("nbytes")
_itemsize: Final = attrgetter("itemsize")
_MOST_PADDED: Final = 1 << 20  # elements of a batch whose padding is searched
_ALL: Final = 1 << 62  # bytes: more than any block has
_NO_VALUES: Final = -1
_LOWEST_BYTES: Final = slice(0 if sys.byteorder == "little" else 7, None, 8)
_ARE_MADE: Final = bytes(byte % KINDS == MADE for byte in range(256))
"""By the lowest byte of an entry of the log, whether a tensor was made: `KINDS` divides 256."""


_TIMED: Final = 64
"""Every 64th operator is timed, if the cost is requested (`run --uses`)."""
_CALLS: Final = 200
"""Calls of an operator that does nothing, to time what the watch alone costs."""


class _Operator(NamedTuple):
    """What one operator does with its arguments and results. Created once."""

    name: str
    uses: bool
    kinds: tuple[int, ...]  # of notes, by argument; negative for one whose values do not count
    makes: bool
    how: int
    views: bool = False  # it only makes views, and neither reads memory nor allocates any
    reads_number: bool = False  # and nothing else, on the CPU or not
    op: OpOverload | None = None


def _named(name: str) -> _Operator:
    """What is noted as an operator, and is none."""
    return _Operator(name, True, (), False, Made.OTHER)


_KERNEL: Final = _named("")
_COMPILED_GRAPH: Final = _named(COMPILED_GRAPH)
_GRAPH_REPLAY: Final = _named(GRAPH_REPLAY)


def _described(op: OpOverload) -> _Operator:
    returns = op._schema.returns
    name = op._schema.name.rpartition("::")[2]
    uses = runs_kernel(op)
    return _Operator(
        name,
        uses,
        tuple(_kinds(op, name)) if uses else (),
        bool(returns)
        and all(one.alias_info is None for one in returns)
        and name not in HIDDEN_VIEWS,
        _how(op, name),
        makes_view(op),
        name == "_local_scalar_dense",
        op,
    )


def _kinds(op: OpOverload, name: str) -> Iterator[int]:
    for at, one in enumerate(op._schema.arguments):
        if not at and takes_shape(name):
            yield _NO_VALUES
        elif not at and name in OVERWRITES:
            yield OVERWRITE
        else:
            yield CHANGE if one.alias_info is not None and one.alias_info.is_write else USE


def _how(op: OpOverload, name: str) -> int:
    if name in _COPIES:
        return Made.COPY
    if name in _FILLED:
        return Made.FILL
    return Made.POINTWISE if torch.Tag.pointwise in op.tags else Made.OTHER


class Uses:
    """The uses of device memory in one recording, from `install` on."""

    def __init__(
        self,
        places: OperatorPlaces,
        path: Callable[[], str],
        on_fault: Callable[[Exception], None],
        *,
        timed: bool = False,
    ) -> None:
        """``path`` returns the phase that the program is in; ``timed``: for `cost`."""
        self._timed = timed
        self._spent = self._samples = 0  # nanoseconds, of that many operators
        self._places = places
        self._path = path
        self._on_fault = on_fault
        self._on = False
        self._inspection = requested()
        self._operators: dict[int, _Operator] = {}
        """By identity: operators have a hash in Python, which takes as long as all of a view."""
        self._count = 0
        """Operators that have begun since the recording did."""
        self._last: dict[int, int] = {}
        """By address, the last entry of the log for the block there."""
        self._made: dict[int, int] = {}
        """By address, the entry with which a tensor was made on the block there, or its first."""
        self._origins: dict[int, Origin] = {}
        """By address, how the block there was made, if it was alive when a trace ended."""
        self._followed: dict[int, tuple[tuple[str, bool, int], ...]] = {}
        """By address, the block there if it was alive when traces ended, and is not used since: the
        name of each trace, whether its row is one of the baseline, and the row."""
        self._padded: dict[int, int] = {}
        """By operator, the bytes of padding in the batch that it copied to the GPU."""
        self._alive: dict[str, list[tuple[int, bool, int]]] = {}
        """By device, what is alive at the end of the trace that was completed last."""
        self._later: dict[str, tuple[list[int], list[int]]] = {}
        self._capturing: set[int] | None = None
        """The addresses that the CUDA graph which is captured has used so far."""
        self._in_graph = 0  # where the uses by the compiled graph that runs begin in the log
        self.pinned = PinnedTensors(lambda place: places.places[place][0])
        self.work: WorkTrace | None = None
        """Gets the operators, too, if calls to the GPU can be logged."""
        self.traces_now: Callable[[], list[MemoryTrace]] = list
        """Returns the traces of the step so far, for an inspection."""
        self._begin_log()

    def _begin_log(self) -> None:
        """Forget the uses so far, for the next trace."""
        self._before = self._made.copy(), self._last.copy()
        calls: list[Any] = []  # the operators that begin from now on, `_CALL` values each
        self._base, self._calls = self._count, calls  # no call in between: see `_add`
        self._log: list[int] = []  # the values of the latest uses, one use after the other
        # Those of lists of tensors: the length of the log then, and each value of all uses.
        self._lists: list[tuple[int, int, list[int], list[int], list[int], list[int]]] = []
        self._settled = 0  # uses, in columns, that `_settle` has handled
        self._address = array("Q")
        self._entry = array("Q")  # operator × KINDS + kind
        self._bytes = array("Q")
        self._offset = array("Q")
        self._width = array("Q")

    # -- tracing

    def install(self, patches: Patches) -> None:
        """Watch until ``patches`` are undone."""
        self._on = True
        patches.add(self.stop)
        patches.add(watch(self._operator))
        follow_compiled_calls(patches, self._graph_called, self._graph_returned)
        follow_nccl_calls(patches, self._nccl_called)
        graph = torch.cuda.CUDAGraph
        for name, report in (
            ("capture_begin", self._capture_began),
            ("capture_end", self._capture_ended),
            ("replay", self._replayed),
        ):
            patches.set(graph, name, self._reporting(getattr(graph, name), report))

    def follow(self, work: WorkTrace, patches: Patches) -> None:
        """Give operators, and Triton's kernels, to ``work``, too."""
        self.work = work
        work.install(patches, self._kernel_begins)

    def stop(self) -> None:
        """Watch no more; what was noted is kept."""
        self._on = False

    def begin_step(self) -> None:
        """A step begins: the uses of earlier ones belong to no trace any more."""
        self._settle()
        self._begin_log()
        if not self._places.counted:
            self._places.begin()

    def _guarded(self, method: Callable[..., None], *args: Any) -> None:
        try:
            method(*args)
        except Exception as error:  # an internal error must not end the program
            if from_program(error):
                raise
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """An internal error ends the watch."""
        self.stop()
        self._on_fault(error)

    def _operator(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        below: Callable[[Any, Any, Any], Any],
    ) -> Any:
        """An operator is called: see `gpuprobe.torch_support.operator_calls`."""
        # It is called for each operator of the program: it has few calls.
        if not self._on:
            return below(op, args, kwargs)
        about = self._operators.get(id(op)) or self._describe_operator(op)
        if about.views or (about.reads_number and not args[0].is_cuda):
            work = self.work
            if work is None or not work.on:
                if about.views:
                    self._places.viewed()
                return below(op, args, kwargs)
            placed = self._places.counted  # then `below` queries the place
            place = 0 if placed else self._places.here()
            try:
                return below(op, args, kwargs)
            finally:
                work.note_host_only(self._places.current if placed else place, self._path())
        began = perf_counter_ns() if self._timed and not self._count % _TIMED else 0
        placed = self._places.counted
        place = 0 if placed else self._places.here()
        number = self._add(place, "", about)
        if began:
            self._spent += perf_counter_ns() - began
        work = self.work
        outer = work.begin(number) if work is not None and work.on else None
        try:
            result = below(op, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again
            # One that runs out of memory needs its arguments too.
            self._guarded(self._returned, about, args, kwargs, None, number, placed)
            del args, kwargs
            raise passed_on(error)  # noqa: B904 - the same one
        finally:
            if outer is not None:
                work.end(outer)  # type: ignore[union-attr]
        if began:
            began = perf_counter_ns()
        try:
            self._returned(about, args, kwargs, result, number, placed)
        except Exception as error:  # an internal error must not end the program
            if from_program(error):
                raise
            self._failed(error)
        if began:
            self._spent += perf_counter_ns() - began
            self._samples += 1
        return result

    def _describe_operator(self, op: OpOverload) -> _Operator:
        try:
            about = self._operators[id(op)] = _described(op)
        except Exception as error:  # an internal error must not end the program
            if from_program(error):
                raise
            self._failed(error)
            return _KERNEL
        return about

    def cost(self) -> UsesCost | None:
        """What noting uses has cost so far, if ``timed``; None without an operator. One in `_TIMED`
        was timed, and the call of the watch is timed in a loop. Watches no more: call it before the
        watch is undone.
        """
        self.stop()
        if not self._samples:
            return None
        noted = self._spent // self._samples
        return UsesCost(self._count, noted + max(0, _watch_ns() - _unhandled_ns()))

    def _begins(self, place: int, about: _Operator) -> int:
        """Something begins that is noted as an operator, and is none. Returns its number."""
        return self._add(place, self._path(), about)

    def _add(self, place: int, phase: str, about: _Operator) -> int:
        """An operator begins. Returns its number."""
        values = time_ns(), place, GRAD_ON if _grad_enabled() else GRAD_OFF, phase, about
        # Python changes to another thread, or handles a signal, at calls and jumps alone: without
        # one in between, the values are at the place that the number has.
        self._count = number = self._count + 1
        self._calls += values
        return number

    def _returned(
        self,
        about: _Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        number: int,
        placed: bool,
    ) -> None:
        phase = self._path()
        calls, at = self._calls, (number - self._base - 1) * _CALL  # no call: see `_add`
        if at < 0:  # a step ended meanwhile, in another thread
            return
        calls[at + _PHASE] = phase
        if placed:
            calls[at + _PLACE] = self._places.current
        place = calls[at + _PLACE]
        work = self.work
        if work is not None and work.on:
            work.note(number, place, phase, about.op, args, kwargs, result)
        if about.uses:
            self._note_arguments(about, args, kwargs, number)
        if about.makes and result is not None:
            self._note_made(about, args, kwargs, result, number, place)
        if len(self._log) > _WAITING:
            self._pack()
        if self._inspection is not None and number >= self._inspection.operator:
            self._inspection.search_and_exit(self.traces_now)
            self._inspection = None  # it was about another rank

    def _note_arguments(
        self, about: _Operator, args: tuple[Any, ...], kwargs: dict[str, Any], number: int
    ) -> None:
        begin = number * KINDS
        for value, note in zip(args, about.kinds):  # noqa: B905 - fewer, without defaults
            if isinstance(value, _Tensor):
                if note >= 0:
                    self._note_tensor(value, begin + note)
            elif (kind := type(value)) is list or kind is tuple:
                self._note_list(value, begin + note)
        if kwargs:
            for value in kwargs.values():
                self._note(value, begin + USE)

    def _note_made(
        self,
        about: _Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        number: int,
        place: int,
    ) -> None:
        self._note(result, number * KINDS + MADE)
        if about.how == _COPY and args and isinstance(result, _Tensor):
            self._note_padding(args[0], result, number)
        if pins(about.name, kwargs):
            self.pinned.made(result, place)

    def _note(self, value: object, entry: int) -> None:
        """Note the memory of a tensor, or of those in lists of them, with an entry of the log."""
        if isinstance(value, _Tensor):
            self._note_tensor(value, entry)
        elif isinstance(value, (list, tuple)):
            self._note_list(value, entry)

    def _note_tensor(self, tensor: torch.Tensor, entry: int) -> None:
        if not tensor.is_cuda:
            return
        try:
            width = tensor.itemsize
            address = _data_address(tensor)
            offset = _first_element(tensor)
            address = address - offset * width if address else tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # no storage, or none with memory
            for part in parts(tensor):
                self._note_tensor(part, entry)
            return
        if address:
            size = tensor.nbytes if _is_dense(tensor) else size_of(tensor)
            self._log.extend((address, entry, size, offset, width))

    def _note_list(self, values: Sequence[Any], entry: int) -> None:
        """Note a list: if all are dense tensors on a GPU, as in operators over all parameters, in a
        few calls.
        """
        if not values or type(values[0]) is int:
            return
        try:
            alike = (
                len(values) >= _MANY and all(map(_is_cuda, values)) and all(map(_is_dense, values))
            )
            addresses = list(map(_data_address, values)) if alike else []
            offsets = list(map(_first_element, values)) if alike else []
        except (AttributeError, TypeError, NotImplementedError, RuntimeError):
            alike = False  # no tensor, or one without storage
        if not alike or any(offsets) or not all(addresses):
            for value in values:
                self._note(value, entry)
            return
        sizes, widths = list(map(_nbytes, values)), list(map(_itemsize, values))
        self._lists.append((len(self._log), entry, addresses, sizes, offsets, widths))

    def _pack(self) -> None:
        """Move the uses that wait to the columns, in their order."""
        log, self._log = self._log, []
        lists, self._lists = self._lists, []
        flat = array("Q", log)  # arrays are extended by arrays in one piece
        begin, end = 0, len(flat)
        columns = (self._address, self._entry, self._bytes, self._offset, self._width)
        for at, entry, addresses, *others in (*lists, (end, 0, [], [], [], [])):
            for index, column in enumerate(columns):
                column.extend(flat[begin + index : at : _VALUES])
            begin = max(begin, at)  # another thread may have added one meanwhile
            entries = array("Q", (entry,)) * len(addresses)
            for column, values in zip(columns, (addresses, entries, *others), strict=True):
                column.extend(array("Q", values))
        if len(self._address) > MOST_USES:
            self.stop()

    def _settle(self) -> None:
        """Update what is known by address from the uses since the last call."""
        self._pack()
        begin, self._settled = self._settled, len(self._address)
        # Columns, and no lists of them: those are a megabyte of numbers that is used once.
        addresses, entries = self._address[begin:], self._entry[begin:]
        last = dict(zip(addresses, entries, strict=True))
        if self._capturing is not None:
            self._capturing.update(last)
        if touched := self._followed.keys() & last.keys():
            self._end_following(touched, addresses, entries)
        made = self._made
        makes = entries.tobytes()[_LOWEST_BYTES].translate(_ARE_MADE)
        made.update(zip(compress(addresses, makes), compress(entries, makes), strict=True))
        if missing := last.keys() - made.keys():
            for address, entry in zip(reversed(addresses), reversed(entries), strict=True):
                if address in missing:
                    made[address] = entry
        self._last.update(last)

    def _end_following(
        self, touched: set[int], addresses: Sequence[int], entries: Sequence[int]
    ) -> None:
        """The first uses since the ends of traces of blocks that were alive there."""
        uses = zip(addresses, entries, strict=True)
        for address, entry in compress(uses, map(touched.__contains__, addresses)):
            number, kind = divmod(entry, KINDS)
            if kind == CHANGE and self._in_backward(number):
                continue  # a gradient is added to: that does not read it
            touched.remove(address)
            traced = self._followed.pop(address)
            if kind != MADE:  # else another block is there now
                for trace, baseline, row in traced:
                    self._later.setdefault(trace, ([], []))[baseline].append(row)

    def _in_backward(self, number: int) -> bool:
        phase: str = self._calls[(number - self._base - 1) * _CALL + _PHASE]
        return phase.startswith("backward")

    def _note_padding(self, batch: object, result: torch.Tensor, number: int) -> None:
        """Note how much of a batch of sequences, which is copied to the GPU, is padding.

        Numbers of which only two differ, or none, are a mask: one that ends with ones is not padded
        there, nor is a segment of zeros. Images of classes have more dimensions, and margins.
        """
        if not isinstance(batch, torch.Tensor) or not batch.is_cpu or not result.is_cuda:
            return
        whole = batch.dtype in (torch.int64, torch.int32)
        if whole and batch.dim() == 2 and 1 < batch.numel() <= _MOST_PADDED:
            differs = batch != batch[0, -1]
            others = batch[differs]
            if not others.numel() or not bool((others != others[0]).any()):
                return
            share = 1 - (int(differs.any(0).nonzero()[-1]) + 1) / batch.shape[-1]
            if share:
                self._padded[number] = int(share * result.numel() * result.element_size())

    def _kernel_begins(self) -> tuple[int, int, str]:
        """A kernel of Triton is launched without an operator. Returns its number, its place and the
        phase.
        """
        place, path = self._places.here(), self._path()
        return self._begins(place, _KERNEL), place, path

    # -- graphs

    def _reporting(self, original: Any, report: Callable[..., None]) -> Callable[..., Any]:
        """``original``, followed by ``report`` with the graph."""

        @functools.wraps(original)
        def method(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            if self._on:
                self._guarded(report, graph)
            return result

        return method

    def _graph_called(self, inputs: Sequence[object], _: Collection[int]) -> None:
        if self._on:
            self._guarded(self._use_by_graph, list(inputs))

    def _use_by_graph(self, inputs: list[object]) -> None:
        number = self._begins(self._places.here(), _COMPILED_GRAPH)
        if self.work is not None:
            self.work.graph_called(inputs, self._path())
        self._pack()
        self._in_graph = len(self._address)
        self._note(inputs, number * KINDS + USE)

    def _graph_returned(self, results: Sequence[object]) -> None:
        if self._on:
            self._guarded(self._made_by_graph, list(results))

    def _made_by_graph(self, results: list[object]) -> None:
        """The results of a graph, of which inputs are not new."""
        self._pack()
        before = len(self._address)
        inputs = set(self._address[self._in_graph :])
        for value in results:
            if isinstance(value, torch.Tensor):
                self._note_tensor(value, self._count * KINDS + USE)
        self._pack()
        for at in range(before, len(self._address)):
            if self._address[at] not in inputs:
                self._entry[at] += MADE - USE

    def _nccl_called(self, call: NcclCall) -> None:
        if self._on:
            self._guarded(self._note_nccl_call, call)

    def _note_nccl_call(self, call: NcclCall) -> None:
        begin = self._begins(self._places.here(), _named(call.name)) * KINDS
        self._note(call.read, begin + USE)
        self._note(call.overwritten, begin + OVERWRITE)
        self._note(call.made, begin + MADE)

    def _capture_began(self, graph: torch.cuda.CUDAGraph) -> None:
        self._settle()
        self._capturing = set()
        if self.work is not None:
            self.work.capturing = True

    def _capture_ended(self, graph: Any) -> None:
        if self.work is not None:
            self.work.capturing = False
        self._settle()
        graph._gpuprobe_addresses, self._capturing = self._capturing or set(), None

    def _replayed(self, graph: Any) -> None:
        entry = self._begins(self._places.here(), _GRAPH_REPLAY) * KINDS + USE
        for address in sorted(getattr(graph, "_gpuprobe_addresses", ())):
            self._log.extend((address, entry, _ALL, 0, 0))  # the whole block

    # -- traces

    def complete(self, trace: MemoryTrace) -> bool:
        """Fill the columns of uses. False if uses are missing, or times: then the trace is not
        modified.
        """
        events = trace.events
        times = events.time_us
        self._settle()
        if not self._on or not self._calls or not times or not times[0]:
            return False
        base, calls = self._base, self._calls
        began = [time // 1000 for time in calls[_BEGAN::_CALL]]
        before = map(bisect_right, repeat(began), times)
        events.operator = array("I", map(base.__add__, before))
        blocks = _Blocks(trace)
        columns = BlockColumns(trace)
        alive = blocks.alive()
        self._fill(trace, columns, blocks, {~row if old else row for _, old, row in alive})
        columns.store(trace)
        for rows in (events, trace.baseline) if self._padded else ():
            for row, number in enumerate(rows.made):
                rows.padded[row] = self._padded.get(number, 0)
        self._describe(trace)
        self._alive[trace.device] = alive
        for address, baseline, row in alive:
            if not baseline and not events.made[row]:
                # A library's: what operators made there before is gone.
                self._made.pop(address, None)
                self._last.pop(address, None)
        return True

    def _fill(
        self, trace: MemoryTrace, columns: BlockColumns, blocks: _Blocks, alive: set[int]
    ) -> None:
        """Fill the columns from the log. ``alive``: the blocks that are not freed."""
        base, calls = self._base, self._calls
        made, first_use, last_use = columns.made, columns.first_use, columns.last_use
        earlier, last = self._before
        for row, address in enumerate(trace.baseline.address):
            if address in last:  # else the block is older than the recording
                made[~row] = earlier[address] // KINDS
                number, kind = divmod(last[address], KINDS)
                first_use[~row] = last_use[~row] = 0 if kind == MADE else number
        flow = Flow(trace, columns, self._origins)
        for number, notes in self._by_operator(blocks):
            at = (number - base - 1) * _CALL
            if at < 0:  # its step ended before it was noted, in another thread
                continue
            _, _, grad, phase, about = calls[at : at + _CALL]
            name = about.name
            flow.add(Done(number, name, phase, about.how, name in _FILLS, grad, notes))
        flow.finish(alive)
        self._origins.update(flow.origins(alive))

    def _by_operator(self, blocks: _Blocks) -> Iterator[tuple[int, list[Note]]]:
        """The operators in the order in which they ended, each with its tensors whose block is
        known.
        """
        now, notes = 0, list[Note]()
        last, kind = -1, USE
        known, block_at = blocks.whole.get, blocks.at
        for address, entry, size, offset, width in zip(
            self._address, self._entry, self._bytes, self._offset, self._width, strict=True
        ):
            if entry != last:
                last, (number, kind) = entry, divmod(entry, KINDS)
                if number != now:
                    if notes:
                        yield now, notes
                    now, notes = number, []
            block = known(address)
            if block is None:
                block = block_at(address, now, kind == MADE)
                if block is None:
                    continue
            notes.append((kind, block, size, offset, width))
        if notes:
            yield now, notes

    def _describe(self, trace: MemoryTrace) -> None:
        """Set line, name and phase of the last use of each block in this trace, and the name of the
        first.
        """
        table, base, calls = trace.stacks, self._base, self._calls
        stacks: dict[int, int] = {}
        for columns in (trace.events, trace.baseline):
            for row, number in enumerate(columns.last_use):
                at = (number - base - 1) * _CALL
                if at < 0:
                    continue
                place = calls[at + _PLACE]
                if place not in stacks:
                    frame = self._places.frames[place]
                    stacks[place] = 0 if frame is None else table.stack((table.frame(frame),))
                columns.last_stack[row] = stacks[place]
                columns.last_name[row] = table.string(calls[at + _ABOUT].name)
                columns.last_phase[row] = table.string(calls[at + _PHASE])
            for row, number in enumerate(columns.first_use):
                if number > base:
                    first = calls[(number - base - 1) * _CALL + _ABOUT]
                    columns.first_name[row] = table.string(first.name)

    def saved(self, trace: MemoryTrace, name: str) -> None:
        """The completed trace was written under this name: follow what is alive at its end, apart
        from cuBLAS's workspaces, which no operator gets as an argument and nothing in Python holds.
        """
        self._settle()
        for address, baseline, row in self._alive.pop(trace.device, ()):
            columns = trace.baseline if baseline else trace.events
            if columns.category[row] != _WORKSPACE:
                earlier = self._followed.get(address, ())
                self._followed[address] = *earlier, (name, baseline, row)

    def followed(
        self, steps: Mapping[str, int], before: int
    ) -> dict[int, tuple[tuple[str, bool, int], ...]]:
        """By address, the rows of blocks that operators made and that nothing has used since the
        end of a trace of a step before ``before``. ``steps``: by the name of the trace.
        """
        self._settle()
        return {
            address: rows
            for address, rows in self._followed.items()
            if address in self._made and any(steps[name] < before for name, _, _ in rows)
        }

    def rows_of(self, address: int) -> tuple[tuple[str, bool, int], ...]:
        """Of `followed`: the rows of the block at an address; () if it was used since."""
        return self._followed.get(address, ())

    def take_later(self, step: int) -> list[LaterUses]:
        """The blocks of traces of earlier steps that this one, ``step``, was the first to use."""
        self._settle()
        later, self._later = self._later, {}
        return [
            LaterUses(trace, step, tuple(rows), tuple(baseline))
            for trace, (rows, baseline) in later.items()
        ]


def _watch_ns() -> int:
    """Nanoseconds of an operator on the CPU that does nothing, as it is called in the program."""
    tensor = torch.zeros(())
    began = perf_counter_ns()
    for _ in range(_CALLS):
        torch.ops.aten.alias(tensor)
    return (perf_counter_ns() - began) // _CALLS


def _unhandled_ns() -> int:
    with unhandled():
        return _watch_ns()


class _Blocks:
    """The blocks of a trace by address."""

    def __init__(self, trace: MemoryTrace) -> None:
        events = trace.events
        # By address, in order: the operator that had begun when each block began, that when it was
        # freed, and its row, complemented for one of the baseline.
        self._rows: dict[int, tuple[list[int], list[int], list[int]]] = {
            address: ([0], [_NEVER], [~row]) for row, address in enumerate(trace.baseline.address)
        }
        rows = self._rows
        columns = zip(events.action, events.address, events.operator, strict=True)
        for row, (action, address, operator) in enumerate(columns):
            if action == ALLOC:
                known = rows.get(address)
                if known is None:
                    rows[address] = [operator], [_NEVER], [row]
                else:
                    known[0].append(operator)
                    known[1].append(_NEVER)
                    known[2].append(row)
            elif action in _FREES and (known := rows.get(address)) and known[1][-1] == _NEVER:
                known[1][-1] = operator
        self.whole = {
            address: owners[0]
            for address, (begins, ends, owners) in rows.items()
            if len(owners) == 1 and not begins[0] and ends[0] == _NEVER
        }
        """By address, the row of the only block that was there all the time."""

    def at(self, address: int, number: int, made: bool) -> int | None:
        """The row of the block that the operator ``number`` used, or made, at an address;
        complemented for one of the baseline. The clock of events is exact to a microsecond: an
        event at the begin of an operator counts to that one, and may have been before it.
        """
        known = self._rows.get(address)
        if known is None:
            return None
        begins, ends, rows = known
        at = bisect_right(begins, number if made else number - 1) - 1
        if at < 0 or ends[at] < number:
            at += 1  # it began at the begin of the operator
            if at == len(rows) or begins[at] != number:
                return None
        return rows[at]

    def alive(self) -> list[tuple[int, bool, int]]:
        """The blocks that are not freed: address, whether the baseline has its row, and the row."""
        return [
            (address, rows[-1] < 0, rows[-1] if rows[-1] >= 0 else ~rows[-1])
            for address, (_, ends, rows) in self._rows.items()
            if ends[-1] == _NEVER
        ]
