"""Suggestions how to use less of the memory that is needed: rules that each need evidence in the
recording. What is not needed has causes (`gpuprobe.causes.recorded`).

No rule fires without a measured reason, none suggests a setting that is already on, and each
suggestion has its evidence. They are sorted by the amount of memory that they affect.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from gpuprobe.analysis.peak.needs import Biographies, need_of_each
from gpuprobe.analysis.peak.peaks import HighWater, PeakSite, Share, by_category, by_line, window_of
from gpuprobe.analysis.trace.categories import categories
from gpuprobe.causes.live_memory import STATE, LiveMemory
from gpuprobe.errors import DataError
from gpuprobe.model.actions import OOM
from gpuprobe.model.causes import Suggestion
from gpuprobe.model.findings import Level
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.place import Place, SourceLine
from gpuprobe.model.rules import define
from gpuprobe.model.run.recording import ChildProcess
from gpuprobe.model.run.session import DeviceWindow
from gpuprobe.model.text import human_bytes, plural
from gpuprobe.model.trace import GRAD_OFF, GRAD_ON, MemoryTrace
from gpuprobe.model.values import Unavailable

RULES = tuple(
    define(id, "suggestion", Level.NOTE, title)
    for id, title in (
        ("expandable-segments", "Much reserved memory is not allocated"),
        ("graph-pools", "Free memory is in private pools of CUDA graphs"),
        ("kept-results", "Results that are kept for later dominate the peak"),
        ("checkpoint", "Activations dominate the peak, and none are recomputed"),
        ("chunked-loss", "Logits and what the loss makes of them dominate the peak"),
        ("smaller-batch", "Activations dominate the peak"),
        ("temporaries", "Temporary tensors take a large part of the peak"),
        ("optimizer-state", "Optimizer state takes a large part of the peak"),
        ("unused-gpu", "A program leaves its simulated GPU unused"),
        ("trace", "The peak was not traced"),
    )
)
"""The rules of suggestions; each `Suggestion` has the id of one."""

_DOMINATES = 0.4
"""The share of the peak from which a category is worth reducing: below that, halving it changes the
peak by less than a fifth."""

_UNUSED_SHARE = 0.2
"""The share of reserved memory that may be unused before fragmentation is reported."""

_UNUSED_BYTES = 256 * 1024 * 1024
"""The amount that may be unused. The allocator's large segments are 20 MiB; a few are harmless."""


@dataclass(slots=True)
class AdviceFacts:
    """The input of the rules: the peak, and the blocks alive at it (``mark``).

    ``when`` describes the moment of ``mark``: the peak, or the high water mark of another step.
    ``trains``: whether the peak is that of training, in which activations have to be kept.
    ``children``: the processes that the program started and that used a GPU, by the path of their
    recording.
    """

    site: PeakSite
    mark: HighWater | Unavailable
    when: str = "the peak"
    trains: bool = True
    children: Mapping[str, ChildProcess] = field(default_factory=dict)
    shares: dict[Category, int] = field(init=False, default_factory=dict)
    loss: Mapping[Category, int] = field(init=False, default_factory=dict)
    """The part of ``shares`` that has as many elements as the log-probabilities of a loss."""
    kept: int = field(init=False, default=0)
    """The bytes of activations in ``shares`` that are not for a backward pass: results that the
    program keeps for later."""
    needed: bool = field(init=False, default=False)
    """Whether ``shares`` has only what the program needs then: the rest has causes."""

    def __post_init__(self) -> None:
        if isinstance(self.mark, Unavailable):
            return
        lives = Biographies(self.mark.ledger)
        if lives.traced:
            self.needed = True
            self.trains = self.trains and not _without_backward(lives, self.mark.event)
            self.loss = _of_a_loss(lives, self.mark.event)
            rows = _needed_rows(self.mark)
            self.kept = _kept_for_later(lives, self.mark, rows)
            self.mark = _chosen(self.mark, rows)
        self.shares = {Category(s.key): s.bytes for s in by_category(self.mark)}

    @property
    def peak(self) -> int:
        """The least number of bytes at the peak; 0 if it was not measured."""
        amount = self.site.amount
        if isinstance(amount, Unavailable) or not self.site.device:
            return 0
        return amount.at_least

    @property
    def on_cpu(self) -> bool:
        """Whether a program that had a simulated GPU did not use it."""
        return self.site.rank.session.virtual and not self.site.device.startswith("cuda")

    def share(self, *categories: Category) -> tuple[int, float]:
        """The bytes of some categories at the peak, and their share of all `shares`."""
        count = sum(self.shares.get(category, 0) for category in categories)
        total = sum(self.shares.values())
        return count, count / total if total else 0.0

    def part(self, count: int, share: float) -> str:
        """``1.2 GiB of the peak (40%)``; and what it is a share of, if that is not all."""
        of = " of what is needed then" if self.needed else ""
        return f"{human_bytes(count)} of {self.when} ({share:.0%}{of})"

    def line(self, category: Category) -> Share[SourceLine] | None:
        """The line of user code with the most memory of a category at the peak."""
        if isinstance(self.mark, Unavailable):
            return None
        lines = by_line(_only(self.mark, category))
        return next((line for line in lines if isinstance(line.key, Place)), None)

    def has_code_of(self, file: str) -> bool:
        """Whether code in a file of this name (``torch/utils/checkpoint.py``) allocated."""
        return not isinstance(self.mark, Unavailable) and any(
            frame.filename.replace("\\", "/").endswith(file) for frame in self.mark.stacks.frames
        )

    def window(self) -> DeviceWindow | None:
        """The window of the peak's step."""
        step = self.site.step
        return None if step is None else window_of(step.windows, self.site.device)


