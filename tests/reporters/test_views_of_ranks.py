"""Other formats hold every rank: Perfetto as processes of one file, snapshots as files."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import report_builders as build

from gpuprobe.api.views import write_perfetto, write_snapshot
from gpuprobe.cli import main
from gpuprobe.errors import UsageError
from gpuprobe.model.memory import Category
from gpuprobe.model.run.recording import Recording
from gpuprobe.recording.writer import RecordingWriter

MIB = build.MIB


def made(ranks: int) -> Recording:
    """Rank ``n`` has one block of ``n + 1`` MiB in each of two steps, on a GPU."""
    found = []
    for number in range(ranks):
        traces = [
            build.trace(
                [("net.py:3", (number + 1) * MIB, Category.ACTIVATION)], step=i, device="cuda:0"
            )
            for i in range(2)
        ]
        steps = [build.step(i, {"backward": (number + 1) * MIB}, device="cuda:0") for i in range(2)]
        session = build.session(device="cuda:0", rank=number, world_size=ranks)
        found.append(build.rank_recording(steps, traces, session=session))
    return Recording("r.gpuprobe", (1, 0), tuple(found))


def test_perfetto_has_a_process_for_each_rank(tmp_path: Path) -> None:
    assert write_perfetto(made(3), tmp_path / "t.json") == (tmp_path / "t.json",)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [name.partition(" (")[0] for name in names.values()] == [
        f"rank {number}: memory of cuda:0" for number in range(3)
    ]
    for number, pid in enumerate(names):
        mine = [e for e in events if e["pid"] == pid]
        highest = max(e["args"]["allocated"] for e in mine if e["name"] == "bytes in use")
        assert highest == (number + 1) * MIB
        # Without times, every rank begins at 0, its second step behind its first.
        assert min(e["ts"] for e in mine if "ts" in e) == 0
        assert max(e["ts"] for e in mine if "ts" in e) == 3


def test_one_rank_is_named_by_its_device_alone(tmp_path: Path) -> None:
    write_perfetto(made(1), tmp_path / "t.json")
    assert "rank" not in (tmp_path / "t.json").read_text()


def test_the_report_of_a_chosen_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.gpuprobe"
    writer = RecordingWriter.create(path)
    writer.session(build.session(devices=("cuda:0", "cuda:1")), build.environment())
    for device, amount in (("cuda:0", 5 * MIB), ("cuda:1", 3 * MIB)):
        windows = build.step(0, {"forward": amount}, device=device).windows
        at = int(device[-1])
        writer.step(replace(build.step(at, {"forward": amount}, device=device), windows=windows))
    writer.close()
    assert main(["report", str(path)]) == 0
    assert "5.0 MiB allocated on cuda:0" in capsys.readouterr().out
    assert main(["report", str(path), "--device", "cuda:1"]) == 0
    assert "3.0 MiB allocated on cuda:1" in capsys.readouterr().out
    assert main(["report", str(path), "--device", "cuda:7"]) == 2
    assert "it has: cuda:0, cuda:1" in capsys.readouterr().err


def test_a_snapshot_for_each_rank(tmp_path: Path) -> None:
    written = write_snapshot(made(2), tmp_path / "run.pickle")
    assert [path.name for path in written] == ["run.rank0.pickle", "run.rank1.pickle"]
    for number, path in enumerate(written):
        snapshot = pickle.loads(path.read_bytes())
        (events,) = snapshot["device_traces"]
        assert {e["size"] for e in events} == {(number + 1) * MIB}
    with pytest.raises(UsageError, match=r"run\.rank0\.pickle exists"):
        write_snapshot(made(2), tmp_path / "run.pickle")
    assert write_snapshot(made(1), tmp_path / "run.pickle") == (tmp_path / "run.pickle",)


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in made(2).ranks:
        writer = RecordingWriter.create(tmp_path / "r", rank=rank.session.rank, world_size=2)
        writer.session(rank.session, rank.environment)
        for step in rank.steps:
            names = tuple(writer.trace(trace) for trace in rank.traces.of(step))
            writer.step(replace(step, traces=names))
        writer.close()
    assert main(["report", str(tmp_path / "r"), "--snapshot", str(tmp_path / "s.pickle")]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    names = [line.rpartition("/")[2] for line in said.err.splitlines()]
    assert names == ["s.rank0.pickle", "s.rank1.pickle"]
