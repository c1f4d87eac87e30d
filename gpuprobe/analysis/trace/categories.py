"""The category of each block, without a profiler: from stacks, lifetimes and sizes.

A recorded category always wins. Otherwise a block is classified by the marks of its stack
(`Marks`) and by the kind of work in progress when it was allocated and when it was freed (`Runs`):

=====================================  ==========================================
allocated                              and then
=====================================  ==========================================
by a library for its own use           workspace
to exchange gradients between ranks    gradient_bucket
by FSDP, to gather a parameter         gathered_parameter
by a checkpointed forward, run again   freed during the recomputation: temporary;
                                       else activation
inside an optimizer's step             freed in that step: temporary;
                                       else optimizer_state
by the autograd engine                 freed in that backward: autograd_detail;
                                       outlived it: gradient
while a module is built or moved       outlived that: parameter (or buffer: both
                                       have the same stack)
by a data loader, or copied to the     input
device outside any module
otherwise                              freed in the same stretch of work: temporary;
                                       freed in a backward: activation; allocated in
                                       a module's forward and kept: activation
=====================================  ==========================================

Everything else is ``unknown``. Memory that was alive before the trace and has no stack is
classified by its end: freed during an optimizer step: optimizer_state; never freed, and no more
blocks of its size than gradients of that size: parameter.

Marks come from PyTorch's own names: file paths under ``torch/`` and functions of its Python and
C++ sources (2.1 to 2.13). Only names with one meaning give a mark.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, islice
from operator import ne
from typing import TYPE_CHECKING

from gpuprobe.model.actions import OOM
from gpuprobe.model.memory import Category
from gpuprobe.model.trace import GRAD_ON, Frame, MemoryTrace, StackTable

if TYPE_CHECKING:  # 3 ms, which a recorder does not need
    from gpuprobe.analysis.trace.ledger import Ledger

WORKSPACE = 1  # library scratch memory
OPTIMIZER = 2  # inside an optimizer's step
BACKWARD = 4  # inside the autograd engine
ACCUMULATE = 8  # AccumulateGrad: the node that writes .grad
INIT = 16  # a module being built, moved, initialised or loaded
MODULE_CALL = 32  # inside a module's forward
DATA = 64  # torch.utils.data
COPY = 128  # Tensor.to / .cuda: a copy to the device
BUCKET = 256  # buffers in which ranks exchange gradients (DDP's buckets, FSDP2's)
RECOMPUTE = 512  # a checkpointed forward, run again in the backward pass
UNSHARDED = 1024  # a whole parameter, gathered from FSDP's shards

CUBLAS_WORKSPACE_BYTES = 8_519_680
"""cuBLAS's default workspace per handle and stream (``:4096:2:16:8``, in KiB times counts),
as PyTorch allocates it on GPUs older than sm_90. The number is unusual enough to be evidence on
its own; the 32 MiB of newer GPUs is not."""

_WORKSPACE_NAMES = (
    "getNewWorkspace",
    "CUDABlasWorkspace",
    "CUDABlasLtWorkspace",
    "getCurrentCUDABlasHandle",
    "getCurrentCUDABlasLtWorkspace",
    "cudnnWorkspace",
)
_ENGINE_NAMES = ("torch::autograd::Engine", "torch::autograd::Node::operator()")
_COPY_NAMES = ("at::native::_to_copy", "at::_ops::_to_copy", "THPVariable_to", "THPVariable_cuda")
_INIT_FUNCTIONS = frozenset(
    (
        "__init__",
        "__new__",
        "_apply",
        "_load_from_state_dict",
        "load_state_dict",
        "reset_parameters",
        "to",
        "to_empty",
    )
)
_CALL_FUNCTIONS = frozenset(("_call_impl", "_wrapped_call_impl", "_slow_forward", "forward"))


def _frame_marks(frame: Frame) -> int:
    """The marks of one frame, by its function and its file."""
    file = frame.filename.replace("\\", "/")
    if not file.endswith(".py"):
        return _native_marks(frame.name)
    _, is_torch, inside = file.rpartition("/torch/")
    return _torch_marks(frame.name, inside) if is_torch else 0


def _native_marks(name: str) -> int:
    """The marks of a C++ function."""
    if name.startswith(_ENGINE_NAMES):
        return BACKWARD
    if "AccumulateGrad" in name:
        return ACCUMULATE | BACKWARD
    if name.startswith(_COPY_NAMES):
        return COPY
    if name.startswith("c10d::Reducer::"):
        return BUCKET
    return WORKSPACE if any(word in name for word in _WORKSPACE_NAMES) else 0


def _torch_marks(name: str, path: str) -> int:
    """The marks of a Python function of torch; ``path`` is its file, relative to ``torch/``."""
    if path.startswith("optim/"):
        is_step = "lr_scheduler" not in path and name not in _NOT_IN_STEP
        return OPTIMIZER if is_step else 0
    if path.startswith("nn/modules/") and name in _CALL_FUNCTIONS:
        return MODULE_CALL
    if path == "nn/init.py":
        return INIT
    # Not all of torch/nn: DistributedDataParallel's __init__ allocates no parameters.
    if path.startswith(("nn/modules/", "nn/parameter.py")):
        return INIT if name in _INIT_FUNCTIONS else 0
    if path.startswith("utils/data/"):
        return DATA
    return _backward_marks(name, path) or (
        _FSDP_FUNCTIONS.get(name, 0) if path.startswith("distributed/fsdp/") else 0
    )


def _backward_marks(name: str, path: str) -> int:
    """The marks of functions that run the backward pass, or recompute a forward in one."""
    if path == "utils/checkpoint.py" and name in ("backward", "recompute_fn", "unpack_hook"):
        return BACKWARD if name == "unpack_hook" else BACKWARD | RECOMPUTE
    is_call = path in ("autograd/__init__.py", "_tensor.py") and name in ("backward", "grad")
    return BACKWARD if is_call or name == "_engine_run_backward" else 0


_NOT_IN_STEP = ("zero_grad", "__init__", "add_param_group")
"""Functions of an optimizer that are not part of its step."""


_FSDP_FUNCTIONS = {
    "foreach_reduce": BUCKET,
    "foreach_all_gather": UNSHARDED,
    "alloc_all_gather_outputs": UNSHARDED,
    "init_all_gather_outputs": UNSHARDED,
    "init_unsharded_param": UNSHARDED,
    "alloc_storage": UNSHARDED,
    "_alloc_padded_unsharded_flat_param": UNSHARDED,
}
"""Functions of FSDP2 and, the last one, of FSDP1 (torch 2.6 to 2.13) that allocate: the input of a
reduce-scatter, and the whole parameters of an all-gather."""

_BUCKET_MAKERS = frozenset(("_ddp_init_helper", "_pre_forward"))
"""The Python functions from which DistributedDataParallel calls the reducer's C++ code. It
allocates its buckets once, and again in the order in which gradients arrived. These functions
allocate no tensors themselves: if one of them is the innermost Python frame, the reducer allocated
(``torch/_ops.py`` does not count, a dispatch mode may have called the operator)."""


def data_parallel_mark(frames: Sequence[Frame]) -> int:
    """BUCKET or UNSHARDED if DDP or FSDP allocated the memory; else 0.

    ``frames`` are a stack, innermost first.
    """
    for at, frame in enumerate(frames):
        found = _frame_marks(frame) & (BUCKET | UNSHARDED)
        if found:
            return _from_reducer(frames[: at + 1]) or found
    return _from_reducer(frames)


def _from_reducer(frames: Iterable[Frame]) -> int:
    """BUCKET, if the innermost Python frame is one of `_BUCKET_MAKERS`; else 0."""
    for frame in frames:
        file = frame.filename.replace("\\", "/")
        if file.endswith(".py") and not file.endswith("/torch/_ops.py"):
            ours = file.endswith("/torch/nn/parallel/distributed.py")
            return BUCKET if ours and frame.name in _BUCKET_MAKERS else 0
    return 0


class Marks:
    """The marks of stacks. Each frame and each stack is classified once."""

    def __init__(self, stacks: StackTable) -> None:
        self._stacks = stacks
        self._by_frame: dict[int, int] = {}
        self._by_stack: dict[int, int] = {}

    def of(self, stack: int) -> int:
        """The marks of all frames of a stack."""
        marks = self._by_stack.get(stack)
        if marks is None:
            marks = 0
            by_frame, frames = self._by_frame, self._stacks.frames
            for index in self._stacks.stacks[stack]:
                known = by_frame.get(index)
                if known is None:
                    known = by_frame[index] = _frame_marks(frames[index])
                marks |= known
            if not marks & (BUCKET | UNSHARDED):
                marks |= _from_reducer(frames[index] for index in self._stacks.stacks[stack])
            self._by_stack[stack] = marks
        return marks


_PHASES = {
    "backward": "backward",
    "optimizer": "optimizer",
    "forward": "forward",
    "evaluation": "forward",
    "data": "data",
}


def _phase_kind(path: str) -> str:
    """The kind of work of a recorded phase: ``optimizer/forward`` (a closure) is forward."""
    names = (_PHASES.get(name, "") for name in reversed(path.split("/")))
    return next((kind for kind in names if kind), "")


class Runs:
    """A trace split into stretches of forward, backward, optimizer or data work.

    A stretch begins with the first allocation of its kind and lasts until the next stretch
    begins, so a free belongs to the work that allocated last. Kinds come from, in this order: the
    recorded phase; torch's annotations of ``Optimizer.step``; the marks of the stack. In a trace
    that records stacks, an allocation without any frame comes from a thread without Python, which
    is the autograd engine's: it counts as backward.

    ``known`` is whether the trace has anything that distinguishes kinds of work.
    """

    def __init__(self, ledger: Ledger, marks: Marks) -> None:
        made = ledger.made
        stacks = ledger.stack[:made]
        distinct = set(stacks)
        with_stack = len(stacks) - stacks.count(0)
        recorded = ledger.trace.events.phase
        has_phases = len(recorded) == ledger.events and any(recorded)
        self.known = with_stack > 0 or has_phases or bool(ledger.trace.annotations)
        kind_of = {stack: _kind(marks.of(stack)) for stack in distinct}
        kind_of[0] = "backward" if with_stack * 2 > made else ""
        closures = {stack for stack in distinct if marks.of(stack) & MODULE_CALL}
        kinds = list(map(kind_of.__getitem__, stacks))
        if has_phases:
            strings = ledger.trace.stacks.strings
            phases = [recorded[event] for event in ledger.start[:made]]
            by_phase = {p: _phase_kind(strings[p]) for p in set(phases)}
            kinds = [by_phase[p] or kind for p, kind in zip(phases, kinds, strict=True)]
        for first, last in optimizer_steps(ledger.trace):
            low = bisect_left(ledger.start, first, 0, made)
            high = bisect_left(ledger.start, last, 0, made)
            # A closure (LBFGS, Lightning) calls the model inside the optimizer's step.
            kinds[low:high] = [
                kind if kind == "backward" or stack in closures else "optimizer"
                for kind, stack in zip(kinds[low:high], stacks[low:high], strict=True)
            ]
        self._start: list[int] = []
        self._kind: list[str] = []
        current = ""
        # Changes only: comparing neighbours is much cheaper than a loop over all rows.
        changes = compress(range(1, made), map(ne, kinds, islice(kinds, 1, None)))
        for row in chain([0] if made else [], changes):
            if kinds[row] and kinds[row] != current:
                current = kinds[row]
                self._start.append(ledger.start[row])
                self._kind.append(current)

    def at(self, event: int) -> int:
        """The number of the stretch that ``event`` is in; -1 before the first."""
        return bisect_right(self._start, event) - 1

    def kind(self, run: int) -> str:
        """``forward``, ``backward``, ``optimizer``, ``data``; ``""`` before the first."""
        return self._kind[run] if run >= 0 else ""

    def rows_of(self, kind: str, starts: Sequence[int], made: int) -> Iterator[range]:
        """The rows allocated in stretches of ``kind`` (``""``: before the first), among the
        ``made`` rows that begin with the events ``starts``.
        """
        edges = [bisect_left(starts, event, 0, made) for event in self._start]
        edges.append(made)
        if not kind:
            yield range(edges[0])
        for found, low, high in zip(self._kind, edges, edges[1:], strict=False):
            if found == kind:
                yield range(low, high)

    def ends_of(self, kind: str) -> list[int]:
        """For each stretch of ``kind`` that another follows, the first event of that one."""
        return [
            later
            for found, later in zip(self._kind, self._start[1:], strict=False)
            if found == kind
        ]

    def only(self, kind: str, first: int, end: int, starts: Sequence[int]) -> bool:
        """Whether all allocations (``starts``, sorted) in events [first, end) belong to one
        stretch of ``kind``.
        """
        low, high = bisect_left(starts, first), bisect_left(starts, end)
        return low == high or (
            self.kind(self.at(starts[low])) == kind
            and self.at(starts[low]) == self.at(starts[high - 1])
        )

    def follows(self, kind: str, run: int) -> bool:
        """Whether a stretch of ``kind`` follows a run."""
        return kind in self._kind[run + 1 :]

    def __len__(self) -> int:
        return len(self._start)


def _kind(marks: int) -> str:
    if marks & BACKWARD:
        return "backward"
    # A module that is called inside an optimizer's step is called by a closure.
    return "optimizer" if marks & OPTIMIZER and not marks & MODULE_CALL else "forward"


def optimizer_steps(trace: MemoryTrace) -> tuple[tuple[int, int], ...]:
    """The optimizer steps that torch annotated, as ranges of events [first, end)."""
    times = trace.events.column("time_us")
    found = []
    began: dict[str, int] = {}
    for stage, name, time_us in trace.annotations:
        if not name.startswith("Optimizer.step#"):
            continue
        if stage == "START":
            began[name] = time_us
        elif name in began:
            first = _position(times, began.pop(name))
            found.append((first, _position(times, time_us, after=True)))
    return tuple(found)


def _position(times: Sequence[int], time_us: int, after: bool = False) -> int:
    return bisect_right(times, time_us) if after else bisect_left(times, time_us)


_UNKNOWN = Category.UNKNOWN.code
_PARAMETER = Category.PARAMETER.code
_GRADIENT = Category.GRADIENT.code
_STATE = Category.OPTIMIZER_STATE.code
_ACTIVATION = Category.ACTIVATION.code
_TEMPORARY = Category.TEMPORARY.code
_INPUT = Category.INPUT.code
_DETAIL = Category.AUTOGRAD_DETAIL.code
_WORKSPACE = Category.WORKSPACE.code
_GATHERED = Category.GATHERED_PARAMETER.code
_BUCKET = Category.GRADIENT_BUCKET.code


def categories(ledger: Ledger, rows: Sequence[int]) -> tuple[int, ...]:
    """The `Category.code` of each of ``rows``, in their order."""
    recorded = ledger.values("category", rows)
    if _UNKNOWN not in recorded:
        return tuple(recorded)
    classifier = Classifier(ledger, evidence_of(ledger))
    return tuple(
        known or classifier.category(row) for known, row in zip(recorded, rows, strict=True)
    )


class Evidence:
    """What `Classifier` derives once per trace. The ledger holds it, so it has no reference to the
    ledger.

    ``outcomes``: (stack, size) -> the category of earlier blocks of the backward pass.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.marks = Marks(ledger.trace.stacks)
        self.runs = Runs(ledger, self.marks)
        self.parameter_sizes: set[int] | None = None
        self.outcomes: dict[tuple[int, int], int] | None = None
        self.recomputed_until: array[int] | None = None
        actions = ledger.trace.events.action
        self.failures = (
            [at for at, action in enumerate(actions) if action == OOM] if (OOM in actions) else []
        )
        """The events of failed allocations."""


