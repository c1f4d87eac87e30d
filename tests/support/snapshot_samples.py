"""Small snapshots by hand, in the schemas of several torch versions."""

from __future__ import annotations

import copy
from typing import Any

FRAMES = [
    {"filename": "/home/u/model.py", "line": 12, "name": "forward"},
    {"filename": "/home/u/train.py", "line": 40, "name": "main"},
]
SEGMENT = 0x7F0000000000
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,max_non_split_rounding_mb:30",
    "max_split_size": 64 * 1024 * 1024,
    "garbage_collection_threshold": 0.5,
    "expandable_segments": False,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
}


def event(action: str, addr: int, size: int, time_us: int, **more: Any) -> dict[str, Any]:
    where = {"device_free": addr} if action == "oom" else {"addr": addr}
    return {
        "action": action,
        **where,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
        "frames": FRAMES,
        **more,
    }


def modern() -> dict[str, Any]:
    """torch 2.10: nine keys per event. One block was there before, one lives at the end."""
    start = 1_700_000_000_000_000
    return copy.deepcopy(
        {
            "segments": [
                {
                    "device": 0,
                    "address": SEGMENT,
                    "total_size": 2097152,
                    "allocated_size": 1536,
                    "active_size": 2048,
                    "requested_size": 1912,
                    "stream": 0,
                    "segment_type": "small",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": FRAMES,
                    "blocks": [
                        _block(SEGMENT, 1024, 1000, "active_allocated", FRAMES),
                        _block(SEGMENT + 1024, 512, 512, "active_pending_free", FRAMES[1:]),
                        _block(SEGMENT + 1536, 512, 400, "active_allocated", FRAMES[:1]),
                        _block(SEGMENT + 2048, 2095104, 0, "inactive", []),
                    ],
                }
            ],
            "device_traces": [
                [
                    event("segment_alloc", SEGMENT, 2097152, start),
                    event("alloc", SEGMENT, 1000, start + 1, user_metadata="forward"),
                    event("free_requested", SEGMENT + 4096, 700, start + 2),
                    event("free_completed", SEGMENT + 4096, 700, start + 3),
                    event("oom", 12345, 1 << 40, start + 4, frames=FRAMES[1:]),
                    event("alloc", SEGMENT + 1024, 512, start + 5),
                    event("free_requested", SEGMENT + 1024, 512, start + 6, pool_id=(0, 0)),
                    event("snapshot", 0, 0, start + 7, frames=[]),
                ]
            ],
            "allocator_settings": SETTINGS,
            "external_annotations": [
                {"stage": "END", "name": "Optimizer.step", "device": 0, "time_us": start + 6},
                {"stage": "START", "name": "Optimizer.step", "device": 0, "time_us": start + 5},
            ],
        }
    )


def _block(
    address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }


def torch_2_0() -> dict[str, Any]:
    """Blocks with a history and no address; events without time, pool or context."""
    snapshot = modern()
    for segment in snapshot["segments"]:
        for key in ("is_expandable", "segment_pool_id", "requested_size", "frames"):
            del segment[key]
        for block in segment["blocks"]:
            frames, size = block.pop("frames"), block.pop("requested_size")
            address = block.pop("address")
            block["history"] = [{"addr": address, "real_size": size, "frames": frames}]
            if block["state"] == "active_pending_free":
                block["state"] = "active_awaiting_free"
    for entry in snapshot["device_traces"][0]:
        for key in ("time_us", "compile_context", "user_metadata", "pool_id"):
            del entry[key]
    del snapshot["allocator_settings"], snapshot["external_annotations"]
    return snapshot


def without_frames() -> dict[str, Any]:
    """``context=None``: no event has frames; blocks have empty ones (torch 2.3)."""
    snapshot = modern()
    for entry in snapshot["device_traces"][0]:
        for key in ("frames", "compile_context", "user_metadata", "pool_id"):
            del entry[key]
    for segment in snapshot["segments"]:
        segment["frames"] = []
        for block in segment["blocks"]:
            block["frames"] = []
    return snapshot