def advise(evidence: AdviceFacts) -> list[Suggestion]:
    """All suggestions, those that affect the most memory first."""
    found = [advice for rule in _RULES for advice in rule(evidence)]
    return sorted(found, key=lambda advice: -advice.bytes)


def for_needed(evidence: AdviceFacts) -> Suggestion | None:
    """The suggestion that affects the most of the memory that is needed."""
    every = (advice for rule in _OF_NEEDED for advice in rule(evidence))
    return max(every, key=lambda advice: advice.bytes, default=None)


def _only(mark: HighWater, category: Category) -> HighWater:
    """The mark with the blocks of one category only."""
    return _chosen(mark, [i for i, code in enumerate(mark.category) if code == category.code])


def _without_backward(lives: Biographies, event: int) -> bool:
    """Whether most activations that are used after an event are not for a backward pass, as in an
    evaluation. Those that the trace ends with, and that have a graph, may be for one, as if memory
    ran out in the forward pass.
    """
    ledger = lives.ledger
    needs = lives.needs(event).items()
    rows = [row for row, need in needs if need is Need.LATER]
    rows = [
        row
        for row, code in zip(rows, categories(ledger, rows), strict=True)
        if code == Category.ACTIVATION.code
        and not (lives.survives(row) and lives.used_later(row))  # by a step of another trace
    ]
    strings = ledger.trace.stacks.strings
    phases = ledger.values("last_phase", rows)
    other = [
        ledger.size[row]
        for row, phase in zip(rows, phases, strict=True)
        if not strings[phase].startswith("backward")
    ]
    left = [row for row, need in needs if need is Need.OPEN and row < ledger.made]
    modes = ledger.values("grad", left)
    saved = sum(ledger.size[row] for row, mode in zip(left, modes, strict=True) if mode == GRAD_ON)
    return 2 * sum(other) > saved + sum(ledger.size[row] for row in rows)


def _needed_rows(mark: HighWater) -> list[int]:
    """The blocks of the mark that are needed then, as far as is known. Not activations of an
    earlier step that the recording ends with: this step's forward pass did not make them, as in a
    list of losses with their graphs that fills the GPU. Only if uses were traced.
    """
    needs = need_of_each(mark.ledger, mark.event)
    if isinstance(needs, Unavailable):
        raise ValueError(needs.reason)
    return [
        at
        for at, (need, code, before) in enumerate(
            zip(needs, mark.category, mark.is_baseline, strict=True)
        )
        if not need.needless
        and not (before and need is Need.OPEN and code == Category.ACTIVATION.code)
    ]


def _chosen(mark: HighWater, rows: Sequence[int]) -> HighWater:
    """The mark with these of its blocks."""
    selected = {}
    for name in ("address", "size", "stack", "category", "module", "is_baseline"):
        column = getattr(mark, name)
        selected[name] = type(column)(column.typecode, [column[i] for i in rows])
    return replace(mark, allocated=sum(selected["size"]), **selected)


_LOG_SOFTMAX: Final = "_log_softmax"


