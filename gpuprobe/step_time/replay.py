"""A step's calls to the GPU, played in time: the host issues them, each stream runs its own in
order, events order streams, and the host waits where the program does.

What overlaps, waits or is bound by the host comes out of this; it is not put in. Rules: work on one
stream runs in order; of computing kernels of several streams one runs at a time, as each fills the
GPU; copies in each direction and collectives have separate resources, which do the same. All
threads of the host count as one, as Python runs one at a time. Ranks that are played together run a
collective once all of its ranks have it, and a message once both ends do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gpuprobe.model.run.work import Action, StepWork, Work, WorkKind, unpack
from gpuprobe.model.values import Unavailable


class Resource(Enum):
    """What runs one thing at a time on a device."""

    COMPUTE = "computing"
    TO_DEVICE = "copies to the GPU"
    TO_HOST = "copies from the GPU"
    LINK = "communication"
    RANKS = "waiting for other ranks"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Task:
    """Something that a step gives to a stream or does on the host. ``operator``: one more than the
    index in the columns of operators, 0 for none; ``kernels``: launches of the whole call;
    ``thread``: of the host, that issued it, "" if unknown.
    """

    action: Action
    stream: int
    operator: int
    work: Work | None
    event: int = 0
    kernels: int = 1
    thread: str = ""


def tasks_of(step: StepWork) -> list[Task]:
    """What a step does, in order, from its columns. Raises DataError for damaged ones."""
    kinds, _ = unpack(step.operators, "operators")
    columns = unpack(step.entries, "entries")
    (issued,) = unpack(step.issued, "threads")
    threads = [step.threads[thread] for thread in issued] or [""] * len(columns[0])
    launches: dict[int, int] = {}
    for action, operator in zip(columns[0], columns[2], strict=True):
        if action == Action.KERNEL.value:
            launches[operator] = launches.get(operator, 0) + 1
    tasks = []
    actions = tuple(Action)
    for code, stream, operator, value, thread in zip(*columns, threads, strict=True):
        action = actions[code]
        number = 0
        if action in _MOVES:
            number = value
        elif operator:
            number = kinds[operator - 1]
        work = step.works[number - 1] if number else None
        event = 0 if action in _MOVES else value
        kernels = launches.get(operator, 1)
        tasks.append(Task(action, stream, operator, work, event, kernels, thread))
    return tasks


_MOVES: Final = frozenset((Action.COPY, Action.FILL, Action.COLLECTIVE))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, by the index of the task: on the GPU, and on the host until it has been issued."""

    gpu: Sequence[float]
    host: Sequence[float]
    launch: float
    """From the end of the host's call to the start on an idle stream."""


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """A task that ran: seconds since the replay began, and the index of the task."""

    start: float
    end: float
    task: int
    resource: Resource


@dataclass(slots=True)
class _Busy:
    """When one resource of a device is taken, and by which stream."""

    spans: list[tuple[float, float, int]] = field(default_factory=list)

    def free(self, ready: float, seconds: float, stream: int) -> float:
        """When the resource can be had for so long, from ``ready`` on at the earliest, while no
        other stream has it.
        """
        start = ready
        at = bisect_left(self.spans, (start, start, -1))
        if at and self.spans[at - 1][1] > start:
            at -= 1
        while at < len(self.spans):
            begin, end, owner = self.spans[at]
            if begin >= start + seconds:
                break
            if owner != stream and end > start:
                start = end
            at += 1
        return start

    def take(self, start: float, seconds: float, stream: int) -> None:
        insort(self.spans, (start, start + seconds, stream))


@dataclass(frozen=True, slots=True)
class Meeting:
    """What several ranks do together: a collective, or a message from one to another. ``key`` is
    the same in all of them, for the first, the second, … in their order; ``parties`` is how many
    they are; ``seconds``: how long it takes once all are there.
    """

    key: tuple[int, ...]
    parties: int
    seconds: float


Meetings = Mapping[int, Sequence[Meeting]]
"""By the index of a task, what has to meet before it runs. A batch of messages belongs to its first
task; the others have none, and take no time."""


@dataclass(frozen=True, slots=True)
class RankTasks:
    """What one rank does: see `play`."""

    tasks: Sequence[Task]
    devices: Sequence[str]
    costs: Costs
    meetings: Meetings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Played:
    """The spans of each time that a step was played, and when each ended: when its last work on a
    GPU did, or the host if that is later.
    """

    spans: list[list[TaskSpan]]
    ends: list[float]


def play(rank: RankTasks, *, times: int = 2) -> Played:
    """Play a step ``times`` times, one after the other, as a loop runs it."""
    player = _Player(rank)
    for _ in player.run(times):
        raise AssertionError("a rank that is alone waits for no other")
    return Played(player.spans, player.ends)


def play_together(ranks: Sequence[RankTasks], *, times: int = 2) -> list[Played] | Unavailable:
    """Play the steps of ranks that wait for each other; Unavailable if one waits for what the
    others never call, or call in another order.
    """
    players = [_Player(rank) for rank in ranks]
    runs = [player.run(times) for player in players]
    arrived: dict[tuple[int, ...], dict[int, float]] = {}  # who is there, and since when
    calls: list[dict[tuple[int, ...], int]] = [{} for _ in ranks]
    waiting: dict[int, list[tuple[tuple[int, ...], Meeting]]] = {}
    done: set[int] = set()
    begins: dict[int, list[float]] = {}
    free = list(range(len(ranks)))
    while free:
        at = free.pop()
        try:
            meetings, ready = runs[at].send(begins.pop(at, None))
        except StopIteration:
            done.add(at)
            continue
        waiting[at] = []
        for meeting in meetings:
            number = calls[at][meeting.key] = calls[at].get(meeting.key, 0) + 1
            key = (*meeting.key, number)
            arrived.setdefault(key, {})[at] = ready
            waiting[at].append((key, meeting))
        for one, expected in list(waiting.items()):
            if all(len(arrived[key]) >= meeting.parties for key, meeting in expected):
                begins[one] = [max(arrived[key].values()) for key, _ in expected]
                del waiting[one]
                free.append(one)
    if len(done) < len(ranks):
        return Unavailable(
            "ranks wait for calls that the others do not make, or make in another order"
        )
    return [Played(player.spans, player.ends) for player in players]


