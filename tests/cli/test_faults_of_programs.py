"""Programs that close, replace and limit what gpuprobe uses as well: their files, output and exit
code are those of a run without gpuprobe.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import warm_python

from gpuprobe.recording.reader import read_recording


class Ended(NamedTuple):
    """How a program ended: what it printed, without gpuprobe's lines, and its files."""

    code: int
    stdout: str
    stderr: str
    files: dict[str, bytes]


def run(folder: Path, text: str, *options: str, fresh: bool = False) -> Ended:
    """Run a program, with ``options`` of gpuprobe or (without any) bare."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(text)
    python = sys.executable if fresh else warm_python.shared().python
    words = ("-m", "gpuprobe", *options) if options else ()
    done = subprocess.run(
        [python, *words, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("gpuprobe: ")]
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    del files["program.py"]
    stderr = "\n".join(lines).replace(str(folder), "")
    return Ended(done.returncode, done.stdout.replace(str(folder), ""), stderr, files)


LEVELS: Final = {
    "counters": ("run",),
    "trace": ("run", "--level", "trace"),
    "hazards": ("run", "--level", "trace", "--hazards"),
}

TRAINS: Final = """
import os, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
train(2)
"""

CLOSES: Final = """
import time
os.closerange(3, {end})
own = [os.open(f"own-{{i}}", os.O_RDWR | os.O_CREAT | os.O_TRUNC) for i in range(40)]
print(own)
train(3)
time.sleep(0.4)  # the steps are written
for descriptor in own:
    os.write(descriptor, b"own")
train(1)
import atexit
atexit.register(lambda: print([os.fstat(descriptor).st_size for descriptor in own]))
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("end", [256, 1 << 20])
def test_the_files_of_a_program_that_closes_unknown_descriptors(
    tmp_path: Path, level: str, end: int
) -> None:
    text = TRAINS + CLOSES.format(end=end)
    bare = run(tmp_path / "bare", text)
    recorded = run(tmp_path / "run", text, *LEVELS[level])
    if level == "hazards":  # its report is on stderr
        recorded = recorded._replace(stderr="")
    assert recorded == bare
    assert bare.code == 0
    assert set(bare.files.values()) == {b"own"}
    (rank,) = read_recording(tmp_path / "run" / "program.gpuprobe").ranks
    assert len(rank.steps) >= 6
    assert rank.end is not None
    notes = [spot.what for spot in rank.blind_spots if "closed" in spot.what]
    assert len(notes) == (end > 256)


def test_the_result_of_a_command_whose_program_closes_descriptors(tmp_path: Path) -> None:
    """The program does not get the result, and the command does not lose it."""
    text = TRAINS + CLOSES.format(end=256)
    done = run(tmp_path, text, "baseline", "update", "--baseline", "memory.json")
    assert done.code == 0, done.stderr
    assert {done.files[f"own-{i}"] for i in range(40)} == {b"own"}
    assert "[3, 4, 5," in done.stderr
    assert b"peak" in done.files["memory.json"]
