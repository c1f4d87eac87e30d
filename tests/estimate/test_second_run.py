"""A second run of a program, with all values: it is given up if it takes too long, and ends with
the process that started it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import read_fifo, wait_for_end

from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.planning import trials
from gpuprobe.planning.estimates import estimate_program

HANGS_IN_ITS_SECOND_RUN = """\
import os, signal, torch

if os.path.exists("begun"):
    with open("second", "w") as file:
        file.write(str(os.getpid()))
    signal.pause()
open("begun", "w").close()
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
large = torch.randn(300 << 20, device="cuda")  # more than is computed at once
for _ in range(2):
    net(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
chosen = large[: int((large > 0).sum())]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HANGS_IN_ITS_SECOND_RUN)
    return tmp_path


@pytest.mark.simulated
def test_a_run_that_takes_too_long_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_SHORT", 20.0)
    lines: list[str] = []
    request = EstimateRequest(str(folder / "train.py"), gpu="t4", steps=3)
    found = estimate_program(request, notify=lines.append)
    assert (folder / "second").exists()
    assert "a second time (about 1 s): " in lines[0]
    assert found.compute == "shapes"
    assert found.compute_why.endswith(trials.TOO_SLOW)


def test_it_ends_with_the_process_that_started_it(folder: Path) -> None:
    """With ``--compute real`` no time limit ends it."""
    os.mkfifo(folder / "second")
    options = ("--gpu", "t4", "--compute", "real")
    words = (sys.executable, "-m", "gpuprobe", "estimate", *options, "train.py")
    started = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    second = int(read_fifo(folder / "second"))
    started.kill()
    started.wait()
    wait_for_end(second)
