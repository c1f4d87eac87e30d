"""What a call allocates on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SIGNS = {"alloc": 1, "free_requested": -1}


def events(call: Callable[[], Any], least: int = 0) -> list[int]:
    """Requested bytes, in order, negative for frees; fewer than ``least`` are
    left out.
    """
    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept = call()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    found = [
        _SIGNS[event["action"]] * event["size"] for event in trace if event["action"] in _SIGNS
    ]
    return [size for size in found if abs(size) >= least]
