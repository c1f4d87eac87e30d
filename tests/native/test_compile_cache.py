"""The same command has the same figures, whether torch's cache of compiled code is cold or not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from native_commands import gpuprobe, own_cache

pytestmark = pytest.mark.slow

PROGRAM = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    compiled(torch.randn(2048, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_cold_cache_and_a_warm_one_have_one_peak(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    cache = own_cache(tmp_path / "cache")
    command = ("run", "--gpu", "h100-80gb", "train.py")
    texts = [gpuprobe(*command, cwd=tmp_path, XDG_CACHE_HOME=cache).stderr for _ in range(2)]
    assert (tmp_path / "cache" / "gpuprobe" / "compiled").exists()
    peaks = [re.findall(r"peak: (.+?) allocated", text) for text in texts]
    assert peaks[0] == peaks[1] != []
    assert all("that this is the first process that compiles" in text for text in texts)
