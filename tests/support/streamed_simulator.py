"""A simulator of programs whose streams use each other's blocks: it makes the traces that are
replayed. Rules from ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from collections import Counter, deque

from gpuprobe.allocator.blocks import PoolBlock, PrivatePool
from gpuprobe.allocator.simulator import Simulator


class StreamedSimulator(Simulator):
    """Frees wait for the streams that used the block."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.uses: dict[PoolBlock, set[int]] = {}
        self.capture_uses: dict[PoolBlock, set[int]] = {}
        self.deferred: dict[PoolBlock, None] = {}  # frees deferred while capturing
        self.waiting: Counter[PoolBlock] = Counter()  # events that are not done
        # Events by stream, oldest first: their numbers, and the blocks that wait for them.
        self.queues: dict[int, deque[tuple[int, PoolBlock]]] = {}
        self.tickets = 0
        self.finished: dict[int, int] = {}  # by stream: the last ticket that is done

    def malloc(self, requested: int, stream: int = 0, pool: int = 0) -> PoolBlock | None:
        if (self.queues or self.deferred) and not (self.captures and self.capturing(stream)):
            self.process_events()
        return super().malloc(requested, stream, pool)

    def record_stream(self, block: PoolBlock, stream: int) -> None:
        """Another stream uses the block (``recordStream``); its own stream is ignored."""
        if stream == block.free_list.stream:
            return
        self.uses.setdefault(block, set()).add(stream)
        if self.capturing():
            self.capture_uses.setdefault(block, set()).add(stream)

    def free(self, block: PoolBlock) -> None:
        self.request_free(block)
        if not self.uses.get(block):
            self.complete(block)
        elif self.capturing():
            self.deferred[block] = None
        else:
            self._insert_events(block)

    def finish(self, stream: int) -> None:
        """The work queued on ``stream`` so far is done: the next poll finds its events complete."""
        self.finished[stream] = self.tickets

    def process_events(self) -> None:
        """Poll the events, oldest first per stream, and free the blocks whose events are done."""
        self._insert_deferred()
        for stream in list(self.queues):
            queue = self.queues[stream]
            done = self.finished.get(stream, 0)
            while queue and queue[0][0] <= done:
                self._event_done(queue.popleft()[1])
            if not queue:
                del self.queues[stream]

    def synchronize_events(self, owner: PrivatePool | None = None) -> None:
        self._insert_deferred()
        for stream in list(self.queues):
            others: deque[tuple[int, PoolBlock]] = deque()
            for ticket, block in self.queues[stream]:
                if owner is not None and block.free_list.pool.owner is not owner:
                    others.append((ticket, block))
                else:
                    self._event_done(block)
            if others:
                self.queues[stream] = others
            else:
                del self.queues[stream]

    def _event_done(self, block: PoolBlock) -> None:
        self.waiting[block] -= 1
        if not self.waiting[block]:
            self.complete(block)

    def _insert_events(self, block: PoolBlock) -> None:
        """Record an event on every stream that used the block (``insert_events``)."""
        for stream in sorted(self.uses.pop(block, ())):
            self.tickets += 1
            self.waiting[block] += 1
            self.queues.setdefault(stream, deque()).append((self.tickets, block))

    def _insert_deferred(self) -> None:
        """Insert the events of frees that were deferred during a capture
        (``insert_events_deferred_until_no_capture``): uses made during the capture are over,
        earlier ones get events.
        """
        for block in list(self.deferred):
            if block in self.uses:
                self.uses[block] -= self.capture_uses.pop(block, set())
            self._insert_events(block)
            if not self.waiting[block]:
                self.complete(block)
        self.deferred.clear()
