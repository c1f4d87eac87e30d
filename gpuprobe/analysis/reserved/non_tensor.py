"""Memory that no tensor holds: holes, other users of the device, pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprobe.model.report import DeviceUsage, PinnedMemory
from gpuprobe.model.run.session import DeviceWindow, Step
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable

_NOT_ASKED = Unavailable("not collected", ReadStatus.NOT_COLLECTED)


def device_memory(steps: Sequence[Step], rank: int = 0) -> tuple[DeviceUsage, ...]:
    """Of every device of a rank of which more is known than its tensors, by name."""
    found: dict[str, DeviceUsage] = {}
    for step in steps:
        for window in step.windows:
            known = not isinstance(window.device_used, Unavailable)
            # A step that did not ask does not hide one that did.
            if known or (window.device not in found and _split(window) is not None):
                found[window.device] = DeviceUsage(
                    rank,
                    window.device,
                    step.index,
                    window.end.reserved,
                    window.inactive_split,
                    window.device_used if known else _NOT_ASKED,
                    window.not_torch if known else _NOT_ASKED,
                )
    return tuple(found[device] for device in sorted(found))


def _split(window: DeviceWindow) -> Bytes | None:
    return None if isinstance(window.inactive_split, Unavailable) else window.inactive_split


def pinned_memory(steps: Sequence[Step]) -> PinnedMemory | None:
    """None where no step tells."""
    for step in reversed(steps):
        if not isinstance(step.host.pinned, Unavailable):
            return PinnedMemory(step.index, step.host.pinned, step.host.pinned_held)
    return None
