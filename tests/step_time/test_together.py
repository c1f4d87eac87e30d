"""Ranks that are played together: what waits for what, across them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.model.run.work import Action, Work, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.priced import PricedStep
from gpuprobe.step_time.replay import Costs, Played, RankTasks, Resource, Task, play_together
from gpuprobe.step_time.together import rank_tasks

MAIN, LINK = 0, 1
DEVICES = ("cuda:0", "cuda:0")
GROUP = 77


def kernel(seconds: float) -> tuple[Task, float]:
    return Task(Action.KERNEL, MAIN, 0, None), seconds


def call(name: str, *sizes: int, seconds: float = 0.0, stream: int = MAIN) -> tuple[Task, float]:
    work = Work("collective", WorkKind.COLLECTIVE, sizes=sizes, variant=name, read=1)
    return Task(Action.COLLECTIVE, stream, 0, work), seconds


def message(
    name: str, rank: int, peer: int, *, batch: int = 0, seconds: float = 0.0
) -> tuple[Task, float]:
    return call(name, 4, GROUP, rank, peer, batch, seconds=seconds)


def rank_of(*rows: tuple[Task, float]) -> RankTasks:
    tasks, seconds = [task for task, _ in rows], [time for _, time in rows]
    step = PricedStep(tasks, [None] * len(tasks), (), DEVICES)
    return rank_tasks(step, Costs(seconds, [0.0] * len(tasks), 0.0))


def played(*ranks: RankTasks, times: int = 1) -> list[Played]:
    result = play_together(ranks, times=times)
    assert not isinstance(result, Unavailable)
    return result


def waited(run: Played) -> float:
    return sum(
        span.end - span.start for step in run.spans for span in step
        if span.resource is Resource.RANKS
    )  # fmt: skip


def gpipe(rank: int, ranks: int, micro: int, forward: float, backward: float) -> RankTasks:
    rows = []
    for _ in range(micro):
        if rank:
            rows.append(message("Recv", rank, rank - 1))
        rows.append(kernel(forward))
        if rank < ranks - 1:
            rows.append(message("Send", rank, rank + 1))
    for _ in range(micro):
        if rank < ranks - 1:
            rows.append(message("Recv", rank, rank + 1))
        rows.append(kernel(backward))
        if rank:
            rows.append(message("Send", rank, rank - 1))
    return rank_of(*rows)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_the_bubble_of_a_pipeline(ranks: int, micro: int, forward: int, backward: int) -> None:
    """(p - 1) / (m + p - 1) of GPipe with p equal stages and m microbatches (Huang et al. 2019)."""
    runs = played(*(gpipe(rank, ranks, micro, forward, backward) for rank in range(ranks)))
    total = max(run.ends[-1] for run in runs)
    assert total == (micro + ranks - 1) * (forward + backward)
    last = runs[-1]  # busy from the first microbatch that it gets until its last backward pass
    assert waited(last) == pytest.approx((ranks - 1) * forward)


def test_a_slow_rank_holds_up_the_others() -> None:
    def rank(seconds: float) -> RankTasks:
        return rank_of(kernel(seconds), call("AllReduce", 2, GROUP, 0, seconds=2.0), kernel(1.0))

    fast, slow = played(rank(3.0), rank(8.0), times=2)
    assert waited(fast) == 10.0
    assert waited(slow) == 0.0
    assert fast.ends == slow.ends == [11.0, 22.0]


def test_what_runs_beside_a_collective_is_not_held_up() -> None:
    beside = call("AllReduce", 2, GROUP, 0, seconds=2.0, stream=LINK)
    first, _ = played(rank_of(beside, kernel(9.0)), rank_of(kernel(4.0), beside))
    assert first.ends == [9.0]


def test_messages_of_a_batch_run_together() -> None:
    def rank(own: int, batch: int) -> RankTasks:
        send, receive = (
            message(name, own, 1 - own, batch=batch, seconds=3.0) for name in ("Send", "Recv")
        )
        # As torch records them: an event of the program's stream before each.
        between = [(Task(action, MAIN, 0, None, 1), 0.0) for action in (Action.RECORD, Action.WAIT)]
        return rank_of(*between, send, *between, receive)

    assert [run.ends for run in played(rank(0, 1), rank(1, 1))] == [[3.0], [3.0]]
    # As with NCCL, of which both would wait for ever: each first sends what the other does not get.
    stuck = play_together([rank(0, 0), rank(1, 0)])
    assert isinstance(stuck, Unavailable)
    assert "the others do not make" in stuck.reason


def test_batches_that_follow_each_other_are_two() -> None:
    rows = [message("Send", 0, 1, batch=batch, seconds=3.0) for batch in (1, 2)]
    others = [message("Recv", 1, 0, batch=batch, seconds=3.0) for batch in (5, 6)]
    sender, receiver = played(rank_of(*rows), rank_of(*others))
    assert sender.ends == receiver.ends == [6.0]


def test_a_collective_that_a_rank_does_not_call() -> None:
    one = rank_of(call("AllReduce", 2, GROUP, 0, seconds=1.0))
    assert isinstance(play_together([one, rank_of(kernel(1.0))]), Unavailable)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), max_size=12))
def test_nothing_runs_before_all_are_there(steps: list[tuple[int, int, int]]) -> None:
    """Two ranks with random work before each collective: both run it at the same time."""
    ranks = [
        rank_of(
            *(
                row
                for step in steps
                for row in (kernel(step[own]), call("AllReduce", 2, GROUP, own, seconds=step[2]))
            )
        )
        for own in (0, 1)
    ]
    first, second = played(*ranks, times=2)
    runs = [
        [(s.start, s.end) for step in run.spans for s in step if s.resource is Resource.LINK]
        for run in (first, second)
    ]
    assert runs[0] == runs[1]
    total = sum(max(a, b) + link for a, b, link in steps)
    assert first.ends[-1] == second.ends[-1] == 2 * total
    for run, own in ((first, 0), (second, 1)):
        assert waited(run) == 2 * (total - sum(step[own] + step[2] for step in steps))
