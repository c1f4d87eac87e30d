"""The legacy default stream, which other streams of its device wait for.

Before something is queued on it, it waits for all blocking streams, and they wait for it: those
that were made without ``cudaStreamNonBlocking``. Streams of torch's pools are not. Source: the
CUDA runtime API, "Stream synchronization behavior".
"""

from __future__ import annotations

from collections.abc import Callable, Collection


class LegacyDefault:
    """Which actors wait for each other. ``blocking``: whether a stream, by device and number, and
    the legacy default one do.
    """

    def __init__(self) -> None:
        self.blocking: Callable[[int, int], bool] | None = None
        self._actors: dict[int, set[int]] = {}  # blocking streams, by device
        self._defaults: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._actors)

    def made(self, actor: int, device: int, number: int) -> None:
        """A stream has its actor."""
        if number == 0:
            self._defaults[device] = actor
        elif self.blocking is not None and self.blocking(device, number):
            self._actors.setdefault(device, set()).add(actor)

    def before(self, actor: int, device: int) -> Collection[int]:
        """The actors that one of this device waits for before something is queued on it."""
        blocking = self._actors.get(device, ())
        default = self._defaults.get(device)
        if actor == default:
            return blocking
        return (default,) if actor in blocking and default is not None else ()
