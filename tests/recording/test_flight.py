"""Dumps of torch's Flight Recorder: who is missing, where ranks differ, and no code that runs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuprobe.api.recordings import hang
from gpuprobe.cli import main
from gpuprobe.errors import DataError, NotARecording
from gpuprobe.model.place import Place
from gpuprobe.model.run.hang import Hang
from gpuprobe.reporters.json import hang as hang_json

RANKS = 4
LIBRARY = {
    "name": "all_reduce",
    "filename": "/x/site-packages/torch/distributed/c10d.py",
    "line": 9,
}


def entry(number: int, op: str = "nccl:all_reduce", **changes: Any) -> dict[str, Any]:
    frame = {"name": "train", "filename": "/home/u/train.py", "line": changes.pop("line", 30)}
    return {
        "record_id": number,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": op,
        "input_sizes": ((4, 2),),
        "input_dtypes": ["Float"],
        "state": "completed",
        "is_p2p": False,
        "frames": [LIBRARY, frame],
        **changes,
    }


def dumped(folder: Path, calls: dict[int, list[dict[str, Any]]], ranks: int = RANKS) -> Path:
    for rank, entries in calls.items():
        group = {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}
        plain = {"version": "2.10", "entries": entries, "pg_config": {"0": group}}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(plain))
    return folder


def only(folder: Path) -> Hang:
    (found,) = hang(folder).hangs
    return found


def test_the_rank_that_did_not_come_is_named_with_its_last_line(tmp_path: Path) -> None:
    before = [entry(n) for n in (1, 2)]
    waits = [*before, entry(3, state="started", line=44)]
    found = only(dumped(tmp_path, {0: waits, 1: waits, 2: before, 3: waits}))
    assert (found.kind, found.sequence) == ("missing", 3)
    (side,) = found.sides
    assert (side.ranks, side.place) == ((0, 1, 3), Place("/home/u/train.py", 44, "train"))
    (absent,) = found.absent
    assert (absent.ranks, absent.sequence) == ((2,), 2)
    assert str(absent.place) == "/home/u/train.py:30 in train"


def test_the_first_mismatch_is_named(tmp_path: Path) -> None:
    one = [entry(1), entry(2), entry(3)]
    other = [entry(1), entry(2, "nccl:broadcast", line=51), entry(3)]
    found = only(dumped(tmp_path, {0: one, 1: one, 2: other, 3: one}))
    assert (found.kind, found.sequence) == ("mismatch", 2)
    assert [(side.ranks, side.op) for side in found.sides] == [
        ((0, 1, 3), "all_reduce 4x2 Float"),
        ((2,), "broadcast 4x2 Float"),
    ]


def test_other_shapes_are_a_mismatch_where_they_must_be_the_same(tmp_path: Path) -> None:
    other = entry(1, input_sizes=((8,),))
    assert only(dumped(tmp_path, {0: [entry(1)], 1: [other]}, 2)).kind == "mismatch"
    scattered = [entry(1, "nccl:all_to_all"), entry(1, "nccl:all_to_all", input_sizes=((8,),))]
    assert hang(dumped(tmp_path, {0: scattered[:1], 1: scattered[1:]}, 2)).hangs == ()


def test_a_collective_that_all_called_and_none_ends_is_stuck(tmp_path: Path) -> None:
    calls = [entry(1), entry(2, state="started")]
    found = only(dumped(tmp_path, dict.fromkeys(range(4), calls)))
    assert (found.kind, found.sequence, found.absent) == ("stuck", 2, ())


def test_a_rank_without_a_dump_is_missing(tmp_path: Path) -> None:
    calls = [entry(1), entry(2, state="scheduled")]
    found = only(dumped(tmp_path, {0: calls, 2: calls, 3: calls}))
    assert (found.kind, found.no_dump) == ("missing", (1,))


def test_what_was_overwritten_is_not_missing(tmp_path: Path) -> None:
    """The recorder keeps the last entries: ranks begin at different numbers."""
    late = [entry(n) for n in range(5, 9)]
    early = [entry(n) for n in range(2, 9)]
    assert hang(dumped(tmp_path, {0: late, 1: early}, 2)).hangs == ()


def test_sends_are_not_compared(tmp_path: Path) -> None:
    send = entry(0, "nccl:send 0->1", is_p2p=True)
    assert hang(dumped(tmp_path, {0: [entry(1), send], 1: [entry(1)]}, 2)).hangs == ()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    monkeypatch.setenv("EVIL", str(tmp_path / "ran"))
    (folder / "rank_0").write_bytes(pickle.dumps({"entries": [Evil()]}))
    with pytest.raises(DataError, match="could run code"):
        hang(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "plain", [{"entries": 3}, {"entries": [{}]}, {"entries": [{"profiling_name": 1}]}]
)
def test_dumps_of_another_shape_are_one_clear_error(tmp_path: Path, plain: object) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps(plain))
    with pytest.raises(DataError, match="rank_0"):
        hang(tmp_path)


def test_files_that_are_not_dumps(tmp_path: Path) -> None:
    with pytest.raises(NotARecording):
        hang(tmp_path / "missing")
    (tmp_path / "notes.txt").write_text("no dump")
    (tmp_path / "list_1").write_bytes(pickle.dumps([1]))
    with pytest.raises(NotARecording, match="no Flight Recorder dump"):
        hang(tmp_path)
    dumped(tmp_path, {0: [entry(1)], 1: [entry(1)]}, 2)
    assert hang(tmp_path).skipped == ("list_1", "notes.txt")
    (tmp_path / "other_0").write_bytes((tmp_path / "nccl_trace_rank_0").read_bytes())
    with pytest.raises(DataError, match="two dumps of rank 0"):
        hang(tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = [entry(1), entry(2, state="started", line=44)]
    path = str(dumped(tmp_path, {0: waits, 1: waits[:1]}))
    assert main(["hang", path]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "number 2 waits for ranks 1-3" in out
    assert "rank 0 in all_reduce 4x2 Float, started at /home/u/train.py:44 in train" in out
    assert "rank 1 last called all_reduce 4x2 Float (number 1)" in out
    assert "ranks 2-3 left no dump" in out
    assert main(["hang", path, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(hang_json.schema()).validate(document)
    assert set(document) == set(hang_json.schema()["properties"])
    dumped(tmp_path, dict.fromkeys(range(4), waits[:1]))
    assert main(["hang", path]) == 0


REAL = """
import sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
open(sys.argv[1], "wb").write(_dump_fr_trace(True, True, False))
"""


def test_a_dump_that_torch_writes(tmp_path: Path) -> None:
    """gloo's recorder: the first of two ranks, of which the other left nothing."""
    target = tmp_path / "rank_0"
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "10"}
    subprocess.run([sys.executable, "-c", REAL, str(target)], check=True, env=environment)
    found = hang(tmp_path)
    assert (found.ranks, found.groups, found.hangs) == ((0,), 1, ())
    dump = pickle.loads(target.read_bytes())
    dump["pg_config"][""]["ranks"] = "[0, 1]"
    target.write_bytes(pickle.dumps(dump))
    one = only(tmp_path)
    assert (one.kind, one.no_dump, one.sides[0].op) == ("missing", (1,), "all_reduce 3 Float")