def _kept_for_later(lives: Biographies, mark: HighWater, rows: Sequence[int]) -> int:
    """The bytes of activations, among these blocks of the mark, that no forward pass made for its
    backward pass: made while gradients were disabled, or in an earlier step and not freed by a
    backward pass of this one.
    """
    alive = lives.ledger.alive(mark.event)
    modes = lives.ledger.values("grad", alive)
    return sum(
        mark.size[at]
        for at in rows
        if mark.category[at] == Category.ACTIVATION.code
        and (
            modes[at] == GRAD_OFF
            or (mark.is_baseline[at] and not lives.freed_in_backward(alive[at]))
        )
    )


def _of_a_loss(lives: Biographies, event: int) -> dict[Category, int]:
    """The bytes, by category, of needed blocks just after ``event`` that have an element for each
    element of a log-softmax of the trace: logits, their conversions and their gradients.
    """
    live = LiveMemory(lives, event)
    width, requested = live.column("width"), live.ledger.requested
    if _LOG_SOFTMAX not in live.ledger.trace.stacks.strings:
        return {}
    numbers = {
        requested[row] // width[row]
        for row in (*_log_probabilities(live), *_too_large_for_log_softmax(live))
        if width[row]
    }
    rows = [
        row
        for row, need in live.needs.items()
        if not need.needless and width[row] and requested[row] // width[row] in numbers
    ]
    sizes: dict[Category, int] = {}
    for row, code in zip(rows, categories(live.ledger, rows), strict=True):
        category = Category.from_code(code)
        if category not in STATE:
            sizes[category] = sizes.get(category, 0) + live.size[row]
    return sizes


def _log_probabilities(live: LiveMemory) -> Iterator[int]:
    """The results of a log-softmax that the backward pass uses."""
    name = live.ledger.trace.stacks.strings.index(_LOG_SOFTMAX)
    for row, made in enumerate(live.column("made_name")):
        if made == name and live.for_backward(row):
            yield row


def _too_large_for_log_softmax(live: LiveMemory) -> Iterator[int]:
    """What a log-softmax reads that memory runs out in: it has no result."""
    actions = live.ledger.trace.events.action
    failed = {live.lives.operator[at] for at, action in enumerate(actions) if action == OOM}
    for row in live.rows if failed else ():
        if live.lives.last[row] in failed and live.text("last_name", row) == _LOG_SOFTMAX:
            yield row


def _fragmented(evidence: AdviceFacts) -> Iterator[Suggestion]:
    window = evidence.window()
    if window is None or not evidence.site.device.startswith("cuda"):
        return
    if isinstance(window.peak_reserved, Unavailable) or isinstance(
        window.peak_allocated, Unavailable
    ):
        return
    reserved = window.peak_reserved.at_least
    unused = reserved - window.peak_allocated.at_most
    if unused < max(_UNUSED_SHARE * reserved, _UNUSED_BYTES):
        return
    conf = evidence.site.rank.environment.allocator_conf
    if re.search(r"expandable_segments\s*:\s*true", conf, re.IGNORECASE):
        return
    others = re.sub(r",?\s*expandable_segments\s*:\s*\w+", "", conf).strip(", ")
    reason = (
        f"{human_bytes(unused)} of {human_bytes(reserved)} reserved from the driver were not "
        "allocated even at the step's peak"
    )
    if not isinstance(window.activity, Unavailable) and window.activity.alloc_retries:
        reason += f"; the allocator emptied its cache {window.activity.alloc_retries}× in that step"
    private = _private_pools(evidence)
    held = sum(private.values())
    if 2 * held > unused:
        # Expandable segments do not join the pools of graphs: each would have its own.
        if len(private) > 1:
            yield Suggestion(
                "graph-pools",
                "Let the CUDA graphs share one memory pool, if they are replayed one after the "
                "other in the order in which they were captured.",
                "torch.cuda.graph(graph, pool=first_graph.pool())",
                f"{reason}; {human_bytes(held)} are free in {len(private)} private pools",
                held,
            )
        return
    saves = ""
    replayed = _replayed(evidence.site)
    if replayed is not None:
        before, after = replayed
        if before - after < max(_GAIN * before, _GAIN_BYTES):
            return
        saves = (
            f"{human_bytes(before - after)} of reserved memory: the traced steps reserve "
            f"{human_bytes(after)} instead of {human_bytes(before)} (replayed)"
        )
    yield Suggestion(
        "expandable-segments",
        "Use expandable segments, which let free blocks of different sizes merge.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" + (f",{others}" if others else ""),
        reason,
        unused,
        saves,
    )


