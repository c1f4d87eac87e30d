"""Dumps of torch's Flight Recorder: who is missing, where ranks differ, and no code that runs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import warm_python

from gpuprobe.api.recordings import hang
from gpuprobe.cli import main
from gpuprobe.errors import DataError, NotARecording, UsageError
from gpuprobe.model.place import Place
from gpuprobe.model.run.communication import CollectiveRecord, records_of
from gpuprobe.model.run.jobs import Hang
from gpuprobe.recording.load import load
from gpuprobe.recording.many.flight import read_dumps
from gpuprobe.reporters.json.schemas import schema

pytestmark = pytest.mark.xdist_group("flight")  # so that one process shares the fixtures

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
    with pytest.raises(UsageError, match="no such directory: "):
        hang(tmp_path / "missing")
    assert main(["hang", str(tmp_path / "missing")]) == 2  # as for any path that does not exist
    (tmp_path / "notes.txt").write_text("no dump")
    with pytest.raises(UsageError, match=r"notes\.txt is a file, not a directory"):
        hang(tmp_path / "notes.txt")
    (tmp_path / "list_1").write_bytes(pickle.dumps([1]))
    with pytest.raises(NotARecording, match="no Flight Recorder dump"):
        hang(tmp_path)
    dumped(tmp_path, {0: [entry(1)], 1: [entry(1)]}, 2)
    assert hang(tmp_path).skipped == ("list_1", "notes.txt")
    (tmp_path / "other_0").write_bytes((tmp_path / "nccl_trace_rank_0").read_bytes())
    with pytest.raises(DataError, match="two dumps of rank 0"):
        hang(tmp_path)


def test_a_truncated_dump_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that is killed while it dumps leaves the beginning of a file, or an empty one."""
    calls = [entry(1), entry(2, state="started")]
    folder = dumped(tmp_path, dict.fromkeys(range(4), calls))
    damaged = tmp_path / "nccl_trace_rank_2"
    damaged.write_bytes(damaged.read_bytes()[:200])
    (tmp_path / "nccl_trace_rank_3").write_bytes(b"")
    found = hang(folder)
    assert found.ranks == (0, 1)
    assert [one.rank for one in found.unreadable] == [2, 3]
    assert only(folder).no_dump == (2, 3)
    assert main(["hang", str(folder)]) == 1
    assert "ranks 2-3 left no dump that can be read" in capsys.readouterr().out
    assert found.unreadable[1].reason == f"{tmp_path / 'nccl_trace_rank_3'} is empty"


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
    jsonschema.Draft202012Validator(schema("hang-1")).validate(document)
    assert set(document) == set(schema("hang-1")["properties"])
    dumped(tmp_path, dict.fromkeys(range(4), waits[:1]))
    assert main(["hang", path]) == 0


# -- one record of a collective, whoever made it


