"""CUDA graphs: the operators that a capture recorded are computed at each replay.

As on a GPU nothing is computed while a graph is captured, and a replay works on the memory that
the captured operators had: calls hold addresses, and keep no tensor alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.native.values.draws import Key, key_of
from gpuprobe.patching import Patches

_CALLS: Final = "_gpuprobe_calls"


class Capture:
    """The calls of one graph, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._draws = 0

    def next_key(self) -> Key:
        """A number of the draw: `replayed` puts the generator's state in its place."""
        self._draws += 1
        return 0, self._draws

    def keyed(self, base: Key) -> None:
        """Give the draws of the next replay their keys."""
        for call in self.calls:
            if call.key is not None:
                number = call.key[1] & 0xFFFFFFFF
                call.key = base[0], (base[1] << 32) | number


def follow(computing: Any, patches: Patches) -> None:
    """Have captures and replays of `torch.cuda.CUDAGraph` compute values with ``computing``."""
    graph: Any = torch.cuda.CUDAGraph

    def replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        before = getattr(graph, name)
        patches.set(graph, name, functools.wraps(before)(make(before)))

    def begin(before: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = before(self, *args, **kwargs)
            computing.capture = Capture()
            return result

        return capture_begin

    def end(before: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(self: Any) -> Any:
            capture, computing.capture = computing.capture, None
            result = before(self)
            setattr(self, _CALLS, capture)
            return result

        return capture_end

    def play(before: Callable[..., Any]) -> Callable[..., Any]:
        def replay(self: Any) -> Any:
            capture = getattr(self, _CALLS, None)
            if capture is None or computing.capture is not None:
                return computing.placed(before, self)
            capture.keyed(key_of(None, None))
            result = computing.placed(before, self)
            computing.replay(capture.calls)
            return result

        return replay

    def forget(before: Callable[..., Any]) -> Callable[..., Any]:
        def reset(self: Any) -> Any:
            setattr(self, _CALLS, None)
            return before(self)

        return reset

    replace("capture_begin", begin)
    replace("capture_end", end)
    replace("replay", play)
    replace("reset", forget)
