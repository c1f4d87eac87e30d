"""Code that is compiled on a simulated GPU: its own cache, and the same figures with a warm one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from native_commands import gpuprobe, own_cache

pytestmark = pytest.mark.slow

PROGRAM = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 512), nn.GELU()).cuda()
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    compiled(torch.randn(2048, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_cold_cache_and_a_warm_one_have_one_peak(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    real, own = tmp_path / "real", tmp_path / "own"
    given = {"TORCHINDUCTOR_CACHE_DIR": real / "inductor", "TRITON_CACHE_DIR": real / "triton"}
    settings = {name: str(path) for name, path in given.items()}
    settings |= {"XDG_CACHE_HOME": own_cache(own), "TMPDIR": str(tmp_path)}
    command = ("run", "--gpu", "h100-80gb", "train.py")
    texts = [gpuprobe(*command, cwd=tmp_path, **settings).stderr for _ in range(2)]
    # It stays out of the caches of programs on real GPUs.
    assert not real.exists()
    assert not [*tmp_path.glob("torchinductor_*")]
    compiled = own / "gpuprobe" / "compiled"
    assert any((compiled / "inductor").rglob("*.py")), texts
    assert any((compiled / "triton").iterdir())
    peaks = [re.findall(r"peak: (.+?) allocated", text) for text in texts]
    assert peaks[0] == peaks[1] != []
    assert all("that this is the first process that compiles" in text for text in texts)
