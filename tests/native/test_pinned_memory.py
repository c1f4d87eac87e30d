"""Where pinned memory of the host was requested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import warm_python

import gpuprobe
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


ROUNDED = """\
import torch
hosts = [torch.empty(n << 20, dtype=torch.uint8).pin_memory() for n in (33, 65, 17, 36, 68)]
staging = torch.empty(68 << 20, dtype=torch.uint8, device="cuda")
for host in hosts:
    staging[: host.numel()].copy_(host)
"""
COPIED = """\
import torch
rows = torch.randn(20 << 20, device="cuda")
host = rows.to("cpu", non_blocking=True)
"""


def test_what_is_rounded_is_a_cause(tmp_path: Path) -> None:
    """Of every report: 416 MiB are held for 219."""
    (tmp_path / "train.py").write_text(ROUNDED)
    done = warm_python.gpuprobe("explain", "--gpu", "t4", "--json", "train.py", cwd=tmp_path)
    (explained,) = json.loads(done.stdout)["causes"]
    assert explained["rule"] == "pinned-rounding"
    assert explained["made_at"]["line"] == 2
    assert explained["bytes"] == (416 - 219) << 20
    assert "for hosts: torch rounds each request up" in explained["sentence"]
    words = ("run", "--gpu", "t4", "--level", "trace", "train.py")
    warm_python.gpuprobe(*words, cwd=tmp_path)
    (reported,) = gpuprobe.report(tmp_path / "train.gpuprobe")["causes"]
    assert reported["sentence"] == explained["sentence"].replace(" for hosts", "")


def test_copies_that_nothing_waits_for_are_pinned(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COPIED)
    words = ("run", "--gpu", "t4", "--level", "trace", "train.py")
    done = warm_python.gpuprobe(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    end = load(tmp_path / "train.gpuprobe").ranks[0].end
    assert end is not None
    (line,) = end.pinned
    assert line.place.endswith("train.py:3 in <module>")
    assert line.bytes == 80 << 20