def test_what_ranks_send_and_who_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = 1_790_000_000_000_000_000
    calls: dict[int, list[dict[str, Any]]] = {}
    for rank in range(4):
        late = 5_000_000 if rank == 2 else 1_000 * rank
        times = [{"time_created_ns": started + n * 10**9 + late} for n in (1, 2, 3)]
        calls[rank] = [
            entry(1, **times[0]),
            entry(2, "nccl:_all_gather_base", input_dtypes=["BFloat16"], line=40, **times[1]),
            entry(3, "nccl:barrier", input_sizes=(), input_dtypes=[], **times[2]),
            entry(0, "nccl:send 2->3", is_p2p=True, line=50),
        ]
    found = hang(dumped(tmp_path, calls))
    assert found.hangs == ()
    rows = [(row.op, row.ranks, row.dtype, row.payload, row.wire) for row in found.communication]
    assert rows == [  # 4 x 2 elements
        ("all_gather", 4, "bfloat16", 4 * 16, 3 * 16),
        ("all_reduce", 4, "float32", 32, 2 * 32 * 3 // 4),
        ("send", 4, "float32", 32, 32),
        ("barrier", 4, "", 0, 0),
    ]
    assert [str(row.place) for row in found.communication][1] == "/home/u/train.py:30 in train"
    (last,) = found.arrivals
    assert (last.rank, last.last, last.collectives) == (2, 3, 3)
    assert last.late_ns == 3 * (5_000_000 - 3_000)
    assert main(["hang", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Communication of rank 0, as far as its dump goes back: 128 B sent" in out
    assert "all_gather, 4 ranks, bfloat16 1 64 B 48 B" in out
    assert "2 3 3 15.0 ms" in out
    assert main(["hang", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema("hang-1")).validate(document)
    assert document["arrivals"] == [{"rank": 2, "collectives": 3, "last": 3, "late_ns": 14_991_000}]


def test_ranks_without_times_have_no_arrivals(tmp_path: Path) -> None:
    assert hang(dumped(tmp_path, {rank: [entry(1)] for rank in range(4)})).arrivals == ()


BOTH = """
import os, sys, torch, torch.distributed as dist, gpuprobe
from torch._C._distributed_c10d import _dump_fr_trace
folder = sys.argv[1]
other = os.fork()
rank = 0 if other else 1
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
with gpuprobe.record(folder + "/run.gpuprobe") as recorder:
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    with recorder.step():
        dist.all_reduce(torch.ones(3, 5))
        dist.broadcast(torch.ones(4, dtype=torch.float64), 0)
        dist.all_gather([torch.zeros(2, dtype=torch.int64) for _ in range(2)],
                        torch.ones(2, dtype=torch.int64))
        dist.reduce(torch.ones(7, dtype=torch.bfloat16), 0)
    dist.barrier()
open(f"{folder}/dumps/rank_{rank}", "wb").write(_dump_fr_trace(True, True, False))
sys.exit(os.waitpid(other, 0)[1] if other else 0)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that gpuprobe recorded and torch's recorder of gloo dumped."""
    import torch

    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch (2.6) has no Flight Recorder of gloo")
    folder = tmp_path_factory.mktemp("job")
    (folder / "dumps").mkdir()
    (folder / "both.py").write_text(BOTH)
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "20"}
    command = [warm_python.shared().python, str(folder / "both.py"), str(folder)]
    subprocess.run(command, check=True, env=environment)
    return folder


def test_a_dump_has_the_records_that_gpuprobe_makes_of_the_run(job: Path) -> None:
    dumps = read_dumps(job / "dumps").called
    recorded = load(job / "run.gpuprobe").ranks
    for rank in (0, 1):
        (step,) = [step for step in recorded[rank].steps if step.exchanges]
        live = [row(one) for one in records_of(step.exchanges)]
        dumped = [row(one) for one in dumps[rank] if one.op != "barrier"]
        assert len(live) == 4
        assert dumped == live
    found = hang(job / "dumps")
    assert (found.ranks, found.groups, found.hangs) == ((0, 1), 1, ())
    assert sum(one.last for one in found.arrivals) == 5  # the barrier, too


def test_a_dump_that_torch_writes(job: Path, tmp_path: Path) -> None:
    """The first of two ranks, of which the other left nothing."""
    (tmp_path / "rank_0").write_bytes((job / "dumps" / "rank_0").read_bytes())
    one = only(tmp_path)
    assert (one.kind, one.no_dump, one.sequence) == ("missing", (1,), 5)
    assert one.sides[0].op == "barrier"


def row(one: CollectiveRecord) -> tuple[Any, ...]:
    """Each field that both sources have."""
    assert isinstance(one.place, Place)
    assert isinstance(one.arrival_ns, int)
    return (
        one.axis, one.ranks, one.sequence, one.op, one.dtype, one.payload, one.wire, one.members,
        one.place.file, one.place.line,
    )  # fmt: skip
