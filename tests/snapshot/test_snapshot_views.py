"""Flame graphs as data, the Perfetto trace, and the options of ``gpuprobe report``."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shared_files import shared_snapshots
from snapshot_samples import modern, without_frames

from gpuprobe.analysis.peak.flame import FlameNode, every_frame, flame_tree, informative_frames
from gpuprobe.analysis.peak.peaks import high_water
from gpuprobe.api.recordings import load
from gpuprobe.api.views import write_perfetto
from gpuprobe.cli import exit_codes, main
from gpuprobe.errors import UsageError
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.reporters.html.data import tree_data
from gpuprobe.reporters.viewers import perfetto
from gpuprobe.torch_support.snapshots import trace_of


def test_flame_graphs_fold_native_code_and_pytorch_s_own_frames() -> None:
    trace = MemoryTrace(device="cuda:0")
    stacks = trace.stacks
    frames = [
        Frame("??", 0, "at::native::empty"),
        Frame("/x/site-packages/torch/nn/modules/module.py", 9, "_call_impl"),
        Frame("/p/train.py", 3, "forward"),
        Frame("/x/site-packages/torch/nn/modules/module.py", 9, "_call_impl"),
        Frame("/p/train.py", 9, "main"),
    ]
    stack = stacks.stack(tuple(stacks.frame(frame) for frame in frames))
    trace.events.append(TraceAction.ALLOC.code, 0x1000, 512, stack=stack)
    mark = high_water(trace)

    def names(keep: Callable[[Frame], bool]) -> list[str]:
        node, found = flame_tree(mark, keep), []
        while node.children:
            (node,) = node.children
            found.append(node.name)
        assert node.own == mark.allocated
        return [name.rpartition(" in ")[2] for name in found]

    assert names(informative_frames) == ["main", "forward"]
    assert names(every_frame) == [
        "main",
        "_call_impl",
        "forward",
        "_call_impl",
        "at::native::empty",
    ]


def test_the_pages_data_adds_up() -> None:
    mark = high_water(trace_of(modern(), 0))
    data = tree_data(flame_tree(mark))
    assert data["bytes"][0] == mark.allocated
    assert sum(data["own"]) == mark.allocated
    for node, total in enumerate(data["bytes"]):
        below = [b for b, p in zip(data["bytes"], data["parents"], strict=True) if p == node]
        assert total == data["own"][node] + sum(below)
    assert all(parent < node for node, parent in enumerate(data["parents"]))


def test_a_very_deep_stack_is_written() -> None:
    tree = node = FlameNode("peak", 8, 1)
    for depth in range(20_000):
        node.children.append(FlameNode(f"f{depth}", 8, 1))
        node = node.children[0]
    node.own = 8
    assert len(json.dumps(tree_data(tree, 30_000)["name"])) > 20_001


def events_of(snapshot: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    out = io.StringIO()
    perfetto.write([trace_of(snapshot, 0)], out, **options)
    events: list[dict[str, Any]] = json.loads(out.getvalue())["traceEvents"]
    return events


def test_perfetto_counters_end_where_the_snapshot_does() -> None:
    events = events_of(modern())
    used = [e["args"] for e in events if e["name"] == "bytes in use"]
    # 1024 of the block made, 512 of the one from before; another 512 is freed, and pending.
    assert used[-1] == {"allocated": 1536, "pending": 512}
    reserved = [e["args"]["reserved"] for e in events if e["name"] == "bytes reserved"]
    assert reserved[-1] == 2097152
    assert all(e["ts"] >= 0 for e in events if "ts" in e)


def test_perfetto_slices_phases_and_oom() -> None:
    events = events_of(modern(), large=1)
    begun = Counter(e["id"] for e in events if e["ph"] == "b")
    assert begun == Counter(e["id"] for e in events if e["ph"] == "e")
    assert len(begun) == 4
    assert set(begun.values()) == {1}
    (oom,) = (e for e in events if e["ph"] == "i")
    assert oom["args"] == {"asked": 1 << 40, "free_on_device": 12345}
    (phase,) = (e for e in events if e.get("cat") == "phase")
    assert phase["name"] == "forward"
    notes = [(e["ph"], e["ts"]) for e in events if e.get("cat") == "annotation"]
    assert notes == [("B", 5), ("E", 6)]
    assert not [e for e in events_of(modern(), large=1 << 30) if e["ph"] == "b"]


def test_perfetto_without_times_counts_events() -> None:
    snapshot = without_frames()
    for event in snapshot["device_traces"][0]:
        del event["time_us"]
    events = events_of(snapshot)
    assert "1 µs is one event" in events[0]["args"]["name"]
    stamps = [e["ts"] for e in events if e["name"] == "bytes in use"]
    assert stamps == sorted(stamps)
    assert stamps[-1] == len(snapshot["device_traces"][0]) - 1


class Pieces(io.StringIO):
    """A stream that remembers the longest piece it was given."""

    longest = 0

    def write(self, text: str) -> int:
        self.longest = max(self.longest, len(text))
        return super().write(text)


def test_perfetto_is_streamed() -> None:
    out = Pieces()
    snapshot = modern()
    snapshot["device_traces"][0] *= 200
    perfetto.write([trace_of(snapshot, 0)], out, large=1)
    assert len(out.getvalue()) > 100_000
    assert out.longest < 2000


@pytest.fixture
def snapshot_file(tmp_path: Path) -> Path:
    path = tmp_path / "in.pickle"
    path.write_bytes(pickle.dumps(modern()))
    return path


def test_report_writes_both(
    snapshot_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "t.json.gz", tmp_path / "o.pickle"
    options = ["--perfetto", str(trace), "--snapshot", str(out)]
    assert main(["report", str(snapshot_file), *options]) == exit_codes.OK
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("wrote ") == 2
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert pickle.loads(out.read_bytes())["segments"] == modern()["segments"]


def test_an_existing_file_is_kept_unless_forced(
    snapshot_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.json"
    trace.write_text("mine")
    arguments = ["report", str(snapshot_file), "--perfetto", str(trace)]
    assert main(arguments) == exit_codes.USAGE
    assert trace.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == exit_codes.OK
    assert json.loads(trace.read_text())["traceEvents"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.pickle", "t.json"]


def test_a_folder_that_does_not_exist(snapshot_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_perfetto(load(snapshot_file), tmp_path / "none" / "f.json", force=True)


@pytest.mark.parametrize("path", shared_snapshots()[1:2], ids=lambda p: p.stem)
def test_a_real_snapshot(path: Path, tmp_path: Path) -> None:
    (trace,) = load(path).ranks[0].traces
    write_perfetto(load(path), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    used = [e["args"]["allocated"] for e in events if e["name"] == "bytes in use"]
    assert max(used) == high_water(trace).allocated
