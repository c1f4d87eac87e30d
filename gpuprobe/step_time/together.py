"""Which calls of a job's ranks have to meet: collectives by their group, messages by their ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gpuprobe.model.run.work import Action, Work
from gpuprobe.step_time.priced import PEERS, PricedStep
from gpuprobe.step_time.replay import Costs, Meeting, RankTasks, Task

_WITH_GROUP: Final = 3
"""The sizes of a collective of recorded processes, at least (`Work`)."""


def rank_tasks(step: PricedStep, costs: Costs) -> RankTasks:
    """What a rank does, with what it waits for in other ranks."""
    meetings: dict[int, list[Meeting]] = {}
    gpu = list(costs.gpu)
    for batch in _batches(step.tasks):
        meetings[batch[0]] = [_meeting(work, gpu[at]) for at, work in _works(step.tasks, batch)]
        for at in batch[1:]:
            gpu[at] = 0.0
    return RankTasks(step.tasks, step.devices, Costs(gpu, costs.host, costs.launch), meetings)


def _meeting(work: Work, seconds: float) -> Meeting:
    ranks, group, rank, *ends = work.sizes
    if not ends:
        return Meeting((group,), ranks, seconds)
    peer = ends[0]
    ends = [rank, peer] if work.variant == "Send" else [peer, rank]
    return Meeting((group, *ends), 2, seconds)


def _works(tasks: Sequence[Task], batch: Sequence[int]) -> Iterator[tuple[int, Work]]:
    for at in batch:
        work = tasks[at].work
        assert work is not None
        yield at, work


def _batches(tasks: Sequence[Task]) -> Iterator[list[int]]:
    """The indices of what other ranks take part in: each collective, and the messages of a batch,
    which NCCL runs together. Events and waits of torch are between those.
    """
    batch: list[int] = []
    key: tuple[int, int] | None = None
    for at, task in enumerate(tasks):
        work = task.work
        if task.action is not Action.COLLECTIVE or work is None or len(work.sizes) < _WITH_GROUP:
            continue
        number = work.sizes[-1] if work.variant in PEERS else 0
        mine = (task.stream, number) if number else None
        if batch and mine is not None and mine == key:
            batch.append(at)
            continue
        if batch:
            yield batch
        batch, key = [at], mine
    if batch:
        yield batch
