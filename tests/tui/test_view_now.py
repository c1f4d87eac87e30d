"""The lines on how a run is doing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from view_recordings import MIB, Run

from gpuprobe.analysis.growth import Forecast
from gpuprobe.analysis.inspection.steps import Insight, insight
from gpuprobe.api.live import neighbours, out_of_memory
from gpuprobe.model.machine.process import Neighbours
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Collective, SessionEnd
from gpuprobe.model.values import Bytes, Unavailable
from gpuprobe.recording.load import Followed
from gpuprobe.reporters.sections.watch import Surroundings, now_sections
from gpuprobe.tui.viewer.panes import texts_of

GIB = 1 << 30
SHARED = Neighbours("H100", 80 * GIB, 20 * GIB, 2 * GIB, 58 * GIB, 3)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    for index in range(14):
        made.step(traced=index < 4)
    return made


def rank_of(run: Run) -> RankRecording:
    return Followed(run.path).poll().ranks[0]


def section(rank: RankRecording, name: str, around: Surroundings | None = None) -> str:
    found = {s.title: s for s in now_sections(rank, "cuda:0", around or Surroundings())}
    return "\n".join(texts_of(found[name], rank.session.cwd)) if name in found else ""


def test_pace_and_memory(run: Run) -> None:
    rank = rank_of(run)
    assert "median of 13 6.0 ms" in section(rank, "pace")
    assert "steps/s" in section(rank, "pace")
    assert "backward 50% · forward 30% · optimizer 20%" in section(rank, "pace")
    assert "80.0 MiB reserved" in section(rank, "memory")
    assert "parameter 8.0 MiB" in section(rank, "memory")
    on_gpu = replace(rank, steps=tuple(replace(step, gpu_ns=4_000_000) for step in rank.steps))
    assert "on the GPU 4.0 ms" in section(on_gpu, "pace")


def test_what_else_is_on_the_gpu(run: Run) -> None:
    rank = rank_of(run)
    shown = section(rank, "outside torch", Surroundings(SHARED))
    assert "this process outside torch 1.9 GiB" in shown  # 2 GiB less the 80 MiB reserved
    assert "3 other processes 58.0 GiB · 20.0 GiB of 80.0 GiB free" in shown
    unknown = Unavailable("NVML is unavailable")
    assert section(rank, "outside torch", Surroundings(unknown)) == "NVML is unavailable"
    window = replace(rank.steps[9].windows[0], device_used=Bytes(380 * MIB))
    steps = list(rank.steps)
    steps[9] = replace(steps[9], windows=(window,))
    recorded = section(replace(rank, steps=tuple(steps)), "outside torch", Surroundings(unknown))
    assert "300.0 MiB in use outside torch at the end of step 9" in recorded


def test_the_forecast_uses_what_torch_may_still_get(run: Run) -> None:
    """Peaks grow by 2 MiB per step, from 64 MiB in the last: 80 MiB are reserved, 100 free."""
    rank = rank_of(run)
    around = replace(SHARED, free=100 * MIB)
    found = out_of_memory(rank, "cuda:0", around)
    assert isinstance(found, Forecast)
    level = rank.steps[-1].windows[0].peak_allocated.at_least  # type: ignore[union-attr]
    assert found.soonest == found.latest == (180 * MIB - level) // (2 * MIB)
    words = section(rank, "forecast", Surroundings(around, found))
    assert words.startswith(f"out of memory in {found.soonest} steps")
    blind = out_of_memory(rank, "cuda:0", Unavailable("no driver"))
    assert section(rank, "forecast", Surroundings(SHARED, blind)) == (
        "grows by 2.0 MiB per step\ncannot estimate time to OOM: no driver"
    )


def test_traces_tell_of_leaks_and_holes(run: Run) -> None:
    rank = rank_of(run)
    found = insight(rank, "cuda:0")
    assert isinstance(found, Insight)
    assert found.step == 3
    assert "+1.0 MiB per step: model.py:14" in section(
        rank, "left behind", Surroundings(None, None, found)
    )
    holes = section(rank, "fragmentation", Surroundings(None, None, found))
    assert "of 80.0 MiB reserved are free" in holes
    nothing = insight(replace(rank, steps=rank.steps[4:]), "cuda:0")
    assert (
        section(rank, "left behind", Surroundings(None, None, nothing)) == "no step has been "
        "traced yet"
    )


def test_the_allocator_collectives_waits_and_hazards(run: Run) -> None:
    rank = rank_of(run)
    assert "0 retries, 0 out of memory" in section(rank, "allocator")
    assert "none recorded" in section(rank, "hazards")
    assert not section(rank, "collectives")
    run.finding()
    run.finding(race=False)
    rank = rank_of(run)
    call = Collective("all_reduce", 2, Bytes(MIB), 3_000_000, Bytes(2 * MIB))
    rank = replace(rank, steps=tuple(replace(s, collectives=(call,)) for s in rank.steps))
    assert "all_reduce: 26 calls, 13.0 MiB, 26.0 MiB sent, waited 39.0 ms" in section(
        rank, "collectives"
    )
    assert "1 read-after-write" in section(rank, "hazards")
    assert "12× .item() at model.py:13" in section(rank, "host waits")


def test_without_steps_and_on_the_cpu_it_says_so(tmp_path: Path) -> None:
    empty = rank_of(Run(tmp_path))
    assert section(empty, "pace") == section(empty, "memory") == "no step yet"
    assert isinstance(out_of_memory(empty, "cuda:0", SHARED), Unavailable)
    none = neighbours(empty, "cpu")
    assert isinstance(none, Unavailable)
    ended = replace(empty, end=SessionEnd(1))
    gone = neighbours(ended, "cuda:0", "8xh100")
    assert isinstance(gone, Unavailable)
    assert "has ended" in gone.reason
    unmatched = neighbours(empty, "cuda:0", "8xh100")  # process 42 is on none of these GPUs
    assert isinstance(unmatched, Unavailable)
    assert "process 42 holds memory on none of the 8 GPUs" in unmatched.reason