def _private_pools(evidence: AdviceFacts) -> dict[tuple[int, int], int]:
    """The free bytes of each private pool when the trace of the peak ended."""
    if isinstance(evidence.mark, Unavailable):
        return {}
    free: dict[tuple[int, int], int] = {}
    for segment in evidence.mark.ledger.trace.segments:
        if segment.pool_id != (0, 0):
            unused = segment.total_size - segment.allocated_size
            free[segment.pool_id] = free.get(segment.pool_id, 0) + unused
    return free


_GAIN = 0.02
_GAIN_BYTES = 20 * 1024 * 1024
"""The share of reserved memory, and the bytes, from which a setting is worth it."""

_MOST_EVENTS = 200_000
"""Events that are replayed for a report, which has to be quick."""


def _replayed(site: PeakSite) -> tuple[int, int] | None:
    """The peak of reserved memory with the recorded settings and with expandable segments, in the
    traced steps without a gap that reserve the most; None if it cannot be replayed.
    """
    # 15 ms: the simulator; only recordings with much unused memory need it.
    from gpuprobe.allocator.joined import joined, runs_of
    from gpuprobe.allocator.replay import replay_trace
    from gpuprobe.allocator.whatif import what_if

    traced = site.rank.traced_steps()
    if not traced:
        return None
    traces: list[MemoryTrace] = []
    try:
        for step in traced:
            traces += [t for t in site.rank.traces.of(step) if t.device == site.device]
            if sum(len(trace.events) for trace in traces) > _MOST_EVENTS:
                return None
    except DataError:
        return None
    runs = [[traces[at] for at in run] for run in runs_of(traces)]
    if not runs:
        return None
    trace = joined(max(runs, key=lambda run: max(_reserved(trace) for trace in run)))
    recorded = replay_trace(trace)
    if not recorded.exact:
        return None
    settings = replace(recorded.settings, expandable_segments=True)
    before, after = (what_if(trace, recorded, one) for one in (recorded.settings, settings))
    return before.peak_reserved.least, after.peak_reserved.most


def _reserved(trace: MemoryTrace) -> int:
    return sum(segment.total_size for segment in trace.segments)


def _kept_results(evidence: AdviceFacts) -> Iterator[Suggestion]:
    count, total = evidence.kept, sum(evidence.shares.values())
    if not total or count < _DOMINATES * total:
        return
    line = evidence.line(Category.ACTIVATION)
    where = "" if line is None else f", most of them from {line.key}"
    yield Suggestion(
        "kept-results",
        "Keep fewer of the results, or keep them in a narrower type.",
        ".half()",
        f"results of earlier steps, or without gradients, are {evidence.part(count, count / total)}"
        f"{where}",
        count // 2,
    )


def _activations(evidence: AdviceFacts) -> Iterator[Suggestion]:
    count = evidence.share(Category.ACTIVATION)[0] - evidence.kept
    total = sum(evidence.shares.values())
    share = count / total if total else 0.0
    if share < _DOMINATES or not evidence.trains:
        return
    line = evidence.line(Category.ACTIVATION)
    reason = f"activations are {evidence.part(count, share)}"
    if line is not None:
        reason += f", {human_bytes(line.bytes)} of them allocated at {line.key}"
    of_blocks = count - evidence.loss.get(Category.ACTIVATION, 0)
    dominate = of_blocks >= _DOMINATES * sum(evidence.shares.values())
    if dominate and not evidence.has_code_of("torch/utils/checkpoint.py"):
        yield Suggestion(
            "checkpoint",
            "Use activation checkpointing for the modules with the most activations.",
            "torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)",
            reason,
            count,
        )
    yield Suggestion(
        "smaller-batch",
        "Halve the batch size and accumulate gradients over two batches, to reduce activations.",
        "",
        reason,
        count // 2,
    )


def _loss(evidence: AdviceFacts) -> Iterator[Suggestion]:
    count, total = sum(evidence.loss.values()), sum(evidence.shares.values())
    if not evidence.trains or not count or count < _DOMINATES * total:
        return
    yield Suggestion(
        "chunked-loss",
        "Compute the loss in chunks, from what the last layer gets, and recompute each in the "
        "backward pass; or use a fused linear cross entropy (Liger Kernel). Logits and gradients "
        "exist for one chunk then; checkpoints of layers keep them.",
        "sum(checkpoint(part, h, t, use_reentrant=False) for h, t in "
        "zip(hidden.chunk(8), targets.chunk(8)))",
        f"logits, and what the loss makes of them, are {evidence.part(count, count / total)}",
        count - count // _CHUNKS,
    )


