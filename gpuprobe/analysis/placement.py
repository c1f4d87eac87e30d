"""Findings about tensors and modules on the wrong device: pure functions over a recording.

All rules need evidence in the recording, which the finding contains. A program without a GPU has no
findings: there, everything belongs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gpuprobe.model.findings import Finding, Fix, Level
from gpuprobe.model.rules import define
from gpuprobe.model.run.columns import PLACED
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Placed, Step
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Peak, Unavailable

SMALL_PART = 0.10
"""A part of the model with less than this share of its bytes is unlikely to be on another device on
purpose, because it frees little memory."""

IMBALANCE = 1.25
"""The ratio of the peak of DataParallel's output device to the others' mean from which it is
reported. Below that, gathering the outputs costs less than random differences between replicas."""

_NO_DEVICE = ("cpu", "meta")


_W, _N = Level.WARNING, Level.NOTE
RULES = (
    define("GP301", "module-on-cpu", Level.WARNING, "All modules of a GPU model are on the GPU"),
    define(
        "GP302",
        "split-model",
        (Level.WARNING, Level.NOTE),
        "A model is on one GPU unless split on purpose",
    ),
    define(
        "GP303",
        "pageable-batches",
        Level.WARNING,
        "Batches are copied to the GPU from pinned memory",
    ),
    define("GP304", "wrong-gpu", _W, "Inputs and memory are on the model's own GPU"),
    define("GP305", "data-parallel-imbalance", _W, "DataParallel balances its GPUs"),
)


class _RankPlacement(NamedTuple):
    """One rank: what is on which device, and its steps."""

    placed: tuple[Placed, ...]
    steps: Sequence[Step]
    local_rank: int
    world_size: int

    def of(self, what: str) -> list[Placed]:
        return [item for item in self.placed if item.what == what]

    def bytes_by_device(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for item in self.of("module"):
            found[item.device] = found.get(item.device, 0) + item.bytes
        return found

    def gpus(self) -> list[str]:
        return [device for device in self.bytes_by_device() if device not in _NO_DEVICE]


def placement_of(rank: RankRecording) -> tuple[Placed, ...]:
    """The devices of modules, inputs and batches, as recorded last; empty if not recorded."""
    row = rank.columns.mark(*PLACED).rfind(1)
    return rank.steps[row].placement if row >= 0 else ()


def all_findings(rank: RankRecording) -> tuple[Finding, ...]:
    """The findings recorded while the program ran, and those of the rules here."""
    return (*rank.findings, *misplaced(rank))


def misplaced(rank: RankRecording) -> list[Finding]:
    """Findings about what is on the wrong device, or is copied to its device slowly."""
    session = rank.session
    placement = _RankPlacement(
        placement_of(rank), rank.steps, session.local_rank, session.world_size
    )
    if not placement.gpus():
        return []
    return [finding for check in _CHECKS for finding in check(placement)]


def _module_on_cpu(placement: _RankPlacement) -> Iterator[Finding]:
    gpus = placement.gpus()
    for item in placement.of("module"):
        if item.device != "cpu" or not item.bytes:
            continue
        yield _finding(
            "GP301",
            Level.WARNING,
            f"{item.name} ({item.kind}, {human_bytes(item.bytes)}) is on the CPU, the rest of the "
            f"model on {', '.join(gpus)}",
            (("module", item.name), ("device", "cpu"), ("bytes", str(item.bytes))),
            Fix(
                "Move it with the rest of the model. model.to() only moves modules in a "
                "ModuleList, Parameters and registered buffers.",
                f'model.to("{gpus[0]}")',
            ),
            item.name,
        )


def _split_model(placement: _RankPlacement) -> Iterator[Finding]:
    by_device = {d: n for d, n in placement.bytes_by_device().items() if d not in _NO_DEVICE}
    if len(by_device) < 2:
        return
    total = sum(by_device.values())
    largest = max(by_device, key=lambda device: by_device[device])
    parts = ", ".join(f"{human_bytes(n)} on {d}" for d, n in sorted(by_device.items()))
    small = [d for d, n in by_device.items() if n < SMALL_PART * total]
    names = [item.name for item in placement.of("module") if item.device in small][:3]
    if small:
        message = (
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} on {', '.join(small)}, apart "
            f"from the rest of the model on {largest} ({parts}): its activations are copied "
            "between GPUs"
        )
    else:
        message = f"the model is split over {len(by_device)} GPUs: {parts}"
    yield _finding(
        "GP302",
        Level.WARNING if small else Level.NOTE,
        message,
        tuple(sorted((d, str(n)) for d, n in by_device.items())),
        Fix("If this is not intended, put the whole model on one GPU.", f'model.to("{largest}")'),
    )


def _pageable(placement: _RankPlacement) -> Iterator[Finding]:
    size = sum(item.bytes for item in placement.of("batch") if item.kind == "pageable")
    if not size:
        return
    yield _finding(
        "GP303",
        Level.WARNING,
        f"the DataLoader gives {human_bytes(size)} per step in pageable memory, which CUDA copies "
        "through an internal buffer while the program waits",
        (("bytes per step", str(size)),),
        Fix(
            "Pin the loader's memory and copy asynchronously.",
            "DataLoader(…, pin_memory=True); batch.to(device, non_blocking=True)",
        ),
    )


def _wrong_gpu(placement: _RankPlacement) -> Iterator[Finding]:
    gpus = placement.gpus()
    for item in placement.of("input"):
        if item.device.startswith("cuda") and item.device not in gpus:
            yield _finding(
                "GP304",
                Level.WARNING,
                f"the model on {', '.join(gpus)} is called with inputs on {item.device} "
                f"({human_bytes(item.bytes)} per step)",
                (("inputs", item.device), ("model", ", ".join(gpus))),
                Fix("Move the inputs to the model's device.", f'x.to("{gpus[0]}")'),
                item.device,
            )
    used = {item.device for item in placement.placed}
    if any(item.kind == "DataParallel" for item in placement.placed):
        return  # its replicas only exist during a step: no module stays on their devices
    for step in placement.steps[-1:]:
        for window in step.windows:
            allocated = window.end.allocated
            stray = window.device.startswith("cuda") and window.device not in used
            if stray and not isinstance(allocated, Unavailable) and allocated:
                yield _finding(
                    "GP304",
                    Level.WARNING,
                    f"{human_bytes(allocated)} are allocated on {window.device}, where neither "
                    f"the model nor its inputs are (they are on {', '.join(gpus)})"
                    + (
                        f"; this is local rank {placement.local_rank} of {placement.world_size} "
                        "ranks"
                        if placement.world_size > 1
                        else ""
                    ),
                    (("device", window.device), ("allocated", str(allocated))),
                    Fix(
                        "Set the GPU before creating the first tensor; the device 'cuda' without "
                        "an index is the current one.",
                        f"torch.cuda.set_device({gpus[0].partition(':')[2] or 0})",
                    ),
                    window.device,
                )


def _data_parallel(placement: _RankPlacement) -> Iterator[Finding]:
    if not any(item.kind == "DataParallel" for item in placement.of("module")):
        return
    found = imbalance(placement.steps)
    if found is None:
        return
    device, most, others = found
    yield _finding(
        "GP305",
        Level.WARNING,
        f"DataParallel: {device} peaks at {human_bytes(most)}, the other GPUs at "
        f"{human_bytes(others)} on average. It holds the parameters, the optimizer's state and "
        "the gathered outputs, and therefore limits the batch size",
        (("output device", device), ("its peak", str(most)), ("others' mean peak", str(others))),
        Fix(
            "Use DistributedDataParallel with one process per GPU, or compute the loss inside "
            "the module so that only scalars are gathered.",
            "torch.nn.parallel.DistributedDataParallel(model)",
        ),
        device,
    )


def imbalance(steps: Sequence[Step]) -> tuple[str, int, int] | None:
    """(device, its peak, the mean peak of the others) if one GPU peaks at more than `IMBALANCE`
    times the others' mean; None if they are balanced. Bytes. Of full steps: where a counter does
    not rise, a step has only a lower bound, so that the highest of all steps counts.
    """
    peaks: dict[str, int] = {}
    for step in [step for step in steps if step.ended_by != "end"] or steps:
        for window in step.windows:
            if window.device.startswith("cuda") and isinstance(window.peak_allocated, Peak):
                least = window.peak_allocated.at_least
                peaks[window.device] = max(least, peaks.get(window.device, 0))
    if len(peaks) < 2:
        return None
    device = max(peaks, key=lambda name: peaks[name])
    others = [peak for name, peak in peaks.items() if name != device]
    mean = sum(others) // len(others)
    return (device, peaks[device], mean) if peaks[device] > IMBALANCE * mean else None


_CHECKS: tuple[Callable[[_RankPlacement], Iterator[Finding]], ...] = (
    _module_on_cpu,
    _split_model,
    _pageable,
    _wrong_gpu,
    _data_parallel,
)


def _finding(
    rule: str,
    level: Level,
    message: str,
    evidence: tuple[tuple[str, str], ...],
    fix: Fix,
    subject: str = "",
) -> Finding:
    kind = next(known.kind for known in RULES if known.id == rule)
    return Finding(rule, kind, level, message, evidence, fix=fix, subject=subject)