def evidence_of(ledger: Ledger) -> Evidence:
    """The evidence of a ledger's trace, derived at the first call."""
    if not isinstance(ledger.evidence, Evidence):
        ledger.evidence = Evidence(ledger)
    return ledger.evidence


class Classifier:
    """Classifies the rows of a ledger by its `Evidence`."""

    def __init__(self, ledger: Ledger, found: Evidence) -> None:
        self._ledger = ledger
        self._found = found
        self._marks, self._runs = found.marks, found.runs
        columns = (ledger.trace.events.category, ledger.baseline.category)
        self._has_recorded = any(map(any, columns))
        self._has_grad = bool(ledger.trace.events.grad)

    def category(self, row: int) -> int:
        """The `Category.code` of a row; a recorded one wins."""
        ledger = self._ledger
        if self._has_recorded:
            recorded = ledger.value("category", row)
            if recorded:
                return recorded
        stack = ledger.stack[row]
        if not stack and row >= ledger.made:
            return self._without_stack(row)
        if not self._runs.known:
            # Lifetimes alone are no evidence if kinds of work cannot be distinguished.
            return self._workspace_by_size(row)
        marks = self._marks.of(stack)
        return self._by_machinery(row, marks) or self._by_work(row, marks)

    def _by_machinery(self, row: int, marks: int) -> int:
        """The category of memory of libraries, data parallelism and checkpointing; else unknown."""
        if marks & WORKSPACE or self._workspace_by_size(row):
            return _WORKSPACE
        if marks & BUCKET:
            return _BUCKET
        if marks & UNSHARDED:
            return _GATHERED
        if marks & RECOMPUTE and row < self._ledger.made:
            is_over = self._ledger.freed[row] <= self._recomputation_of(row)
            return _TEMPORARY if is_over else _ACTIVATION
        return _UNKNOWN

    def _by_work(self, row: int, marks: int) -> int:
        """The category by the stretches of work in which the row was allocated and freed."""
        ledger, runs = self._ledger, self._runs
        made_in = runs.at(ledger.start[row]) if row < ledger.made else -1
        freed = ledger.freed[row]
        alive = freed >= ledger.events
        freed_in = runs.at(freed)
        kind = runs.kind(made_in)
        at_once = not alive and freed_in == made_in
        if kind == "optimizer" or (kind == "" and _kind(marks) == "optimizer"):
            return _TEMPORARY if at_once else _STATE
        if kind == "backward" or (kind == "" and marks & BACKWARD):
            return self._from_backward(row, marks, made_in, freed_in, alive)
        in_module = marks & MODULE_CALL
        is_forward = kind in ("forward", "") and not marks & INIT
        if self._has_grad and is_forward:
            without = self._without_backward(row, made_in, bool(in_module))
            if without:
                return without
        if marks & INIT and not in_module:
            return _TEMPORARY if at_once else _PARAMETER
        if kind == "data" or marks & DATA or (marks & COPY and not in_module):
            return _INPUT
        if at_once:
            return _TEMPORARY
        if in_module or (not alive and runs.kind(freed_in) == "backward"):
            return _ACTIVATION
        return _UNKNOWN

    def _without_backward(self, row: int, made_in: int, in_module: bool) -> int:
        """The category of a block of a forward pass whose backward pass does not come: memory ran
        out, or it is an evaluation. Unknown if it comes, or if the block's end decides.
        """
        ledger = self._ledger
        if row >= ledger.made:
            return _UNKNOWN
        start, freed = ledger.start[row], ledger.freed[row]
        grad = ledger.value("grad", row)
        phase = ledger.trace.stacks.strings[ledger.value("last_phase", row)].partition("/")[0]
        if not in_module and phase not in ("forward", "evaluation"):
            return _UNKNOWN
        if grad == GRAD_ON and any(start < at < freed for at in self._found.failures):
            return _ACTIVATION
        evaluates = phase == "evaluation" or (
            self._runs.kind(made_in) and not self._runs.follows("backward", made_in)
        )
        if not evaluates or grad != GRAD_ON:
            return _UNKNOWN
        # With gradients: what is kept after its last use waits for a backward pass.
        last = ledger.value("last_use", row)
        now = ledger.trace.events.operator[freed] if freed < ledger.events else 0
        return _ACTIVATION if last and (not now or now > last) else _UNKNOWN

    def _workspace_by_size(self, row: int) -> int:
        ledger = self._ledger
        alive = ledger.freed[row] >= ledger.events
        its_size = ledger.requested[row] == CUBLAS_WORKSPACE_BYTES
        return _WORKSPACE if alive and its_size else _UNKNOWN

    def _recomputation_of(self, row: int) -> int:
        """The event at which the recomputation that allocated ``row`` ends."""
        if self._found.recomputed_until is None:
            ledger, marks = self._ledger, self._marks
            until = array("q", [ledger.events]) * ledger.made
            end = ledger.events
            for i in range(ledger.made - 1, -1, -1):
                if not marks.of(ledger.stack[i]) & RECOMPUTE:
                    end = ledger.start[i]
                until[i] = end
            self._found.recomputed_until = until
        return self._found.recomputed_until[row]

    def _from_backward(self, row: int, marks: int, made_in: int, freed_in: int, alive: bool) -> int:
        if not alive:
            return _DETAIL if freed_in == made_in else _GRADIENT
        if made_in < len(self._runs) - 1 or marks & ACCUMULATE:
            return _GRADIENT
        # The trace ends inside this backward pass: equal blocks of earlier ones decide.
        if self._found.outcomes is None:
            self._found.outcomes = self._outcomes_in_backward()
        ledger = self._ledger
        return self._found.outcomes.get((ledger.stack[row], ledger.requested[row]), _UNKNOWN)

    def _outcomes_in_backward(self) -> dict[tuple[int, int], int]:
        """(stack, size) -> category of the blocks that a backward pass allocated and that were
        freed; unknown if they differ.
        """
        ledger, runs = self._ledger, self._runs
        outcomes: dict[tuple[int, int], int] = {}
        for row in range(ledger.made):
            if ledger.freed[row] >= ledger.events:
                continue
            made_in = runs.at(ledger.start[row])
            if runs.kind(made_in) != "backward":
                continue
            key = (ledger.stack[row], ledger.requested[row])
            outcome = _DETAIL if runs.at(ledger.freed[row]) == made_in else _GRADIENT
            outcomes[key] = outcome if outcomes.get(key, outcome) == outcome else _UNKNOWN
        return outcomes

    def _without_stack(self, row: int) -> int:
        ledger, runs = self._ledger, self._runs
        freed = ledger.freed[row]
        if freed < ledger.events:
            run = runs.at(freed)
            return _STATE if runs.kind(run) == "optimizer" else _UNKNOWN
        if self._workspace_by_size(row):
            return _WORKSPACE
        if self._found.parameter_sizes is None:
            self._found.parameter_sizes = self._sizes_of_parameters()
        return _PARAMETER if ledger.requested[row] in self._found.parameter_sizes else _UNKNOWN

    def _sizes_of_parameters(self) -> set[int]:
        """Requested sizes with no more unclassified baseline blocks than gradients at one time."""
        ledger = self._ledger
        if not self._runs.known:
            return set()
        kept = Counter(
            ledger.requested[row]
            for row in range(ledger.made, len(ledger))
            if not ledger.stack[row]
            and not ledger.value("category", row)
            and ledger.freed[row] >= ledger.events
        )
        gradients: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row in self._perhaps_gradients():
            if ledger.requested[row] in kept and self.category(row) == _GRADIENT:
                span = (ledger.start[row], ledger.freed[row])
                gradients[ledger.requested[row]].append(span)
        return {size for size, spans in gradients.items() if kept[size] <= _most_at_once(spans)}

    def _perhaps_gradients(self) -> Iterable[int]:
        """Rows that may be gradients: those allocated in a backward pass or before the first
        stretch of work (see `_by_work`); all rows if categories were recorded.
        """
        ledger = self._ledger
        if self._has_recorded:
            return range(ledger.made)
        parts = (self._runs.rows_of(kind, ledger.start, ledger.made) for kind in ("", "backward"))
        return chain.from_iterable(chain.from_iterable(parts))


def _most_at_once(spans: Iterable[tuple[int, int]]) -> int:
    """The largest number of ``[start, end)`` spans that overlap at one point."""
    ends = sorted(
        edge for start, end in spans for edge in ((start, 1), (end, -1))
    )  # at a tie the end (-1) comes first
    most = now = 0
    for _, change in ends:
        now += change
        most = max(most, now)
    return most
