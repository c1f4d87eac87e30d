"""Suggestions how to use less memory: rules that each need evidence in the recording.

No rule fires without a measured reason, none suggests a setting that is already on, and each
suggestion has its evidence. They are sorted by the amount of memory that they affect.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpuprobe.analysis.growth import MINIMUM_SHARE, Growth, keeper
from gpuprobe.analysis.peak.high_water import HighWater, Share, by_category, by_line
from gpuprobe.analysis.peak.needs import needed_at, needs_at
from gpuprobe.analysis.peak.peaks import PeakSite, window_of
from gpuprobe.model.findings import Level
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need, NeedTable
from gpuprobe.model.place import NoPlace, Place, SourceLine
from gpuprobe.model.report import LeakRow, Suggestion
from gpuprobe.model.rules import define
from gpuprobe.model.run.columns import INDEX
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.run.session import DeviceWindow
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Peak, Unavailable

RULES = tuple(
    define(id, "suggestion", Level.NOTE, title)
    for id, title in (
        ("growth", "Memory grows from step to step"),
        ("unneeded", "Memory at the peak is not used again"),
        ("evaluation", "Memory is allocated after training, without a backward pass"),
        ("expandable-segments", "Much reserved memory is not allocated"),
        ("zero-grad", "Gradients are alive during the forward pass"),
        ("checkpoint", "Activations dominate the peak, and none are recomputed"),
        ("smaller-batch", "Activations dominate the peak"),
        ("temporaries", "Temporary tensors take a large part of the peak"),
        ("optimizer-state", "Optimizer state takes a large part of the peak"),
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
    """The input of the rules: the peak, the blocks alive at it (``mark``), growth, and the line
    that leaves most behind in a step (``leak``).

    ``when`` describes the moment of ``mark``: the peak, or the high water mark of another step.
    ``after_training`` is what was allocated after the last training step, in words.
    """

    site: PeakSite
    mark: HighWater | Unavailable
    growth: Growth | None = None
    leak: LeakRow | None = None
    when: str = "the peak"
    shares: dict[Category, int] = field(init=False, default_factory=dict)
    after_training: str = field(init=False, default="")
    needs: NeedTable | Unavailable = field(init=False)

    def __post_init__(self) -> None:
        self.after_training = _after_training(self)
        if isinstance(self.mark, Unavailable):
            self.needs = self.mark
        else:
            self.needs = needs_at(self.mark.ledger, self.mark.event)
            if not isinstance(self.needs, Unavailable):
                # What is not used again needs no smaller work: other rules are about the rest.
                self.mark = _chosen(self.mark, needed_at(self.mark.ledger, self.mark.event))
        if not isinstance(self.mark, Unavailable):
            self.shares = {Category(s.key): s.bytes for s in by_category(self.mark)}

    @property
    def peak(self) -> int:
        """The least number of bytes at the peak; 0 if it was not measured."""
        amount = self.site.amount
        if isinstance(amount, Unavailable) or not self.site.device:
            return 0
        return amount.at_least

    @property
    def phase(self) -> str:
        """The phase at the moment of ``mark``; empty if none was recorded."""
        if isinstance(self.mark, Unavailable) or self.when == "the peak":
            return self.site.phase
        return self.mark.phase

    def share(self, *categories: Category) -> tuple[int, float]:
        """The bytes of some categories at the peak, and their share of all that was alive."""
        count = sum(self.shares.get(category, 0) for category in categories)
        total = sum(self.shares.values())
        return count, count / total if total else 0.0

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

    def state_growth(self, first: int, last: int) -> int:
        """The growth of the optimizer's state from the end of step ``first`` to that of ``last``.
        Bytes; 0 if unknown.
        """
        held = [
            tensors.by_category.get(Category.OPTIMIZER_STATE, 0)
            for row, index in enumerate(self.site.rank.columns.number(*INDEX))
            if index in (first, last)
            for step in self.site.rank.steps[row : row + 1]
            for tensors in step.tensors
            if tensors.device == self.site.device
        ]
        return max(0, held[-1] - held[0]) if len(held) > 1 else 0

    def window(self) -> DeviceWindow | None:
        """The window of the peak's step."""
        step = self.site.step
        return None if step is None else window_of(step.windows, self.site.device)


def advise(evidence: AdviceFacts) -> list[Suggestion]:
    """All suggestions, those that affect the most memory first."""
    found = [advice for rule in _RULES for advice in rule(evidence)]
    return sorted(found, key=lambda advice: -advice.bytes)


def _only(mark: HighWater, category: Category) -> HighWater:
    """The mark with the blocks of one category only."""
    return _chosen(mark, [i for i, code in enumerate(mark.category) if code == category.code])


