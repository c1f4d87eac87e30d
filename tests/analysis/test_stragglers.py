"""The straggler is the rank that arrives last, never the one that waits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import report_builders as build

from gpuprobe.analysis.ranks.stragglers import compare_times
from gpuprobe.model.report import RankTime
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Collective, Phase, Step
from gpuprobe.model.values import Bytes, Unavailable

MS = 1_000_000
WORK = {"data": 2, "forward": 20, "backward": 40, "optimizer": 5, "other": 1}


def job(
    ranks: int,
    steps: int,
    *,
    slow: int = -1,
    phase: str = "",
    more: float = 0,
    noise: float = 0.0,
    every: int = 1,
    seed: int = 0,
) -> list[RankRecording]:
    """Ranks that all wait at the end of their backward pass for the last of them; ``slow`` takes
    ``more`` ms in one phase of each ``every``-th step."""
    chance = random.Random(seed)
    by_rank: list[list[Step]] = [[] for _ in range(ranks)]
    carried = [0.0] * ranks  # what each did after its last backward pass
    for index in range(steps):
        work = []
        for rank in range(ranks):
            spent = {name: ms * (1 + noise * chance.gauss(0, 1)) for name, ms in WORK.items()}
            if rank == slow and index % every == 0:
                spent[phase] = spent.get(phase, 0) + more
            work.append({name: max(0.0, ms) for name, ms in spent.items()})
        arrivals = [
            carried[rank] + sum(w[name] for name in ("data", "forward", "backward"))
            for rank, w in enumerate(work)
        ]
        for rank, w in enumerate(work):
            wait = max(arrivals) - arrivals[rank]
            carried[rank] = w["optimizer"] + w["other"]
            phases = tuple(
                Phase(
                    name,
                    0,
                    int((ms + (wait if name == "backward" else 0)) * MS),
                    1,
                    waited_ns=int(wait * MS) if name == "backward" else 0,
                )
                for name, ms in w.items()
            )
            total = sum(p.duration_ns for p in phases)
            by_rank[rank].append(Step(index, 0, total, phases))
    return [
        build.rank_recording(
            found, session=build.session(device="cuda:0", rank=rank, world_size=ranks)
        )
        for rank, found in enumerate(by_rank)
    ]


def compared(ranks: list[RankRecording]) -> RankTime:
    _, found = compare_times(ranks)
    assert not isinstance(found, Unavailable)
    return found


@pytest.mark.parametrize("phase", WORK)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_last_rank_is_named_with_its_cause(ranks: int, phase: str) -> None:
    slow = ranks - 1
    found = compared(job(ranks, 20, slow=slow, phase=phase, more=15, noise=0.05))
    assert found.stands_out
    assert (found.slowest, found.cause) == (slow, "outside" if phase == "other" else phase)
    assert abs(found.late_ns - 15 * MS) < 5 * MS


@pytest.mark.parametrize("phase", ["data", "other"])
def test_copies_to_a_device_are_a_separate_cause(phase: str) -> None:
    ranks = job(3, 20, slow=1, phase=phase, more=15)
    for rank in ranks:
        rank.steps = [
            replace(
                step,
                phases=tuple(
                    replace(one, copied_ns=max(0, one.duration_ns - WORK[phase] * MS))
                    if one.path == phase
                    else one
                    for one in step.phases
                ),
            )
            for step in rank.steps
        ]
    found = compared(ranks)
    assert (found.slowest, found.cause, found.late_ns) == (1, "copy", 15 * MS)
    assert [row.key for row in found.phases] == ["copy"]


def test_noise_names_no_rank() -> None:
    for seed in range(50):
        for ranks in (2, 4, 16):
            assert not compared(job(ranks, 24, noise=0.2, seed=seed)).stands_out


def test_a_rank_that_is_late_now_and_then_does_not_stand_out() -> None:
    found = compared(job(4, 40, slow=2, phase="data", more=100, every=5, noise=0.02))
    assert not found.stands_out
    assert found.cause is None


def test_a_waiting_rank_is_not_the_straggler() -> None:
    """The others wait longest in the backward pass: it is not theirs."""
    found = compared(job(4, 20, slow=1, phase="data", more=30))
    assert (found.slowest, found.cause, found.late_steps) == (1, "data", 19)
    assert found.late_ns == 30 * MS


def test_a_sleep_outside_collectives_does_not_count_as_waiting() -> None:
    """Recordings that do not have waits by phase: what a collective took is taken off."""
    ranks = job(2, 10, slow=0, phase="forward", more=20)
    old = []
    for rank in ranks:
        steps = []
        for step in rank.steps:
            wait = sum(p.waited_ns for p in step.phases if isinstance(p.waited_ns, int))
            phases = tuple(replace(p, waited_ns=Unavailable("old")) for p in step.phases)
            call = Collective("all_reduce", 1, Bytes(4), wait)
            steps.append(replace(step, phases=phases, collectives=(call,)))
        old.append(replace(rank, steps=tuple(steps)))
    found = compared(old)
    assert (found.slowest, found.cause) == (0, "forward")


def test_a_backward_pass_of_unknown_waits_is_left_out() -> None:
    ranks = job(2, 10, slow=1, phase="backward", more=50)
    unknown = [
        replace(
            rank,
            steps=tuple(
                replace(
                    step,
                    phases=tuple(
                        replace(p, waited_ns=Unavailable("on the GPU"))
                        if p.path == "backward"
                        else p
                        for p in step.phases
                    ),
                )
                for step in rank.steps
            ),
        )
        for rank in ranks
    ]
    assert not compared(unknown).stands_out
