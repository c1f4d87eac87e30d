"""The predicted time of a recorded step: which step, and on which GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Final

from gpuprobe.model.plans.step_time import LINKS, RANKS, RankStepTime, StepTime
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.work import StepWork, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.predict import (
    TimelineSpan,
    predict,
    predict_together,
    timeline,
    timelines_together,
)
from gpuprobe.step_time.priced import PEERS
from gpuprobe.step_time.prices import Prices, prices
from gpuprobe.step_time.speeds import all_speeds

_NODE: Final = 8  # GPUs of a node, if nothing else is known: of NVIDIA's DGX and HGX systems
_FIRST_STEPS: Final = 64  # steps in which work is searched: those of a long run stay undecoded
NO_WORK: Final = Unavailable(
    "the work of steps is recorded on simulated GPUs, at level trace: gpuprobe run --gpu GPU "
    "--level trace"
)


def step_time_of(
    rank: RankRecording, gpu: str = "", *, per_node: int = 0, network: float = 0.0
) -> StepTime | Unavailable:
    """The time of the last whole step of a rank whose work was recorded.

    ``gpu``: its name in the catalogue, by default the one that was recorded. ``per_node``: ranks
    on each node, by default as many as the recorded process saw GPUs. ``network``: GB/s of each
    GPU's network adapter, 0 if there is none. Raises DataError for a damaged recording.
    """
    chosen = _step_and_prices(rank, gpu, network)
    if isinstance(chosen, Unavailable):
        return chosen
    index, work, of_gpu = chosen
    time = predict(work, index, of_gpu, per_node=per_node or _per_node(rank))
    return time if isinstance(time, Unavailable) else _without_data(time, rank)


def job_time_of(ranks: Sequence[RankRecording], network: float = 0.0) -> StepTime | Unavailable:
    """The time of the last whole step that all ranks of a job have, which are played together: see
    `step_time_of`. It is that of the slowest rank; of the first, alone, where the recording lacks a
    rank, or the groups of its collectives, which were not recorded before 2.11.
    """
    first = ranks[0]
    job = _job(ranks, network)
    if isinstance(job, Unavailable):
        return job
    if job is None:
        return step_time_of(first, network=network)
    index, steps, of_gpu = job
    times = predict_together(steps, index, of_gpu, per_node=_per_node(first))
    if isinstance(times, Unavailable):
        return times
    rows = [
        RankStepTime(rank, time.expected_ns, time.bound_by(LINKS), time.bound_by(RANKS))
        for rank, time in sorted(times.items())
    ]
    slowest = max(rows, key=lambda row: (row.ns, -row.waits_ns))
    time = replace(times[slowest.rank], by_rank=tuple(rows))
    return _without_data(time, next(rank for rank in ranks if rank.session.rank == slowest.rank))


def _without_data(time: StepTime, rank: RankRecording) -> StepTime:
    """With a note where the program waits for a DataLoader, and whether longer than the step."""
    step = next(step for step in islice(rank.steps, _FIRST_STEPS) if step.index == time.step)
    spent = [phase.duration_ns for phase in step.phases if phase.path == DATA]
    if not spent:
        return time
    longer = sum(spent) > time.expected_ns
    text = f"loading of data{', here longer than the step' if longer else ''}: how long it takes "
    text += "depends on the machine"
    return replace(time, left_out=(*time.left_out, text))


DATA: Final = "data"
"""The phase in which the program waits for its DataLoader, which no prediction contains."""


def timelines_of(ranks: Sequence[RankRecording]) -> dict[int, tuple[str, list[TimelineSpan]]]:
    """By the rank, the GPU's name and the course of the step whose time `job_time_of` predicts;
    without the ranks that have none.
    """
    job = _job(ranks, 0.0)
    if isinstance(job, Unavailable):
        return {}
    if job is not None:
        _, steps, of_gpu = job
        courses = timelines_together(steps, of_gpu, per_node=_per_node(ranks[0]))
        if isinstance(courses, Unavailable):
            return {}
        return {rank: (of_gpu.name, spans) for rank, spans in courses.items()}
    alone = {}
    for rank in ranks:
        chosen = _step_and_prices(rank, "", 0.0)
        if not isinstance(chosen, Unavailable):
            _, work, of_gpu = chosen
            spans = timeline(work, of_gpu, per_node=_per_node(rank))
            if not isinstance(spans, Unavailable):
                alone[rank.session.rank] = of_gpu.name, spans
    return alone


def _job(
    ranks: Sequence[RankRecording], network: float
) -> tuple[int, dict[int, StepWork], Prices] | Unavailable | None:
    """The last whole step of all ranks: its index, its work by the rank, and the prices of their
    GPU. None where they cannot be played together.
    """
    if len(ranks) == 1 or len(ranks) < ranks[0].session.world_size:
        return None
    steps: dict[int, dict[int, StepWork]] = {}
    gpus: dict[str, Prices] = {}
    for rank in ranks:
        chosen = _steps_and_prices(rank, "", network)
        if isinstance(chosen, Unavailable):
            return chosen
        steps[rank.session.rank], of_gpu = chosen
        gpus[of_gpu.name] = of_gpu
    if not all(_has_groups(step) for one in steps.values() for step in one.values()):
        return None
    if len(gpus) > 1:
        return _SEVERAL
    common = set.intersection(*map(set, steps.values()))
    if not common:
        return Unavailable("no step is complete on all ranks")
    index = max(common)
    return index, {rank: one[index] for rank, one in steps.items()}, gpus.popitem()[1]


def represents_all(rank: RankRecording) -> bool:
    """Whether a rank's last whole step may be that of each rank of its job: it sends nothing to a
    particular rank, as the stages of a pipeline do.
    """
    chosen = _step_and_prices(rank, "", 0.0)
    return isinstance(chosen, Unavailable) or not any(
        work.kind is WorkKind.COLLECTIVE and work.variant in PEERS for work in chosen[1].works
    )


def _has_groups(step: StepWork) -> bool:
    return all(len(work.sizes) > 1 for work in step.works if work.kind is WorkKind.COLLECTIVE)


def _per_node(rank: RankRecording) -> int:
    """Ranks on a node: as many as a process sees GPUs; one that sees a single GPU may be one of up
    to `_NODE`.
    """
    visible = sum(device.startswith("cuda") for device in rank.session.devices)
    return min(max(1, rank.session.world_size), visible if visible > 1 else _NODE)


def _step_and_prices(
    rank: RankRecording, gpu: str, network: float
) -> tuple[int, StepWork, Prices] | Unavailable:
    """The last whole step with work, of the first ones: its index and work, and the prices of its
    GPU.
    """
    chosen = _steps_and_prices(rank, gpu, network)
    if isinstance(chosen, Unavailable):
        return chosen
    steps, of_gpu = chosen
    index = max(steps)
    return index, steps[index], of_gpu


def _steps_and_prices(
    rank: RankRecording, gpu: str, network: float
) -> tuple[dict[int, StepWork], Prices] | Unavailable:
    """The whole steps with work, of the first ones, by their index, and the prices of the GPU."""
    if not rank.session.virtual:
        return NO_WORK
    known = [
        (step.index, step.ended_by, step.work)
        for step in islice(rank.steps, _FIRST_STEPS)
        if not isinstance(step.work, Unavailable)
    ]
    if not known:
        return NO_WORK
    whole = {index: work for index, ended_by, work in known if ended_by != "end"}
    if not whole:
        return Unavailable("no step is complete")
    names = {gpu} if gpu else _recorded_gpus(rank)
    if len(names) != 1:
        return Unavailable("the GPU of the recording is unknown") if not names else _SEVERAL
    name = names.pop()
    of_gpu = prices(name if gpu else _named().get(name, name), network)
    return of_gpu if isinstance(of_gpu, Unavailable) else (whole, of_gpu)


_SEVERAL: Final = Unavailable("the program uses GPUs of several kinds")


def the_gpu_of(rank: RankRecording) -> tuple[str, str] | None:
    """The only GPU of a recording: the catalogue's name for it, and torch's; None if there is no
    such GPU.
    """
    names = _recorded_gpus(rank)
    if len(names) != 1:
        return None
    title = names.pop()
    known = _named().get(title)
    return None if known is None else (known, title)


def _recorded_gpus(rank: RankRecording) -> set[str]:
    """The names of the GPUs of a recording, as torch reports them."""
    return set() if rank.end is None else set(rank.end.gpus)


@lru_cache(maxsize=1)
def _named() -> dict[str, str]:
    """The catalogue's name of each GPU, by the name that torch reports."""
    return {speeds.title: name for name, speeds in all_speeds().items()}
