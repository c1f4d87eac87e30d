"""What --hazards finds is in the recording at once, and known better when the run ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.place import Place
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Session
from gpuprobe.recording.load import Followed
from gpuprobe.recording.totals import RankSum
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.sampler.environment import describe

PROGRAM = """
import sys
import torch

model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
side = torch.cuda.Stream()
x = torch.ones(4, 8, device="cuda")


def step():
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    loss.item()
    optimizer.step()


step()
x = x + 1
with torch.cuda.stream(side):
    y = x * 2  # nothing orders this after what made x
step()
step()
print("waiting", flush=True)
sys.stdin.readline()
"""


def races(rank: RankRecording) -> list[Finding]:
    return [finding for finding in rank.findings if finding.kind != "implicit-sync"]


def syncs(rank: RankRecording) -> list[Finding]:
    return [finding for finding in rank.findings if finding.kind == "implicit-sync"]


def test_a_race_is_in_the_recording_before_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, "utf-8")
    command = [sys.executable, "-m", "gpuprobe", "run", "-q", "--hazards", "-o", "r.gpuprobe"]
    process = subprocess.Popen(
        [*command, "train.py"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        followed = Followed(tmp_path / "r.gpuprobe")
        while not races(followed.poll().ranks[0]):  # written beside the training
            assert process.poll() is None
        (live,) = races(followed.poll().ranks[0])
        assert live.kind == "read-after-write"
        assert "fix verified" not in dict(live.evidence)
        while [sync.count for sync in syncs(followed.poll().ranks[0])] != [3]:
            assert process.poll() is None
    finally:
        _, errors = process.communicate(b"\n", timeout=60)
    assert process.returncode == 1, errors.decode()  # findings
    (final,) = races(followed.poll().ranks[0])
    assert final.fingerprint == live.fingerprint
    assert final.location == live.location
    assert "fix verified" in dict(final.evidence)
    (sync,) = syncs(followed.poll().ranks[0])
    assert sync.count == 3
    assert sync.location is not None
    assert sync.location.line == 15


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=30))
def test_a_finding_told_again_replaces_the_one_before(told: list[tuple[int, int]]) -> None:
    sums = RankSum()
    for line, count in told:
        where = Place("train.py", line, "step")
        sums.finding(
            Finding("GP206", "implicit-sync", Level.WARNING, "m", count=count, location=where)
        )
    last = dict(told)
    (found,) = sums._findings.values() or [(0, 0)]
    assert found == (len(last), sum(last.values()))


def test_a_reader_keeps_the_newest_and_their_order(tmp_path: Path) -> None:
    writer = RecordingWriter.create(tmp_path / "r.gpuprobe")
    writer.session(Session(0.0, 1, (), "counters", ()), describe())
    for line, count in ((3, 1), (5, 1), (3, 7)):
        where = Place("train.py", line, "step")
        writer.finding(Finding("GP206", "sync", Level.NOTE, "m", count=count, location=where))
    writer.close()
    (rank,) = Followed(tmp_path / "r.gpuprobe").poll().ranks
    assert [(f.location.line, f.count) for f in rank.findings if f.location] == [(3, 7), (5, 1)]