_CHUNKS: Final = 8


def _temporaries(evidence: AdviceFacts) -> Iterator[Suggestion]:
    count, share = evidence.share(Category.TEMPORARY, Category.AUTOGRAD_DETAIL)
    line = evidence.line(Category.TEMPORARY)
    if share < _DOMINATES or line is None:
        return
    yield Suggestion(
        "temporaries",
        f"Work in smaller chunks, or in place, at {line.key}.",
        "",
        f"temporary tensors are {evidence.part(count, share)}, "
        f"{human_bytes(line.bytes)} of them allocated there",
        line.bytes,
    )


def _optimizer_state(evidence: AdviceFacts) -> Iterator[Suggestion]:
    count, share = evidence.share(Category.OPTIMIZER_STATE)
    parameters, _ = evidence.share(Category.PARAMETER)
    # Adam in the parameters' precision keeps twice their size. SGD with momentum and 8-bit states
    # keep less than 1.5 times their size: there is little to gain.
    if share < _DOMINATES or count < 1.5 * parameters or not parameters:
        return
    text = "Use an optimizer with less state: 8-bit Adam, Adafactor, or SGD with momentum."
    if evidence.site.rank.session.world_size > 1:
        text = "Shard the optimizer state over the ranks, or use 8-bit Adam or Adafactor."
    yield Suggestion(
        "optimizer-state",
        text,
        "",
        f"optimizer state is {evidence.part(count, share)}, "
        f"{count / parameters:.1f} × the parameters",
        count,
    )


def _unused_gpu(evidence: AdviceFacts) -> Iterator[Suggestion]:
    if not evidence.on_cpu:
        return
    if evidence.children:
        yield _used_by_others(evidence.children)
        return
    text = "Move the model and its data to the GPU, if torch.cuda.is_available()."
    reason = "the program allocated nothing on the simulated GPU"
    end = evidence.site.rank.end
    if end is not None and end.error is not None:  # a program may use a GPU late
        at = f" at {end.error.place}" if end.error.place else ""
        text = f"Correct the {end.error.type}{at} first: it ended before it used the GPU."
        reason += " before its error"
    yield Suggestion("unused-gpu", text, "", reason, 0)


def _used_by_others(children: Mapping[str, ChildProcess]) -> Suggestion:
    """To read the recording of the process that allocated most."""

    def allocated(path: str) -> int:
        peaks = (peak.allocated for peak in children[path].peaks)
        return max(
            (peak.at_least for peak in peaks if not isinstance(peak, Unavailable)), default=0
        )

    largest = max(children, key=allocated)
    count = plural(len(children), "process")
    reason = (
        f"the program allocated nothing on the simulated GPU, but {count} that it started did, "
        f"at most {human_bytes(allocated(largest))}"
    )
    text = f"Read what the process allocated: gpuprobe report {shlex.quote(largest)}"
    return Suggestion("unused-gpu", text, "", reason, 0)


def _untraced(evidence: AdviceFacts) -> Iterator[Suggestion]:
    if evidence.site.rank.session.level != "counters" or evidence.site.step is None:
        return
    if evidence.on_cpu:
        return
    step = evidence.site.step
    known = sum(t.known for t in step.tensors if t.device == evidence.site.device)
    if evidence.peak and known > (1 - _DOMINATES) * evidence.peak:
        return
    reason = "at level 'counters' only parameters, gradients and optimizer state are named"
    if evidence.peak and known:
        reason = (
            f"named tensors explain {human_bytes(known)} of the "
            f"{human_bytes(evidence.peak)} at the peak"
        )
    yield Suggestion(
        "trace",
        "Record again with --level trace to see the lines and modules that hold the memory.",
        "",
        reason,
        max(evidence.peak - known, 0),
    )


_Rule: TypeAlias = Callable[[AdviceFacts], Iterator[Suggestion]]
_OF_NEEDED: tuple[_Rule, ...] = (_activations, _kept_results, _loss, _temporaries, _optimizer_state)
_RULES: tuple[_Rule, ...] = (_fragmented, *_OF_NEEDED, _unused_gpu, _untraced)