_Steps = Generator[tuple[Sequence[Meeting], float], list[float] | None, None]
"""Of a player: what it waits for, and since when; it gets when each of those has all its ranks."""


class _Player:
    def __init__(self, rank: RankTasks) -> None:
        self._rank = rank
        self._devices = devices = rank.devices
        self._costs = rank.costs
        self._host = 0.0
        self._streams = [0.0] * len(devices)
        self._events: dict[int, float] = {}
        self._resources: dict[tuple[str, Resource], _Busy] = {}
        # With computing on one stream of a device, its order is enough.
        used: dict[tuple[str, Resource], set[int]] = {}
        for task in rank.tasks:
            if task.action in ON_GPU:
                resource = resource_of(task)
                used.setdefault((devices[task.stream], resource), set()).add(task.stream)
        self._shared = {key for key, streams in used.items() if len(streams) > 1}
        self.spans: list[list[TaskSpan]] = []
        self.ends: list[float] = []

    def run(self, times: int) -> _Steps:
        """Play the step so often."""
        for _ in range(times):
            spans: list[TaskSpan] = []
            yield from self._step(spans)
            self.spans.append(spans)
            self.ends.append(max(self._host, *self._streams))

    def _step(self, spans: list[TaskSpan]) -> _Steps:
        for at, task in enumerate(self._rank.tasks):
            before = self._host
            self._host += self._costs.host[at]
            action, stream = task.action, task.stream
            if meetings := self._rank.meetings.get(at):
                yield from self._meet(at, task, meetings, spans)
            elif action in ON_GPU:
                self._run(at, task, spans)
            elif action is Action.RECORD:
                self._events[task.event] = max(self._streams[stream], self._host)
            elif action is Action.WAIT:
                self._streams[stream] = max(
                    self._streams[stream], self._events.get(task.event, 0.0)
                )
            elif action is Action.HOST_WAITS_EVENT:
                self._host = max(self._host, self._events.get(task.event, 0.0))
            elif action is Action.HOST_WAITS_STREAM:
                self._host = max(self._host, self._streams[stream])
            elif action is Action.HOST_WAITS_DEVICE or action is Action.RELEASE:
                # cudaFree waits for the device.
                device = self._devices[stream]
                self._host = max(
                    self._host,
                    *(
                        end
                        for end, of in zip(self._streams, self._devices, strict=True)
                        if of == device
                    ),
                )
            if self._costs.host[at]:
                end = before + self._costs.host[at]
                spans.append(TaskSpan(before, end, at, Resource.HOST))

    def _meet(
        self, at: int, task: Task, meetings: Sequence[Meeting], spans: list[TaskSpan]
    ) -> _Steps:
        stream = task.stream
        longest = max(meeting.seconds for meeting in meetings)
        busy = self._resources.setdefault((self._devices[stream], Resource.LINK), _Busy())
        ready = max(self._streams[stream], self._host + self._costs.launch)
        ready = busy.free(ready, longest, stream)
        starts = yield meetings, ready
        assert starts is not None
        end = max(start + meeting.seconds for start, meeting in zip(starts, meetings, strict=True))
        start = max(ready, end - longest)
        busy.take(start, end - start, stream)
        self._streams[stream] = end
        if start > ready:
            spans.append(TaskSpan(ready, start, at, Resource.RANKS))
        spans.append(TaskSpan(start, end, at, Resource.LINK))

    def _run(self, at: int, task: Task, spans: list[TaskSpan]) -> None:
        stream, seconds = task.stream, self._costs.gpu[at]
        ready = max(self._streams[stream], self._host + self._costs.launch)
        resource = resource_of(task)
        key = self._devices[stream], resource
        if key in self._shared and seconds:
            busy = self._resources.setdefault(key, _Busy())
            start = busy.free(ready, seconds, stream)
            busy.take(start, seconds, stream)
        else:
            start = ready
        end = self._streams[stream] = start + seconds
        if seconds:
            spans.append(TaskSpan(start, end, at, resource))
        if task.action is Action.COPY and task.work is not None and waits(task.work):
            self._host = max(self._host, end)


ON_GPU: Final = frozenset((Action.KERNEL, Action.COLLECTIVE, Action.COPY, Action.FILL))
"""What a stream runs, and has a price."""


def waits(copy: Work) -> bool:
    """Whether the host waits for a copy: a synchronous one, and one to or from pageable memory,
    which the driver stages (CUDA Runtime API, "API synchronization behavior").
    """
    return copy.variant.endswith(" sync") or copy.variant.startswith("pageable")


def resource_of(task: Task) -> Resource:
    """The resource that runs a task of a stream."""
    work = task.work
    if task.action is Action.COLLECTIVE:
        return Resource.LINK
    if task.action is Action.COPY and work is not None and work.kind is WorkKind.COPY:
        if "h2d" in work.variant:
            return Resource.TO_DEVICE
        if "d2h" in work.variant:
            return Resource.TO_HOST
        if work.variant.startswith("peer"):
            return Resource.LINK
    return Resource.COMPUTE
