"""Scaling: speed-up, efficiency, and a loss whose parts sum to the whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import report_builders as build
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.api.recordings import scale
from gpuprobe.cli import main
from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.run.session import Phase, Step
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.writer import RecordingWriter

MINUTE = 60 * 10**9


def job(*ranks: list[tuple[int, int]], name: str = "r.gpuprobe", first: int = 5) -> Recording:
    """A job: for each rank its steps as (duration, waited) in nanoseconds, after a first one."""
    made = []
    for rank, steps in enumerate(ranks):
        found = [
            Step(i, 0, spent, (Phase("backward", 0, spent, 1, waited_ns=min(waited, spent)),))
            for i, (spent, waited) in enumerate([(first, 0), *steps])
        ]
        session = build.session("counters", "cuda:0", rank=rank, world_size=len(ranks))
        made.append(build.rank_recording(found, session=session))
    return Recording(name, (2, 2), tuple(made))


def test_the_table_of_the_articles() -> None:
    """27 minutes on one device, 10 on four: 67.5 %."""
    one = job([(MINUTE, 0)] * 26, first=MINUTE)
    four = job(*[[(MINUTE, 0)] * 9] * 4, first=MINUTE)
    first, row = scale(one, four, work="run").rows
    assert (first.speedup, first.efficiency, first.lost) == (1, 1, 0)
    assert row.efficiency == pytest.approx(0.675)
    assert row.speedup == pytest.approx(2.7)
    assert row.lost_own == pytest.approx(0.325)


def test_losses_are_split_by_cause() -> None:
    """Steps of 100; the last rank waits 10, which is communication, and others wait more."""
    one = job([(70, 0)] * 4)
    four = job(*[[(100, waited)] * 4 for waited in (10, 30, 30, 30)])
    _, row = scale(one, four).rows
    assert (row.total_ns, row.communication_ns, row.waiting_ns, row.own_ns) == (100, 10, 15, 75)
    assert row.efficiency == pytest.approx(0.7)
    assert row.speedup == pytest.approx(2.8)
    assert (row.lost_communication, row.lost_waiting, row.lost_own) == pytest.approx(
        (0.1, 0.15, 0.05)
    )
    assert row.throughput == pytest.approx(4 / 100e-9)


STEPS = st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 10**9)), min_size=2, max_size=5)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=3), st.lists(STEPS, min_size=2, max_size=5))
def test_parts_sum_to_the_whole(
    one: list[list[tuple[int, int]]], other: list[list[tuple[int, int]]]
) -> None:
    for work in ("step", "run"):
        for row in scale(job(*one), job(*other), work=work).rows:
            assert row.own_ns is not None
            assert row.communication_ns is not None
            assert row.waiting_ns is not None
            assert row.own_ns + row.communication_ns + row.waiting_ns == row.total_ns
            assert row.lost_own is not None
            assert row.lost_communication is not None
            assert row.lost_waiting is not None
            parts = row.lost_own + row.lost_communication + row.lost_waiting
            assert parts == pytest.approx(row.lost, abs=1e-9)
            assert row.lost == pytest.approx(1 - row.efficiency)


def test_unknown_waits_are_not_split() -> None:
    ranks = job([(10, 1)] * 3, [(10, 2)] * 3).ranks
    unknown = [
        replace(
            rank,
            steps=tuple(
                replace(s, phases=(replace(s.phases[0], waited_ns=Unavailable("on the GPU")),))
                for s in rank.steps
            ),
        )
        for rank in ranks
    ]
    _, row = scale(job([(9, 0)] * 3), Recording("r", (2, 2), tuple(unknown))).rows
    assert row.efficiency == pytest.approx(0.9)
    assert (row.own_ns, row.lost_own, row.lost_waiting) == (None, None, None)


def test_recordings_that_cannot_be_compared() -> None:
    good = job([(10, 0)] * 3)
    (rank,) = good.ranks
    for session, why in (
        (replace(rank.session, virtual=True), "measured: they are not comparable"),
        (replace(rank.session, world_size=4), "1 of the 4 ranks"),
    ):
        bad = Recording("bad", (2, 2), (replace(rank, session=session),))
        with pytest.raises(DataError, match=why):
            scale(good, bad)
    with pytest.raises(DataError, match="no step that every rank recorded"):
        scale(good, Recording("bad", (2, 2), (replace(rank, steps=()),)))
    with pytest.raises(UsageError):
        scale(good)
    with pytest.raises(UsageError):
        scale(good, good, work="epoch")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, made in (("one", job([(70, 0)] * 4)), ("two", job(*[[(100, 10), (100, 40)]] * 2))):
        path = tmp_path / f"{name}.gpuprobe"
        for rank in made.ranks:
            writer = RecordingWriter.create(
                path, rank=rank.session.rank, world_size=len(made.ranks)
            )
            writer.session(rank.session, rank.environment)
            for step in rank.steps:
                writer.step(step)
            writer.close()
        paths.append(str(path))
    assert main(["scale", *paths]) == 0
    out = capsys.readouterr().out
    assert "two.gpuprobe" in out
    assert "70.0%" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "communication waiting own work" in " ".join(out.split())
    # Every figure of both recordings, below its title.
    shown = " ".join(out.split())
    for row in scale(*paths).rows:
        for part in (row.efficiency, row.lost_communication, row.lost_waiting, row.lost_own):
            assert part is not None
            assert f"{part + 0.0:.1%}" in shown
    assert main(["scale", *paths, "--json", "--work", "run"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in document["rows"]] == [1, 2]
    assert main(["scale", paths[0]]) == 2
