"""Where pinned memory of the host was requested."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm_python

from gpuprobe.api.recordings import load

PROGRAM = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(256, 64))
for (batch,) in DataLoader(data, 64, pin_memory=True, num_workers=WORKERS):
    model(batch.cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("workers", "place"),
    [(0, "train.py:6 in <module>"), (1, "(the pin_memory thread of a DataLoader)")],
)
def test_batches_of_a_loader(tmp_path: Path, workers: int, place: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("WORKERS", str(workers)))
    words = ("run", "--gpu", "t4", "--level", "trace", "train.py")
    done = warm_python.gpuprobe(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    end = load(tmp_path / "train.gpuprobe").ranks[0].end
    assert end is not None
    (line,) = end.pinned
    assert line.place.endswith(place)
    assert line.bytes % (64 * 64 * 4) == 0