def _chosen(mark: HighWater, rows: Sequence[int]) -> HighWater:
    """The mark with these of its blocks."""
    selected = {}
    for name in ("address", "size", "stack", "category", "module", "is_baseline"):
        column = getattr(mark, name)
        selected[name] = type(column)(column.typecode, [column[i] for i in rows])
    return replace(mark, allocated=sum(selected["size"]), **selected)


def _percent(part: float) -> str:
    return f"{part:.0%}"


_STATE_GROWS = (
    "The optimizer state grows with every step: limit its size (for L-BFGS, with history_size)."
)


def _growing(evidence: AdviceFacts) -> Iterator[Suggestion]:
    growth = evidence.growth
    if growth is None:
        yield from _leaking(evidence)
        return
    reason = (
        f"{human_bytes(growth.bytes)} more is allocated at the end of step {growth.last} than at "
        f"the end of step {growth.first}: {human_bytes(growth.per_step)} per step"
    )
    line = next((s for s in growth.lines if s.bytes > 0 and isinstance(s.key, Place)), None)
    state = evidence.state_growth(growth.first, growth.last)
    kept = _keeper(evidence, growth.last - growth.first, growth.bytes)
    if 2 * state > growth.bytes:
        text = _STATE_GROWS
        reason += f"; optimizer state held {human_bytes(state)} more"
    elif kept is not None:
        text = _keep_none(kept)
        reason += f"; {kept.name} held {kept.contents}"
    elif line is not None:
        text = (
            f"Find what keeps the tensors allocated at {line.key} alive from step to step (such "
            "as a list of losses that were not detached, or an unbounded cache)."
        )
        reason += f"; that line held {human_bytes(line.bytes)} more"
    else:
        text = (
            "Look for tensors that are kept from step to step: a list of losses that were not "
            "detached (use loss.item()), or an unbounded cache."
        )
    # Growth does not end: whatever its size so far, it is the first suggestion.
    yield Suggestion("growth", text, "", reason, max(evidence.peak, growth.bytes) + 1)


def _keeper(evidence: AdviceFacts, steps: int, grown: int) -> Holder | None:
    end = evidence.site.rank.end
    return None if end is None else keeper(end.holders, steps, grown)


_A_NUMBER: Final = 1 << 10
"""Bytes up to which a tensor that is kept is probably a loss or another number."""


def _keep_none(kept: Holder) -> str:
    if kept.of_graph:
        return (
            f"Keep no autograd graph in {kept.place}: add numbers (loss.item()), or tensors "
            "without their graph (loss.detach())."
        )
    instead = "copies on the CPU without their graph (tensor.detach().cpu())"
    if kept.bytes <= _A_NUMBER * kept.tensors:
        instead = f"keep numbers (loss.item()), or {instead}"
    else:
        instead = f"drop those you no longer need, or keep {instead}"
    return f"Keep no tensors in {kept.place}: {instead}."


def _leaking(evidence: AdviceFacts) -> Iterator[Suggestion]:
    """Leaks of runs that are too short or too uneven for the ends of their steps to show growth."""
    if evidence.leak is None:
        return
    line, size, per_step = evidence.leak.key, evidence.leak.bytes, evidence.leak.bytes_per_step
    if isinstance(line, NoPlace) or size < MINIMUM_SHARE * evidence.peak:
        return
    text = (
        f"Find what keeps the tensors allocated at {line} alive from step to step (such as a "
        "list of losses that were not detached, or an unbounded cache)."
    )
    place, more = "there", ""
    last = evidence.site.rank.steps[-1].index if evidence.site.rank.steps else 0
    if 2 * evidence.state_growth(last - 1, last) > per_step:
        text, place = _STATE_GROWS, f"at {line}"
    elif kept := _keeper(evidence, last, size):
        text, place = _keep_none(kept), f"at {line}"
        more = f"; {kept.name} held {kept.contents}"
    yield Suggestion(
        "growth",
        text,
        "",
        f"{human_bytes(size)} allocated {place} outlived its step: "
        f"{human_bytes(per_step)} per step{more}",
        max(evidence.peak, size) + 1,
    )


_UNNEEDED = 0.1
"""The share of the peak from which memory that is not used again is reported: autograd itself frees
some memory later than it could."""


def _unneeded(evidence: AdviceFacts) -> Iterator[Suggestion]:
    table = evidence.needs
    if isinstance(table, Unavailable) or evidence.peak == 0:
        return
    needless = table.bytes_of(*(need for need in Need if need.needless))
    tensors = table.total - table.bytes_of(Need.UNTRACED)
    if needless < _UNNEEDED * tensors:
        return
    lines = [line for row in table.rows if Need(row.need).needless for line in row.lines]
    most = max(lines, key=lambda line: line.bytes)
    argv = evidence.site.rank.session.argv
    yield Suggestion(
        "unneeded",
        f"Find what keeps memory that is not used again: most of it is from {most.key}.",
        shlex.join(["gpuprobe", "explain", *argv]) if argv else "",
        f"{human_bytes(needless)} of {evidence.when} are not used again; freed after its last use, "
        f"the trace would need {human_bytes(table.freed_after_use)}",
        max(evidence.peak, needless),
    )


