"""Real processes: killed while writing, and writing to a full disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprobe.model.run.session import Gap
from gpuprobe.recording.reader import read_recording

PRELUDE = """
import json, os, resource, sys
from pathlib import Path
from gpuprobe.model.run.session import *
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.recording.writer import RecordingWriter

writer = RecordingWriter.create(Path(sys.argv[1]))
session = Session(1.0, os.getpid(), ("x",), "trace", ("cpu",))
writer.session(session, Environment("0", "3", "l", "h"))
phases = tuple(Phase(name, 0, 1, 1) for name in ("forward", "backward", "optimizer"))
"""

WRITE_FOREVER = (
    PRELUDE
    + """
index = 0
while True:
    trace = MemoryTrace("cpu", step=index)
    for i in range(50):
        trace.events.append(0, i, index)
    writer.step(Step(index, 0, 1, phases, traces=(writer.trace(trace),)))
    print(index, flush=True)
    index += 1
"""
)

FULL_DISK = (
    PRELUDE
    + """
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))  # not at the end of a line
written, lost = [], []
for index in range(60):
    if index == 50:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    try:
        writer.step(Step(index, 0, 1, phases))
        written.append(index)
    except OSError as error:
        lost.append(index)
print(json.dumps([written, lost]))
writer.close()
"""
)

FULL_DISK_FOR_A_CHUNK = (
    PRELUDE
    + """
trace = MemoryTrace("cpu", step=0)
for i in range(20000):
    trace.events.append(0, i * 7919 % 65537, i)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
try:
    writer.trace(trace)
except OSError as error:
    print("refused", sorted(os.listdir(writer.path)))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
writer.step(Step(0, 0, 1, traces=(writer.trace(trace),)))
writer.close()
"""
)


@pytest.mark.parametrize("after", [1, 40, 200])
def test_sigkill_while_writing_loses_at_most_the_step_in_flight(tmp_path: Path, after: int) -> None:
    path = tmp_path / "a.gpuprobe"
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(after):
            process.stdout.readline()
        process.kill()
        # What it still said before it died counts as well, but for a torn last line.
        said = process.stdout.read()
    reported = after + said.count("\n")
    (rank,) = read_recording(path).ranks
    assert [step.index for step in rank.steps[:reported]] == list(range(reported))
    assert len(rank.steps) <= reported + 1
    assert rank.end is None
    assert rank.blind_spots == ()
    assert [trace.step for trace in rank.traces] == [step.index for step in rank.steps]


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_after_a_full_disk_only_the_refused_steps_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuprobe"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True
    )
    written, lost = json.loads(done.stdout)
    assert lost[-1] == 49
    assert written[-10:] == list(range(50, 60))
    (rank,) = read_recording(path).ranks
    assert [step.index for step in rank.steps] == written
    torn, gap = rank.blind_spots
    assert torn.what.startswith("1 damaged line in")
    assert rank.gap is not None
    assert gap.what == rank.gap.text
    assert rank.gap == Gap("File too large", len(lost), len(lost), lost[0], 49)


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_chunk_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuprobe"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK_FOR_A_CHUNK, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "refused ['rank-00000.jsonl']\n"
    (rank,) = read_recording(path).ranks
    (trace,) = rank.traces
    assert len(trace.events) == 20000
