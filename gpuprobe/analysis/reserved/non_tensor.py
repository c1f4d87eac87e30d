"""What lies beside the bytes that tensors hold: holes, other users of the device, pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprobe.model.run.session import DeviceWindow, Step
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable

__all__ = ["Beside", "PinnedMemory", "beside", "pinned_memory"]

_NOT_ASKED = Unavailable("not collected", ReadStatus.NOT_COLLECTED)


@dataclass(frozen=True, slots=True)
class Beside:
    """One device, at the end of the last step that tells. Unit: bytes.

    ``used`` (by anybody) = ``reserved`` (by torch) + ``not_torch`` (contexts, libraries, NCCL,
    other processes); ``reserved`` = what tensors have + cached, of which ``inactive_split`` lies
    in segments that are partly in use and serves nothing larger than its holes.
    """

    device: str
    step: int
    reserved: Bytes | Unavailable
    inactive_split: Bytes | Unavailable
    used: Bytes | Unavailable
    not_torch: Bytes | Unavailable


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """Pinned memory of the host at the end of the last step that tells: in use, and held by
    torch's cache (which never gives it back by itself). Unit: bytes.
    """

    step: int
    in_use: Bytes
    held: Bytes | Unavailable


def beside(steps: Sequence[Step]) -> tuple[Beside, ...]:
    """Of every device of which more is known than its tensors, by name."""
    found: dict[str, Beside] = {}
    for step in steps:
        for window in step.windows:
            told = not isinstance(window.device_used, Unavailable)
            # A step that did not ask does not hide one that did.
            if told or (window.device not in found and _split(window) is not None):
                found[window.device] = Beside(
                    window.device,
                    step.index,
                    window.end.reserved,
                    window.inactive_split,
                    window.device_used if told else _NOT_ASKED,
                    window.not_torch if told else _NOT_ASKED,
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