_MORE_THAN_TRAINING = 1.5
"""How many times the peak of the training steps a peak after them must be, to be one of another
kind."""


def _after_training(evidence: AdviceFacts) -> str:
    """What was allocated after the last training step, without a backward pass since, in words; ""
    if that is not most of the peak.
    """
    step, device = evidence.site.step, evidence.site.device
    if step is None or step.ended_by != "end" or not device.startswith("cuda"):
        return ""
    if {"backward", "optimizer"} & {phase.path.partition("/")[0] for phase in step.phases}:
        return ""
    trained = [
        window.peak_allocated.at_most
        for one in evidence.site.rank.steps
        if one.ended_by == "optimizer"
        for window in one.windows
        if window.device == device and isinstance(window.peak_allocated, Peak)
    ]
    window = evidence.window()
    start = None if window is None else window.start.allocated
    if not trained or not isinstance(start, int):
        return ""
    grown = evidence.peak - start
    if evidence.peak < _MORE_THAN_TRAINING * max(trained) or 2 * grown < evidence.peak:
        return ""
    return (
        f"after step {step.index - 1}, {human_bytes(grown)} were allocated without a backward "
        "pass, as in an evaluation without no_grad; the training steps needed at most "
        f"{human_bytes(max(trained))}"
    )


def _evaluation(evidence: AdviceFacts) -> Iterator[Suggestion]:
    reason = evidence.after_training
    if reason:
        yield Suggestion(
            "evaluation",
            "If these forward passes train nothing, such as an evaluation, run them without "
            "gradients: otherwise each keeps its activations for as long as its result is kept.",
            "with torch.no_grad():",
            reason,
            evidence.peak + 1,
        )


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
    yield Suggestion(
        "expandable-segments",
        "Use expandable segments, which let free blocks of different sizes merge.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" + (f",{others}" if others else ""),
        reason,
        unused,
    )


def _gradients_in_forward(evidence: AdviceFacts) -> Iterator[Suggestion]:
    count, share = evidence.share(Category.GRADIENT)
    if evidence.phase.partition("/")[0] != "forward" or share < 0.05:
        return
    yield Suggestion(
        "zero-grad",
        "Free the gradients before the forward pass, not after it (unless you accumulate them).",
        "optimizer.zero_grad(set_to_none=True)",
        f"{human_bytes(count)} of gradients ({_percent(share)}) were alive at {evidence.when}, "
        "which is in the forward pass",
        count,
    )


def _activations(evidence: AdviceFacts) -> Iterator[Suggestion]:
    count, share = evidence.share(Category.ACTIVATION)
    if share < _DOMINATES or evidence.after_training:
        return
    line = evidence.line(Category.ACTIVATION)
    reason = f"activations are {human_bytes(count)} of {evidence.when} ({_percent(share)})"
    if line is not None:
        reason += f", {human_bytes(line.bytes)} of them allocated at {line.key}"
    if not evidence.has_code_of("torch/utils/checkpoint.py"):
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


def _temporaries(evidence: AdviceFacts) -> Iterator[Suggestion]:
    count, share = evidence.share(Category.TEMPORARY, Category.AUTOGRAD_DETAIL)
    line = evidence.line(Category.TEMPORARY)
    if share < _DOMINATES or line is None:
        return
    yield Suggestion(
        "temporaries",
        f"Work in smaller chunks, or in place, at {line.key}.",
        "",
        f"temporary tensors are {human_bytes(count)} of {evidence.when} ({_percent(share)}), "
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
        f"optimizer state is {human_bytes(count)} of {evidence.when} ({_percent(share)}), "
        f"{count / parameters:.1f} × the parameters",
        count,
    )


def _untraced(evidence: AdviceFacts) -> Iterator[Suggestion]:
    if evidence.site.rank.session.level != "counters" or evidence.site.step is None:
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
        "Record again at level 'trace' to see the lines and modules that hold the memory.",
        "gpuprobe run --level trace …",
        reason,
        max(evidence.peak - known, 0),
    )


_RULES: tuple[Callable[[AdviceFacts], Iterator[Suggestion]], ...] = (
    _growing,
    _unneeded,
    _evaluation,
    _fragmented,
    _gradients_in_forward,
    _activations,
    _temporaries,
    _optimizer_state,
    _untraced,
)
