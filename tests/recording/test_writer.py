"""Where a recording may be made, and what `force` replaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpuprobe.errors import InternalError, UsageError
from gpuprobe.model.run.recording import SCHEMA, SCHEMA_VERSION
from gpuprobe.model.run.session import BlindSpot, Environment, Session, SessionEnd, Step
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.recording import writer
from gpuprobe.recording.reader import read_recording
from gpuprobe.recording.writer import RecordingWriter, remove_recording

ENVIRONMENT = Environment("0", "3.11", "linux", "host")


def session(rank: int = 0, world_size: int = 1) -> Session:
    return Session(
        1.5, 42, ("train.py",), "trace", ("cpu",), "/home/u", rank=rank, world_size=world_size
    )


def record(path: Path, steps: int = 2, *, rank: int = 0, world_size: int = 1) -> None:
    writer = RecordingWriter.create(path, rank=rank, world_size=world_size)
    writer.session(session(rank, world_size), ENVIRONMENT)
    for index in range(steps):
        name = writer.trace(MemoryTrace("cpu", step=index))
        writer.step(Step(index, index, 1, traces=(name,)))
    writer.end(SessionEnd(9))
    writer.close()


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


def test_the_format_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuprobe"
    record(path)
    assert sorted(p.name for p in path.iterdir()) == [
        "rank-00000.jsonl",
        "rank-00000.trace-000000.cols",
        "rank-00000.trace-000001.cols",
    ]
    header, *records = map(json.loads, (path / "rank-00000.jsonl").read_text().splitlines())
    assert list(header) == ["schema", "version", "gpuprobe", "rank", "world_size"]
    assert (header["schema"], header["version"]) == (SCHEMA, list(SCHEMA_VERSION))
    assert [r["type"] for r in records] == ["environment", "session", "step", "step", "end"]
    assert records[3]["traces"] == ["rank-00000.trace-000001.cols"]


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    record(path)
    assert len(read_recording(path).steps) == 2


def test_a_missing_parent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory") as caught:
        RecordingWriter.create(tmp_path / "no" / "a.gpuprobe")
    assert "mkdir -p" in caught.value.hint
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    path = tmp_path / "a.gpuprobe"
    path.write_text("notes")
    with pytest.raises(UsageError, match="not a directory"):
        RecordingWriter.create(path, force=force)
    assert path.read_text() == "notes"


def test_a_rank_that_cannot_write_does_not_take_the_others_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gpuprobe"
    removals: list[Callable[[], None]] = [path.rmdir]

    def opened(*arguments: Any) -> int:
        for remove in removals:
            remove()
        removals.clear()
        return os.open(*arguments)

    monkeypatch.setattr(writer, "os_open", opened)
    RecordingWriter.create(path, rank=1, world_size=2).close()
    assert [file.name for file in path.iterdir()] == ["rank-00001.jsonl"]
    removals.append(lambda: shutil.rmtree(path))
    with pytest.raises(UsageError, match="No such file"):
        RecordingWriter.create(path, force=True)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "foreign",
    ["notes.txt", "rank-00000.jsonl", "rank-00000.trace-000000.cols.bak", "sub/rank-00000.jsonl"],
)
def test_other_files_are_never_replaced(tmp_path: Path, foreign: str, force: bool) -> None:
    path = tmp_path / "a.gpuprobe"
    if foreign != "rank-00000.jsonl":
        record(path)
    (path / foreign).parent.mkdir(exist_ok=True, parents=True)
    (path / foreign).write_text('{"mine": 1}\n')
    before = tree(path)
    with pytest.raises(UsageError, match="other files"):
        RecordingWriter.create(path, force=force)
    assert tree(path) == before


def test_a_link_to_a_stream_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious.jsonl"
    precious.write_text("")
    path = tmp_path / "a.gpuprobe"
    path.mkdir()
    (path / "rank-00000.jsonl").symlink_to(precious)
    with pytest.raises(UsageError, match="other files"):
        RecordingWriter.create(path, force=True)
    assert (path / "rank-00000.jsonl").is_symlink()


def test_a_dangling_link(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuprobe"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="not a directory"):
        RecordingWriter.create(path)


def test_a_recording_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuprobe"
    record(path, steps=3)
    (path / ".rank-00000.trace-000003.cols.tmp").write_bytes(b"left by a kill")
    before = tree(path)
    with pytest.raises(UsageError, match="exists already") as caught:
        RecordingWriter.create(path)
    assert "--force" in caught.value.hint
    assert tree(path) == before
    RecordingWriter.create(path, force=True).close()
    assert list(tree(path)) == ["rank-00000.jsonl"]


def test_a_stream_that_was_torn_in_its_header_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuprobe"
    path.mkdir()
    (path / "rank-00000.jsonl").write_text('{"schema":"gpupr')
    RecordingWriter.create(path, force=True).close()
    assert (path / "rank-00000.jsonl").read_bytes().endswith(b"\n")


def test_ranks_join_one_directory(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuprobe"
    for rank in (1, 0, 2):
        record(path, rank=rank, world_size=3)
    ranks = read_recording(path).ranks
    assert [r.session.rank for r in ranks] == [0, 1, 2]
    assert all(not r.blind_spots for r in ranks)
    with pytest.raises(UsageError, match="exists already"):
        RecordingWriter.create(path, rank=1, world_size=3)


def test_a_recording_of_another_world_is_not_joined(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuprobe"
    record(path, rank=0, world_size=2)
    with pytest.raises(UsageError, match="exists already"):
        RecordingWriter.create(path, rank=1, world_size=4)


def test_force_with_ranks_leaves_the_other_ranks_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuprobe"
    for rank in range(3):
        record(path, rank=rank, world_size=3)
    others = {name: data for name, data in tree(path).items() if "rank-00001" in name}
    RecordingWriter.create(path, rank=0, world_size=2, force=True).close()
    left = tree(path)
    assert {name: data for name, data in left.items() if name != "rank-00000.jsonl"} == others
    with pytest.raises(UsageError, match="rank 2"):
        RecordingWriter.create(path, rank=2, world_size=2, force=True)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        RecordingWriter.create(locked / "a.gpuprobe")


def test_a_name_that_the_file_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot create the recording"):
        RecordingWriter.create(tmp_path / ("x" * 300))


def test_close_is_idempotent_and_final(tmp_path: Path) -> None:
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.close()
    writer.close()
    with pytest.raises(InternalError, match="closed"):
        writer.blind_spot(BlindSpot("a", "b"))
    with pytest.raises(InternalError, match="closed"):
        writer.trace(MemoryTrace("cpu"))


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.session(session(), ENVIRONMENT)

    def steps(start: int) -> None:
        for index in range(start, start + 50):
            writer.step(Step(index, 0, 1, traces=(writer.trace(MemoryTrace("cpu", step=index)),)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(steps, range(0, 200, 50)))
    writer.close()
    (rank,) = read_recording(writer.path).ranks
    assert [s.index for s in rank.steps] == list(range(200))
    assert rank.blind_spots == ()
    assert [t.step for t in rank.traces] == list(range(200))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_cannot_write(tmp_path: Path) -> None:
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.session(session(), ENVIRONMENT)
    before = tree(writer.path)
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        try:
            writer.step(Step(0, 0, 1))
        except InternalError:
            try:
                writer.trace(MemoryTrace("cpu"))
            except InternalError:
                writer.close()
                os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert tree(writer.path) == before
    writer.step(Step(0, 0, 1))
    writer.close()
    assert len(read_recording(writer.path).steps) == 1


def test_a_recording_is_never_the_programs_output(tmp_path: Path) -> None:
    """A program may be started with its standard streams closed."""
    program = """
import os, sys
from pathlib import Path
from gpuprobe.recording.writer import RecordingWriter, remove_recording
os.close(1)
os.close(2)
writer = RecordingWriter.create(Path(sys.argv[1]))
for descriptor in (1, 2):
    try:
        os.write(descriptor, b"what a library prints")
        os._exit(1)
    except OSError:
        pass
os._exit(0 if writer._descriptor.number > 2 else 2)
"""
    path = tmp_path / "run.gpuprobe"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert b"library" not in (path / "rank-00000.jsonl").read_bytes()


def test_a_recording_is_removed_without_the_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "run.gpuprobe"
    RecordingWriter.create(path).close()
    child = path / "child-00000-12.gpuprobe"
    RecordingWriter.create(child).close()
    (path / "weights.pt").write_bytes(b"of the program")
    remove_recording(path)
    assert [entry.name for entry in path.iterdir()] == ["weights.pt"]
    (path / "weights.pt").unlink()
    RecordingWriter.create(path).close()
    remove_recording(path)
    assert not path.exists()
