"""Two real ranks on gloo: DistributedDataParallel, FSDP2, collectives by hand."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import warm_python
from conservation import check_steps
from distributed_programs import PROGRAMS, WORLD
from programs import Net

import gpuprobe
from gpuprobe.model.memory import Category
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.values import Unavailable
from gpuprobe.sampler.hooks.collectives import DDP

pytestmark = pytest.mark.xdist_group("distributed")  # so that one process shares the fixtures

fsdp2 = pytest.mark.skipif(
    "fully_sharded" not in PROGRAMS, reason="FSDP2 of this torch (2.6) needs a GPU"
)
HERE = Path(__file__).resolve().parent
PARAMETERS = sum(p.nbytes for p in Net().parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [warm_python.shared().python, str(HERE / "distributed_programs.py"), str(made)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error,ignore:This process"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return made


def load(folder: Path, name: str, level: str) -> Recording:
    return gpuprobe.load(folder / f"{name}-{level}.gpuprobe")


def bytes_of(recording: Recording, category: Category, step: int = 1) -> int:
    """The most that blocks of a category held at once in one step of the first rank."""
    rank = recording.ranks[0]
    most = 0
    for trace in rank.traces.of(rank.steps[step]):
        held = {
            row.address: row.size for row in trace.baseline.rows() if row.category == category.code
        }
        most = max(most, sum(held.values()))
        for row in trace.events.rows():
            if row.category == category.code:
                if row.action.value == "alloc":
                    held[row.address] = row.size
                else:
                    held.pop(row.address, None)
            most = max(most, sum(held.values()))
    return most


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_are_the_same_at_both_levels(folder: Path, name: str, rank: int) -> None:
    losses = json.loads((folder / f"losses-{rank}.json").read_text())[name]
    assert losses["counters"] == losses[""]
    assert losses["trace"] == losses[""]


@pytest.mark.parametrize("level", ["counters", "trace"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_rank_adds_up(folder: Path, name: str, level: str) -> None:
    recording = load(folder, name, level)
    assert [rank.session.rank for rank in recording.ranks] == list(range(WORLD))
    for rank in recording.ranks:
        assert len(rank.steps) == 4
        assert rank.end is not None
        assert rank.end.gpuprobe_faults == ()
        traces = {
            n: t for s in rank.steps for n, t in zip(s.traces, rank.traces.of(s), strict=True)
        }
        check_steps(rank.steps, traces)


def test_the_buckets_of_data_parallelism_have_a_name(folder: Path) -> None:
    assert bytes_of(load(folder, "data_parallel", "trace"), Category.GRADIENT_BUCKET) >= PARAMETERS
    # A bucket that gradients are views of is the gradients.
    views = load(folder, "bucket_views", "trace")
    assert bytes_of(views, Category.GRADIENT_BUCKET) < PARAMETERS
    assert bytes_of(views, Category.GRADIENT) >= PARAMETERS


@fsdp2
def test_sharded_parameters_are_seen_whole_while_they_are_whole(folder: Path) -> None:
    recording = load(folder, "fully_sharded", "trace")
    (tensors,) = recording.steps[1].tensors
    assert tensors.by_category[Category.PARAMETER] == PARAMETERS // WORLD
    assert tensors.by_category[Category.GRADIENT] == PARAMETERS // WORLD
    assert PARAMETERS // WORLD <= bytes_of(recording, Category.PARAMETER) < PARAMETERS
    assert bytes_of(recording, Category.GATHERED_PARAMETER) >= PARAMETERS
    assert bytes_of(recording, Category.GRADIENT_BUCKET) >= PARAMETERS // WORLD


def calls(recording: Recording, step: int = 1) -> dict[str, tuple[int, int]]:
    """Of every rank alike: operation -> (count, bytes)."""
    by_rank = [
        {call.op: (call.count, call.bytes) for call in rank.steps[step].collectives}
        for rank in recording.ranks
    ]
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


@pytest.mark.parametrize("level", ["counters", "trace"])
def test_collectives_by_hand_are_counted(folder: Path, level: str) -> None:
    recording = load(folder, "by_hand", level)
    tensors = len(list(Net().parameters()))
    assert calls(recording) == {
        "all_reduce": (tensors + 1, PARAMETERS + 4),  # every gradient, and the loss
        "wait": (tensors, 0),
        "barrier": (1, 0),
    }
    for rank in recording.ranks:
        for call in rank.steps[1].collectives:
            assert not isinstance(call.host_ns, Unavailable)
            assert 0 < call.host_ns < rank.steps[1].duration_ns


def test_the_exchange_of_data_parallelism_is_counted(folder: Path) -> None:
    for step in (0, 1, 3):
        assert calls(load(folder, "data_parallel", "counters"), step) == {DDP: (1, PARAMETERS)}
    # One of the two backward passes of a step is under no_sync().
    assert calls(load(folder, "bucket_views", "counters")) == {DDP: (1, PARAMETERS)}
    (rank, _) = load(folder, "data_parallel", "counters").ranks
    assert [spot.what.partition(",")[0] for spot in rank.blind_spots] == [
        "collectives of DistributedDataParallel"
    ]


@fsdp2
def test_the_exchange_of_sharded_parameters_is_counted(folder: Path) -> None:
    found = calls(load(folder, "fully_sharded", "counters"))
    gathers = next(found[op] for op in found if op.startswith("all_gather"))
    reduces = next(found[op] for op in found if op.startswith("reduce_scatter"))
    # Two groups (the body, and the rest), each put together for the forward pass, and the body
    # again for the backward pass; each reduced once.
    assert gathers[0] == 3
    assert reduces == (2, PARAMETERS)
