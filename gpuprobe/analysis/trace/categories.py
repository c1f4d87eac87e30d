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
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from gpuprobe.analysis.trace import evidence
from gpuprobe.analysis.trace.evidence import Marks, Runs
from gpuprobe.analysis.trace.ledger import Ledger
from gpuprobe.model.memory import Category

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
        if marks & evidence.WORKSPACE or self._workspace_by_size(row):
            return _WORKSPACE
        if marks & evidence.BUCKET:
            return _BUCKET
        if marks & evidence.UNSHARDED:
            return _GATHERED
        if marks & evidence.RECOMPUTE and row < self._ledger.made:
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
        if kind == "optimizer" or (kind == "" and marks & evidence.OPTIMIZER):
            return _TEMPORARY if at_once else _STATE
        if kind == "backward" or (kind == "" and marks & evidence.BACKWARD):
            return self._from_backward(row, marks, made_in, freed_in, alive)
        in_module = marks & evidence.MODULE_CALL
        if marks & evidence.INIT and not in_module:
            return _TEMPORARY if at_once else _PARAMETER
        if kind == "data" or marks & evidence.DATA or (marks & evidence.COPY and not in_module):
            return _INPUT
        if at_once:
            return _TEMPORARY
        if in_module or (not alive and runs.kind(freed_in) == "backward"):
            return _ACTIVATION
        return _UNKNOWN

    def _workspace_by_size(self, row: int) -> int:
        ledger = self._ledger
        alive = ledger.freed[row] >= ledger.events
        its_size = ledger.requested[row] == evidence.CUBLAS_WORKSPACE_BYTES
        return _WORKSPACE if alive and its_size else _UNKNOWN

    def _recomputation_of(self, row: int) -> int:
        """The event with which the recomputation that made ``row`` gives way to other work."""
        if self._found.recomputed_until is None:
            ledger, marks = self._ledger, self._marks
            until = array("q", [ledger.events]) * ledger.made
            end = ledger.events
            for i in range(ledger.made - 1, -1, -1):
                if not marks.of(ledger.stack[i]) & evidence.RECOMPUTE:
                    end = ledger.start[i]
                until[i] = end
            self._found.recomputed_until = until
        return self._found.recomputed_until[row]

    def _from_backward(self, row: int, marks: int, made_in: int, freed_in: int, alive: bool) -> int:
        if not alive:
            return _DETAIL if freed_in == made_in else _GRADIENT
        if made_in < len(self._runs) - 1 or marks & evidence.ACCUMULATE:
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
