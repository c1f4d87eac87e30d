"""Programs of the hazard corpora run under `gpuprobe.detect_hazards`, on the CUDA device that torch
has: simulated ones in `make test` (tests/native/test_marked_gpu.py).
"""

from __future__ import annotations

import ctypes
import linecache
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hazard_case import Case
from torch import nn

import gpuprobe

OTHERS = "0x7F3A10"
"""The handle of another library's stream in the cases' text."""


def stream_of_another_library() -> str:
    """The handle of a stream that torch did not make: of the driver's, non-blocking."""
    handle = ctypes.c_void_p()
    torch.cuda.current_stream().synchronize()  # the context exists
    assert ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), 1) == 0
    return hex(handle.value or 0)


def closing_keeps_variables() -> bool:
    """Whether the variables of a generator live after ``close``: Python 3.12.3's do."""

    def generator() -> Iterator[torch.Tensor]:
        variable = torch.zeros(1)
        seen.append(weakref.ref(variable))
        yield variable

    seen: list[weakref.ref[torch.Tensor]] = []
    running = generator()
    next(running)
    running.close()
    return seen[0]() is not None


def judge(case: Case, text: str) -> Any:
    """What a check of ``text``, a version of the case's program, finds."""
    if torch.cuda.device_count() < case.gpus:
        pytest.skip(f"needs {case.gpus} GPUs")
    name = f"<corpus {case.name}>.py"
    if "ExternalStream(cuda.current_stream()" in text and torch.cuda.ExternalStream(0).cuda_stream:
        pytest.skip("before torch 2.13, the external stream of handle 0 is a new one")
    if ".close()" in text and closing_keeps_variables():
        pytest.skip("this Python keeps the variables of a generator that is closed")
    if OTHERS in text:
        text = text.replace(OTHERS, stream_of_another_library())
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    code = compile(text, name, "exec")
    # Another one than the case's stream: of a device's 32, a kept one comes round again.
    graphs: Any = torch.cuda.graph
    graphs.default_capture_stream = None
    place = {"torch": torch, "cuda": torch.cuda, "nn": nn, "F": F, "s": torch.cuda.Stream()}
    torch.cuda.synchronize()
    try:
        with gpuprobe.detect_hazards() as found:
            exec(code, place)
    finally:
        torch.cuda.synchronize()
        for device in range(torch.cuda.device_count()):  # some cases leave a stream current
            torch.cuda.set_stream(torch.cuda.default_stream(device))
        torch.cuda.set_device(0)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return found
