"""Errors that a GPU raises: captures that it refuses, and memory that runs out in libraries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from native_commands import gpuprobe, python

pytestmark = pytest.mark.slow

BEFORE = "AcceleratorError CUDA error: operation failed due to a previous error during capture"
PAGEABLE = "RuntimeError Cannot copy between CPU and CUDA tensors during CUDA graph capture"
REFUSED = {
    "synchronize": BEFORE,
    "stream_synchronize": BEFORE,
    "event_synchronize": "AcceleratorError CUDA error: operation not permitted on an event",
    "item_of_known": BEFORE,
    "item_of_unknown": BEFORE,
    "branch": BEFORE,
    "to_host": PAGEABLE,
    "to_list": PAGEABLE,
    "from_pageable_memory": PAGEABLE,
    "new_tensor": PAGEABLE,
    "nonzero": BEFORE,
    "masked": BEFORE,
    "unique": BEFORE,
    "another_stream_that_is_not_joined": "AcceleratorError CUDA error: capturing stream has unj",
    "a_seed": "RuntimeError CUDAGeneratorImpl::set_current_seed",
    "allocation_on_another_stream": BEFORE,
    "pinned_allocation": "passes",
    "allowed": "passes",
}


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_a_capture_fails_as_on_a_gpu(compute: str) -> None:
    done = python("capture_programs.py", compute, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert list(found) == list(REFUSED)
    assert {name: found[name][: len(text)] for name, text in REFUSED.items()} == REFUSED


FULL = """\
import torch
torch.backends.cudnn.benchmark = {benchmark}
conv = torch.nn.Conv2d(64, 64, 3, padding=1).cuda().half()
x = torch.randn(8, 64, 128, 128, device="cuda", dtype=torch.half, requires_grad=True)
y = torch.nn.functional.conv2d(x, conv.weight).sum()
torch.cuda.empty_cache()
free = torch.cuda.mem_get_info()[0]
kept = torch.empty(free - (34 << 20), dtype=torch.uint8, device="cuda")
z = conv(x)
print("no workspace fits, and it ran", z.shape[0], flush=True)
more = [torch.empty(16 << 20, device="cuda") for _ in range(4)]
"""


@pytest.mark.parametrize("benchmark", [False, True])
def test_a_convolution_runs_without_a_workspace_where_none_fits(
    benchmark: bool, tmp_path: Path
) -> None:
    done = _run(FULL.format(benchmark=benchmark), tmp_path)
    assert "no workspace fits, and it ran 8" in done.stdout, done.stderr
    assert done.returncode == 5
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert "gpuprobe: Out of memory" in done.stderr


def test_more_pinned_memory_than_the_host_has_is_out_of_memory(tmp_path: Path) -> None:
    text = "import torch\ntorch.zeros(1, device='cuda')\n"
    text += "torch.empty(1 << 45, dtype=torch.uint8, pin_memory=True)\n"
    done = _run(text, tmp_path)
    assert done.returncode == 5
    assert "CUDA error: out of memory" in done.stderr
    assert "gpuprobe: Out of memory" in done.stderr


def _run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text, encoding="utf-8")
    return gpuprobe("run", "--gpu", "t4", "--compute", "shapes", "program.py", cwd=folder)
