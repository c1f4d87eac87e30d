"""What each block is for, without a profiler: from stacks, lifetimes and sizes.

A recorded category always wins. Otherwise a block is classified by what its stack says
(`evidence`) and by the work that was going on when it was made and when it was freed:

=====================================  ==========================================
made                                   and then
=====================================  ==========================================
by a library for its own use           workspace
to exchange gradients between ranks    gradient_bucket
by FSDP, to put a parameter together   gathered_parameter
by a checkpointed forward, run again   freed while that went on: temporary;
                                       else activation
inside an optimizer's step             freed in that step: temporary;
                                       else optimizer_state
by the autograd engine                 freed in that backward: autograd_detail;
                                       outlived it: gradient
while a module is built or moved       outlived that: parameter (or buffer: the
                                       stack cannot tell them apart)
by a data loader, or copied to the     input
device outside any module
otherwise                              freed in the same stretch of work: temporary;
                                       freed in a backward: activation; made in a
                                       module's forward and kept: activation
=====================================  ==========================================

Everything else is ``unknown``. Memory alive before the trace that has no stack is classified by
what becomes of it: replaced during an optimizer step: optimizer_state; never freed, and of a
size that no more such blocks have than there are gradients: parameter.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, islice
from operator import ne

from gpuprobe.analysis.trace.ledger import Ledger
from gpuprobe.model.memory import Category
from gpuprobe.model.trace import Frame, MemoryTrace, StackTable

WORKSPACE = 1  # library scratch memory
OPTIMIZER = 2  # inside an optimizer's step
BACKWARD = 4  # inside the autograd engine
ACCUMULATE = 8  # AccumulateGrad: the node that writes .grad
INIT = 16  # a module being built, moved, initialised or loaded
MODULE_CALL = 32  # inside a module's forward
DATA = 64  # torch.utils.data
COPY = 128  # Tensor.to / .cuda: a copy to the device
BUCKET = 256  # the buffers in which ranks exchange gradients (DDP's buckets, FSDP2's)
RECOMPUTE = 512  # a checkpointed forward, run again in the backward pass
UNSHARDED = 1024  # the whole of a parameter that FSDP keeps in parts

CUBLAS_WORKSPACE_BYTES = 8_519_680
"""cuBLAS's default workspace per handle and stream (``:4096:2:16:8``, in KiB times counts),
as PyTorch allocates it on GPUs other than sm_90 and newer. An odd enough number to be
evidence by itself; the 32 MiB of newer GPUs is not."""

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
    name, file = frame.name, frame.filename.replace("\\", "/")
    if not file.endswith(".py"):
        if name.startswith(_ENGINE_NAMES):
            return BACKWARD
        if "AccumulateGrad" in name:
            return ACCUMULATE | BACKWARD
        if name.startswith(_COPY_NAMES):
            return COPY
        if name.startswith("c10d::Reducer::"):
            return BUCKET
        return WORKSPACE if any(word in name for word in _WORKSPACE_NAMES) else 0
    _, found, inside = file.rpartition("/torch/")
    if not found:
        return 0
    if inside.startswith("optim/"):
        if "lr_scheduler" in inside or name in ("zero_grad", "__init__", "add_param_group"):
            return 0
        return OPTIMIZER
    if inside.startswith("nn/modules/") and name in _CALL_FUNCTIONS:
        return MODULE_CALL
    if inside == "nn/init.py":
        return INIT
    # Not all of torch/nn: what DistributedDataParallel's __init__ makes is no parameter.
    if inside.startswith(("nn/modules/", "nn/parameter.py")):
        return INIT if name in _INIT_FUNCTIONS else 0
    if inside.startswith("utils/data/"):
        return DATA
    if inside == "utils/checkpoint.py" and name in ("backward", "recompute_fn", "unpack_hook"):
        return BACKWARD if name == "unpack_hook" else BACKWARD | RECOMPUTE
    if name == "_engine_run_backward" or (
        inside in ("autograd/__init__.py", "_tensor.py") and name in ("backward", "grad")
    ):
        return BACKWARD
    if inside.startswith("distributed/fsdp/"):
        return _FSDP_FUNCTIONS.get(name, 0)
    return 0


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
reduce-scatter, and the whole parameters that an all-gather puts together."""

