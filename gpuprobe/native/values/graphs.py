"""CUDA graphs: the operators that a capture recorded are computed at each replay.

As on a GPU nothing is computed while a graph is captured, and a replay works on the memory that
the captured operators had: calls hold addresses, and keep no tensor alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, TypeAlias

from torch.cuda import CUDAGraph

from gpuprobe.native.values.computing import Capture, Computing
from gpuprobe.native.values.draws import key_of
from gpuprobe.patching import Patches

_Method: TypeAlias = Callable[..., object]
_CALLS: Final = "_gpuprobe_calls"


def follow(computing: Computing, patches: Patches) -> None:
    """Have captures and replays of `torch.cuda.CUDAGraph` compute values with ``computing``."""

    def replace(name: str, make: Callable[[_Method], _Method]) -> None:
        before = getattr(CUDAGraph, name)
        patches.set(CUDAGraph, name, functools.wraps(before)(make(before)))

    def begin(before: _Method) -> _Method:
        def capture_begin(self: CUDAGraph, *args: object, **kwargs: object) -> object:
            result = before(self, *args, **kwargs)
            computing.capture = Capture()
            return result

        return capture_begin

    def end(before: _Method) -> _Method:
        def capture_end(self: CUDAGraph) -> object:
            capture, computing.capture = computing.capture, None
            result = before(self)
            setattr(self, _CALLS, capture)
            return result

        return capture_end

    def play(before: _Method) -> _Method:
        def replay(self: CUDAGraph) -> object:
            capture = getattr(self, _CALLS, None)
            if capture is None or computing.capture is not None:
                return computing.placed(before, self)
            capture.keyed(key_of(None, None))
            result = computing.placed(before, self)
            computing.replay(capture.calls)
            return result

        return replay

    def forget(before: _Method) -> _Method:
        def reset(self: CUDAGraph) -> object:
            setattr(self, _CALLS, None)
            return before(self)

        return reset

    replace("capture_begin", begin)
    replace("capture_end", end)
    replace("replay", play)
    replace("reset", forget)
