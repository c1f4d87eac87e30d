"""Memory that no tensor holds: holes, other users of the device, pinned memory."""

from __future__ import annotations

from gpuprobe.model.report import DeviceUsage, PinnedMemory
from gpuprobe.model.run.columns import PINNED
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.values import ReadStatus, Unavailable

_NOT_ASKED = Unavailable("not collected", ReadStatus.NOT_COLLECTED)


def device_memory(rank: RankRecording) -> tuple[DeviceUsage, ...]:
    """Of every device of a rank of which more is known than its tensors, by name."""
    columns = rank.columns
    found = []
    for device in sorted(columns.devices):
        # A step that did not read it does not hide one that did.
        row = columns.mark("used", device).rfind(1)
        known = row >= 0
        row = row if known else columns.mark("split", device).find(1)
        for window in rank.steps[row].windows if row >= 0 else ():
            if window.device == device:
                found.append(
                    DeviceUsage(
                        rank.session.rank,
                        device,
                        rank.steps[row].index,
                        window.end.reserved,
                        window.inactive_split,
                        window.device_used if known else _NOT_ASKED,
                        window.not_torch if known else _NOT_ASKED,
                    )
                )
                break
    return tuple(found)


def pinned_memory(rank: RankRecording) -> PinnedMemory | None:
    """None where no step tells."""
    row = rank.columns.mark(*PINNED).rfind(1)
    step = rank.steps[row] if row >= 0 else None
    if step is None or isinstance(step.host.pinned, Unavailable):
        return None
    return PinnedMemory(step.index, step.host.pinned, step.host.pinned_held)
