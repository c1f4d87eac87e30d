"""Programs that run out of GPU memory: what the user sees of it, and what the program sees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_run_command import gpuprobe, script

FILLS = """\
import sys, traceback, torch
model = torch.nn.Linear(64, 64).cuda()
kept = []
def fill():
    while True:
        kept.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
model(torch.ones(4, 64, device="cuda")).sum().backward()
if sys.argv[1:] == ["--catch"]:
    try:
        fill()
    except torch.OutOfMemoryError as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        print(len(kept), any("gpuprobe" in name for name in files))
else:
    fill()
"""


@pytest.mark.parametrize("level", ["trace", "counters"])
def test_the_verdict_comes_before_the_figures(tmp_path: Path, level: str) -> None:
    script(tmp_path, FILLS)
    options = ["--gpu", "t4", "--compute", "shapes", "--engine", "virtual", "--level", level]
    done = gpuprobe("run", *options, "script.py", cwd=tmp_path)
    assert done.returncode == 5
    before, error, summary = done.stderr.partition("torch.OutOfMemoryError: CUDA out of memory. ")
    assert error
    assert re.findall(r'File "(.*?)", line (\d+)', before) == [
        (str(tmp_path / "script.py"), "15"),
        (str(tmp_path / "script.py"), "6"),
    ]
    lines = [line for line in summary.splitlines() if line.startswith("gpuprobe: ")]
    assert lines[0].startswith("gpuprobe: Out of memory")
    text = " ".join(line.removeprefix("gpuprobe:").strip() for line in lines)
    assert 0 < text.index(" peak: ") < text.index("recording: ")
    assert lines[-1] == "gpuprobe:   gpuprobe estimate --gpu t4 script.py"
    shown = gpuprobe("report", "script.gpuprobe", cwd=tmp_path).stdout
    assert shown.startswith("script.gpuprobe · out of memory\n")
    assert "expandable_segments" not in shown  # of no use on a full GPU
    assert shown.index("Why it ran out of memory") < shown.index("\nPeak\n")
    full = "Out of memory: the GPU is full." if level == "trace" else "Out of memory in step 0: "
    assert full in shown


def test_a_program_that_catches_the_error_sees_it_unchanged(tmp_path: Path) -> None:
    script(tmp_path, FILLS)
    options = ["--gpu", "t4", "--compute", "shapes", "--engine", "virtual", "--level", "trace"]
    done = gpuprobe("run", *options, "script.py", "--catch", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "14 True\n")
    assert "Out of memory" not in done.stderr  # the run did not fail
    shown = gpuprobe("report", "script.gpuprobe", cwd=tmp_path).stdout
    assert shown.startswith("script.gpuprobe · complete\n")
    assert "Out of memory: the GPU is full." in shown
    assert "gpuprobe estimate" not in shown
