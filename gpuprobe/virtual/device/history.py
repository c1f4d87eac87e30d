"""``torch.cuda.memory._record_memory_history`` and ``_snapshot`` of a virtual device.

The dictionaries have torch's schema (``docs/source/torch_cuda_memory.md`` and
``torch/csrc/cuda/memory_snapshot.cpp`` in PyTorch), so what reads a real snapshot reads these.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from gpuprobe.allocator.layout import segments
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.code_origin import PACKAGE, line_of, name_of
from gpuprobe.model.memory import BlockState, TraceAction
from gpuprobe.model.trace import phase_tag
from gpuprobe.torch_support.compiled_code import lines_of, module_of

_ACTIONS: Final = {action.code: action.value for action in TraceAction}
_ALLOC: Final = TraceAction.ALLOC.code
_FREE_COMPLETED: Final = TraceAction.FREE_COMPLETED.code
_OOM: Final = TraceAction.OOM.code

_Described = tuple[list[dict[str, Any]], tuple[str, int] | None]


class History:
    """The memory history of one device; off until `start`. ``free_memory`` asks the device."""

    def __init__(self, index: int, sim: Simulator, free_memory: Callable[[], int]) -> None:
        self.device = index
        self._sim = sim
        self._free_memory = free_memory
        self._events: deque[dict[str, Any]] = deque()
        self._stacks: dict[tuple[Any, ...], _Described] = {}
        self._frames_of: dict[int, list[dict[str, Any]]] = {}  # live address -> its frames
        self.on = False
        self.keep_stacks = False  # of live blocks, even while no events are asked for
        self.library = ""  # the library whose own memory is being allocated
        self.metadata = ""

    def start(self, *, max_entries: int, clear: bool, events: bool) -> None:
        """``enabled="all"`` keeps events; ``"state"`` only the stacks of live blocks."""
        limit = max_entries if events else 0
        kept = [] if clear else list(self._events)
        self._events = deque(kept, maxlen=max(0, min(limit, sys.maxsize)))
        self.on = True

    def stop(self) -> None:
        """``enabled=None``: what was kept is dropped, as torch drops it."""
        self.on = False
        self._events.clear()
        if not self.keep_stacks:
            self._frames_of.clear()

    def on_event(self, action: int, address: int, size: int, stream: int, pool: int) -> None:
        """One event of the simulator."""
        if not (self.on or self.keep_stacks):
            return
        frames, generated = self._frames()
        if self.library:
            frames = [{"filename": "??", "line": 0, "name": self.library}, *frames]
        if action == _ALLOC:
            self._frames_of[address] = frames
        elif action == _FREE_COMPLETED:
            self._frames_of.pop(address, None)
        if not self.on:
            return
        module = module_of(*generated) if generated else ""
        entry: dict[str, Any] = {
            "action": _ACTIONS[action],
            "addr": self._free_memory() if action == _OOM else address,
            "size": size,
            "stream": stream,
            "time_us": time.time_ns() // 1000,
            "compile_context": "N/A",
            "user_metadata": phase_tag(self.metadata, module) if module else self.metadata,
            "pool_id": (0, pool),
            "frames": frames,
        }
        if action == _OOM:
            entry["device_free"] = entry.pop("addr")
        self._events.append(entry)

    def _frames(self) -> _Described:
        """Python frames, innermost first, gpuprobe's own left out: one list per stack. And the
        line of compiled code among them.
        """
        frame: Any = sys._getframe(2)
        key: list[Any] = []
        while frame is not None:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                key.append(frame.f_code)
                key.append(frame.f_lasti)
            frame = frame.f_back
        found = self._stacks.get(tuple(key))
        if found is None:
            found = self._stacks[tuple(key)] = _describe(key)
        return found

    def events(self) -> list[dict[str, Any]]:
        return list(self._events)

    def segments(self) -> list[dict[str, Any]]:
        """The layout now, in torch's form."""
        result = []
        pools = [(0, index) for index in range(max(self._sim.pools) + 1)]
        for segment in segments(self._sim, pools, self.device):
            blocks = []
            active = allocated = requested = 0
            for block in segment.blocks:
                row: dict[str, Any] = {
                    "address": int(block.address),
                    "size": int(block.size),
                    "requested_size": int(block.requested_size),
                    "state": block.state.value,
                    "frames": self._frames_of.get(int(block.address), []),
                }
                if block.state is not BlockState.INACTIVE:
                    active += row["size"]
                    requested += row["requested_size"]
                if block.state is BlockState.ALLOCATED:
                    allocated += row["size"]
                blocks.append(row)
            result.append(
                {
                    "device": self.device,
                    "address": int(segment.address),
                    "total_size": int(segment.total_size),
                    "stream": int(segment.stream),
                    "segment_type": segment.segment_type,
                    "segment_pool_id": tuple(segment.pool_id),
                    "is_expandable": segment.is_expandable,
                    "allocated_size": allocated,
                    "active_size": active,
                    "requested_size": requested,
                    "frames": [],
                    "blocks": blocks,
                }
            )
        return result


def _describe(key: list[Any]) -> _Described:
    frames = []
    generated = None
    for code, instruction in zip(key[::2], key[1::2], strict=True):
        line = line_of(code, instruction)
        origins = lines_of(code.co_filename, line)
        if origins is None:
            frames.append(
                {"filename": name_of(code.co_filename), "line": line, "name": code.co_name}
            )
        else:  # code that torch's compiler wrote: the program's lines that it is made of
            frames += [
                {"filename": item.file, "line": item.line, "name": item.function}
                for item in origins
            ]
            generated = generated or (code.co_filename, line)
    return frames, generated