_BUCKET_MAKERS = frozenset(("_ddp_init_helper", "_pre_forward"))
"""The Python functions from which DistributedDataParallel calls the reducer's C++ code, which
makes its buckets at first and makes them anew in the order in which gradients came. They make
no tensors themselves: what has them as its innermost Python frame is the reducer's (but for that of
an operator, which a dispatch mode may have called)."""


def by_whom(frames: Sequence[Frame]) -> int:
    """BUCKET or UNSHARDED, where what allocated is the machinery of data parallelism; else 0.

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
    """The marks of each stack, each frame and each stack looked at once."""

    def __init__(self, stacks: StackTable) -> None:
        self._stacks = stacks
        self._by_frame: dict[int, int] = {}
        self._by_stack: dict[int, int] = {}

    def of(self, stack: int) -> int:
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
    "data": "data",
}


def _phase_kind(path: str) -> str:
    """What a recorded phase is: ``optimizer/forward`` (a closure) is forward work."""
    names = (_PHASES.get(name, "") for name in reversed(path.split("/")))
    return next((kind for kind in names if kind), "")


class Runs:
    """The trace cut into stretches of forward, backward, optimizer or data work.

    A stretch begins with the first allocation of its kind and lasts until the next stretch
    begins, so a free belongs to the work that was last seen to allocate. Kinds come from, in
    this order: the recorded phase; torch's annotations of ``Optimizer.step``; the marks of
    the stack. In a trace that records stacks, an allocation without any frame was made on a
    thread without Python, which is the autograd engine's: that counts as backward.
    """

    def __init__(self, ledger: Ledger, marks: Marks) -> None:
        made = ledger.made
        stacks = ledger.stack[:made]
        seen = set(stacks)
        known = len(stacks) - stacks.count(0)
        recorded = ledger.trace.events.phase
        has_phases = len(recorded) == ledger.events and any(recorded)
        self.seen = known > 0 or has_phases or bool(ledger.trace.annotations)
        no_stack = "backward" if known * 2 > made else ""
        kind_of = {stack: _kind(marks.of(stack)) for stack in seen}
        kind_of[0] = no_stack
        closures = {stack for stack in seen if marks.of(stack) & MODULE_CALL}
        kinds = list(map(kind_of.__getitem__, stacks))
        if has_phases:
            strings = ledger.trace.stacks.strings
            phases = [recorded[event] for event in ledger.start[:made]]
            by_phase = {p: _phase_kind(strings[p]) for p in set(phases)}
            kinds = [by_phase[p] or kind for p, kind in zip(phases, kinds, strict=True)]
        for first, last in optimizer_steps(ledger.trace):
            low = bisect_left(ledger.start, first, 0, made)
            high = bisect_left(ledger.start, last, 0, made)
            # A closure (LBFGS, Lightning) has the model run inside the optimizer's step.
            kinds[low:high] = [
                kind if kind == "backward" or stack in closures else "optimizer"
                for kind, stack in zip(kinds[low:high], stacks[low:high], strict=True)
            ]
        self._start: list[int] = []
        self._kind: list[str] = []
        current = ""
        # Changes only: comparing neighbours is much cheaper than looking at every row.
        changes = compress(range(1, made), map(ne, kinds, islice(kinds, 1, None)))
        for row in chain([0] if made else [], changes):
            if kinds[row] and kinds[row] != current:
                current = kinds[row]
                self._start.append(ledger.start[row])
                self._kind.append(current)

    def at(self, event: int) -> int:
        """The number of the stretch ``event`` is in; -1 before the first."""
        return bisect_right(self._start, event) - 1

    def kind(self, run: int) -> str:
        """``forward``, ``backward``, ``optimizer``, ``data``; ``""`` before the first."""
        return self._kind[run] if run >= 0 else ""

    def rows_of(self, kind: str, starts: Sequence[int], made: int) -> Iterator[range]:
        """The rows made in stretches of ``kind`` (``""``: before the first), of the ``made`` rows
        that begin with the events ``starts``.
        """
        edges = [bisect_left(starts, event, 0, made) for event in self._start]
        edges.append(made)
        if not kind:
            yield range(edges[0])
        for found, low, high in zip(self._kind, edges, edges[1:], strict=False):
            if found == kind:
                yield range(low, high)

    def ends_of(self, kind: str) -> list[int]:
        """The event before which each stretch of ``kind`` gives way to another."""
        return [
            later
            for found, later in zip(self._kind, self._start[1:], strict=False)
            if found == kind
        ]

    def only(self, kind: str, first: int, end: int, starts: Sequence[int]) -> bool:
        """Whether every allocation (``starts``, sorted) in events [first, end) is of ``kind``."""
        low, high = bisect_left(starts, first), bisect_left(starts, end)
        return low == high or (
            self.kind(self.at(starts[low])) == kind
            and self.at(starts[low]) == self.at(starts[high - 1])
        )

    def __len__(self) -> int:
        return len(self._start)


def _kind(marks: int) -> str:
    if marks & BACKWARD:
        return "backward"
    # A module's call inside an optimizer's step is that of a closure.
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
    """What is known of one trace, gathered once. It does not hold the ledger, which holds it."""

    def __init__(self, ledger: Ledger) -> None:
        self.marks = Marks(ledger.trace.stacks)
        self.runs = Runs(ledger, self.marks)
        self.parameter_sizes: set[int] | None = None
        self.fates: dict[tuple[int, int], int] | None = None
        self.recomputed_until: array[int] | None = None


def evidence_of(ledger: Ledger) -> Evidence:
    """What is known of a ledger's trace: gathered at the first call."""
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

    def category(self, row: int) -> int:
        """The `Category.code` of a row; the recorded one where there is one."""
        ledger = self._ledger
        if self._has_recorded:
            recorded = ledger.value("category", row)
            if recorded:
                return recorded
        stack = ledger.stack[row]
        if not stack and row >= ledger.made:
            return self._without_stack(row)
        if not self._runs.seen:
            # Lifetimes alone say nothing where no stretch of work can be told from another.
            return self._workspace_by_size(row)
        marks = self._marks.of(stack)
        return self._by_machinery(row, marks) or self._by_work(row, marks)

    def _by_machinery(self, row: int, marks: int) -> int:
        """What libraries, data parallelism and checkpointing made; else unknown."""
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
        """By the stretch of work in which it was made, and by the one in which it was freed."""
        ledger, runs = self._ledger, self._runs
        made_in = runs.at(ledger.start[row]) if row < ledger.made else -1
        freed = ledger.freed[row]
        alive = freed >= ledger.events
        freed_in = runs.at(freed)
        kind = runs.kind(made_in)
        at_once = not alive and freed_in == made_in
        if kind == "optimizer" or (kind == "" and marks & OPTIMIZER):
            return _TEMPORARY if at_once else _STATE
        if kind == "backward" or (kind == "" and marks & BACKWARD):
            return self._from_backward(row, marks, made_in, freed_in, alive)
        in_module = marks & MODULE_CALL
        if marks & INIT and not in_module:
            return _TEMPORARY if at_once else _PARAMETER
        if kind == "data" or marks & DATA or (marks & COPY and not in_module):
            return _INPUT
        if at_once:
            return _TEMPORARY
        if in_module or (not alive and runs.kind(freed_in) == "backward"):
            return _ACTIVATION
        return _UNKNOWN

    def _workspace_by_size(self, row: int) -> int:
        ledger = self._ledger
        alive = ledger.freed[row] >= ledger.events
        its_size = ledger.requested[row] == CUBLAS_WORKSPACE_BYTES
        return _WORKSPACE if alive and its_size else _UNKNOWN

    def _recomputation_of(self, row: int) -> int:
        """The event with which the recomputation that made ``row`` gives way to other work."""
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
        # The trace ends inside this backward: what became of its like before?
        if self._found.fates is None:
            self._found.fates = self._fates_in_backward()
        ledger = self._ledger
        return self._found.fates.get((ledger.stack[row], ledger.requested[row]), _UNKNOWN)

    def _fates_in_backward(self) -> dict[tuple[int, int], int]:
        """(stack, size) -> category, where all earlier blocks of the kind ended alike."""
        ledger, runs = self._ledger, self._runs
        fates: dict[tuple[int, int], int] = {}
        for row in range(ledger.made):
            if ledger.freed[row] >= ledger.events:
                continue
            made_in = runs.at(ledger.start[row])
            if runs.kind(made_in) != "backward":
                continue
            key = (ledger.stack[row], ledger.requested[row])
            fate = _DETAIL if runs.at(ledger.freed[row]) == made_in else _GRADIENT
            fates[key] = fate if fates.get(key, fate) == fate else _UNKNOWN
        return fates

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
        """Requested sizes that the unexplained baseline has no more often than gradients do."""
        ledger = self._ledger
        if not self._runs.seen:
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
        """Rows that may be gradients: those that were made in a backward, or before any work was
        seen (`_by_work`), and all where categories were recorded.
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
