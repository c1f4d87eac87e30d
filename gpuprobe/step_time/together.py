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
        (first, _), *others = batch
        meetings[first] = [_meeting(work, costs.gpu[at]) for at, work in batch]
        for at, _ in others:
            gpu[at] = 0.0
    return RankTasks(step.tasks, step.devices, Costs(gpu, costs.host, costs.launch), meetings)


def _meeting(work: Work, seconds: float) -> Meeting:
    ranks, group, rank, *ends = work.sizes
    if not ends:
        return Meeting((group,), ranks, seconds)
    peer = ends[0]
    from_to = (rank, peer) if work.variant == "Send" else (peer, rank)
    return Meeting((group, *from_to), 2, seconds)


def _batches(tasks: Sequence[Task]) -> Iterator[list[tuple[int, Work]]]:
    """What other ranks take part in, with the index of its task: each collective, and the messages
    of a batch, which NCCL runs together. Events and waits of torch are between those.
    """
    batch: list[tuple[int, Work]] = []
    key: tuple[int, int] | None = None
    for at, task in enumerate(tasks):
        work = task.work
        if task.action is not Action.COLLECTIVE or work is None or len(work.sizes) < _WITH_GROUP:
            continue
        number = work.sizes[-1] if work.variant in PEERS else 0
        mine = (task.stream, number) if number else None
        if batch and mine is not None and mine == key:
            batch.append((at, work))
            continue
        if batch:
            yield batch
        batch, key = [(at, work)], mine
    if batch:
        yield batch
