"""The order of streams in a backward pass.

The autograd engine runs each node on its forward's stream. A node's stream waits for the streams
of the nodes that produced its gradients, on another device too, and for nothing else; several
gradients of one input are added up on the stream of the node that gets them; a gradient's memory
is recorded for the stream of its consumer. At the end, before final callbacks, the streams that
were current where backward was called wait for those of the leaves, and for those of captured
gradients. Source:
``torch/csrc/autograd/engine.cpp`` (``evaluate_function``, ``exec_post_processing``) and
``input_buffer.cpp`` (``InputBuffer::add``).

Nodes without an operator are not observed. They run here as in the engine, which has a thread for
each device: of a device's nodes that are ready, the one with the highest sequence number.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from torch.autograd.graph import Node

from gpuprobe.hazard_watch.names import site_at_hand
from gpuprobe.hazard_watch.node_streams import NodeStreams
from gpuprobe.hazard_watch.order.source import OrderSource
from gpuprobe.hazards.accesses import TrackedBlock
from gpuprobe.hazards.events import (
    Operator,
    Publication,
    RecordStream,
    Signal,
    SignalWait,
    StreamOrder,
)
from gpuprobe.hazards.footprint import Footprint

_numbers: Final = itertools.count(1)
SUMS: Final = ("add", "add_")
"""Operators that add up gradients of one input."""


class _Run:
    """One node of one backward pass. ``written``: the memory that it wrote, or that it got if it
    wrote none. ``gradients``: the blocks that may hold its gradients, by address.
    """

    __slots__ = (
        "arrived",
        "capturing",
        "consumers",
        "device",
        "done",
        "gradients",
        "key",
        "missing",
        "needed",
        "node",
        "producers",
        "sequence",
        "streams",
        "written",
    )

    def __init__(self, node: Node, streams: dict[int, int]) -> None:
        self.node = node
        self.device = _device_of(node)
        self.streams = streams
        self.sequence: int = node._sequence_nr()
        self.key = next(_numbers)
        self.consumers: list[_Run] = []
        self.producers: list[_Run] = []
        self.missing = 0  # producers that are not done
        self.arrived = 0
        self.needed = True
        self.capturing = False
        self.done = False
        self.written: dict[int, tuple[Footprint, Operator]] = {}
        self.gradients: dict[int, TrackedBlock | None] = {}


class BackwardPass:
    """One call of backward. ``callers``: the streams that were current there, by device."""

    def __init__(
        self,
        source: OrderSource,
        nodes: NodeStreams,
        callers: dict[int, int],
        given: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self._source = source
        self._nodes = nodes
        self.callers = callers
        inputs = given[4] if len(given) > 4 else options.get("inputs", ())
        # A leaf is resolved here, outside of the dispatcher.
        self._roots = list(dict.fromkeys(_nodes_of(given[0])))
        self._inputs = set(_nodes_of(inputs or ()))
        self._accumulate = bool(options.get("accumulate_grad"))
        self._runs: dict[Node, _Run] | None = None
        self._ready: defaultdict[int, list[tuple[int, int, _Run]]] = defaultdict(list)  # by device
        self._now: dict[int, _Run] = {}  # by thread
        self._over = False

    # -- the graph

    def _graph(self) -> dict[Node, _Run]:
        """The nodes that this call runs, with their producers and consumers."""
        if self._runs is not None:
            return self._runs
        runs = self._runs = {}
        todo = list(self._roots)
        while todo:
            node = todo.pop()
            if node in runs:
                continue
            runs[node] = self._run(node)
            todo += [following for following, _ in node.next_functions if following is not None]
        for node, run in runs.items():
            for following, _ in node.next_functions:
                if following is not None:
                    run.consumers.append(runs[following])
        self._restrict(runs)
        for run in runs.values():
            for consumer in run.consumers:
                if run.needed and (consumer.needed or consumer.capturing):
                    consumer.producers.append(run)
                    consumer.missing += 1
        for node in self._roots:
            if not runs[node].missing:
                self._push(runs[node])
        return runs

    def _run(self, node: Node) -> _Run:
        found = self._nodes.of(node)
        return _Run(node, self.callers if found is None else found)

    def _restrict(self, runs: dict[Node, _Run]) -> None:
        """With ``inputs``, only nodes on a path to one of them run."""
        if not self._inputs:
            return
        order = sorted(runs.values(), key=lambda run: run.sequence)
        for run in order:
            run.needed = False
        # A node's consumers were created before it; nodes that accumulate precede all others.
        last = [run for run in order if run.sequence >= 1 << 63]
        for run in last + [run for run in order if run.sequence < 1 << 63]:
            run.capturing = run.node in self._inputs
            below = any(consumer.needed or consumer.capturing for consumer in run.consumers)
            run.needed = below or (run.capturing and self._accumulate)

    def _push(self, run: _Run) -> None:
        if run.needed or run.capturing:
            heapq.heappush(self._ready[run.device], (-run.sequence, run.key, run))

    # -- its run

    def begins(self, node: Node) -> None:
        """A node begins: those that the engine ran before it are done. None: all are."""
        if self._over:
            return
        runs = self._graph()
        if node is None:
            self._finish_all()
            return
        thread = threading.get_ident()
        run = runs.get(node)
        if run is None or run is self._now.get(thread) or run.done:
            return
        self._end_of_now(thread)
        self._advance(run)
        ready = self._ready[run.device]
        while ready:
            following = heapq.heappop(ready)[2]
            self._begin(following)
            if following is run:
                break
            self._done(following)
        self._now[thread] = run

    def _end_of_now(self, thread: int) -> None:
        run = self._now.pop(thread, None)
        if run is not None:
            self._done(run)

    def _advance(self, run: _Run) -> None:
        """Run the nodes of other threads that precede ``run``, which begins."""
        earlier: set[_Run] = set()
        todo = [one for one in run.producers if not one.done] if run.missing else []
        while todo:
            one = todo.pop()
            if one not in earlier:
                earlier.add(one)
                todo += [producer for producer in one.producers if not producer.done]
        for thread, one in list(self._now.items()):
            if one in earlier:
                self._end_of_now(thread)
        devices = {one.device for one in earlier}
        while run.missing:
            ready = next((self._ready[at] for at in devices if self._ready[at]), None)
            if ready is None:
                return
            one = heapq.heappop(ready)[2]
            self._begin(one)
            self._done(one)

    def _finish_all(self) -> None:
        for thread in list(self._now):
            self._end_of_now(thread)
        while True:
            ready = next((ready for ready in self._ready.values() if ready), None)
            if ready is None:
                break
            run = heapq.heappop(ready)[2]
            self._begin(run)
            self._done(run)
        self._over = True
        self._join()
        # Nodes must not outlive the graph until Python finds the cycles.
        for run in (self._runs or {}).values():
            run.producers.clear()
            run.consumers.clear()
        self._runs = {}

    def _begin(self, run: _Run) -> None:
        engine = self._source.active
        for producer in run.producers:
            for index, mine, source, yours in _waits(run, producer):
                waiter = engine.stream(index, mine)
                engine.apply(SignalWait(waiter, _key(producer, source, yours)))
                if index == source:
                    self._record(producer, index, waiter)
        if not run.producers:  # a root: its gradient is the caller's
            for index in set(run.streams) | set(self.callers):
                mine, yours = run.streams.get(index, 0), self.callers.get(index, 0)
                if mine != yours:
                    engine.apply(
                        StreamOrder(engine.stream(index, mine), engine.stream(index, yours))
                    )

    def _record(self, producer: _Run, index: int, waiter: int) -> None:
        """A gradient's memory is kept for its consumer's stream, if its producer's is another one
        (``record_stream_any_impl``).
        """
        engine = self._source.active
        for address, block in producer.gradients.items():
            same = engine.block(address) is block
            if same and self._source.device_of_address(address) == index:
                engine.apply(RecordStream(address, waiter))

    def _done(self, run: _Run) -> None:
        engine = self._source.active
        run.done = True
        if run.consumers:  # its gradients may be in the memory that it got
            for producer in run.producers:
                for address, block in producer.gradients.items():
                    if engine.block(address) is block:
                        run.gradients.setdefault(address, block)
        if not run.written:  # it passes on what it got
            for producer in run.producers:
                run.written.update(producer.written)
        signalled = set()
        for consumer in run.consumers:
            if not (consumer.needed or consumer.capturing):
                continue
            for _, _, source, yours in _waits(consumer, run):
                if source not in signalled:
                    signalled.add(source)
                    engine.apply(Signal(_key(run, source, yours), engine.stream(source, yours)))
            consumer.missing -= 1
            consumer.arrived += 1
            if not consumer.missing:
                self._push(consumer)

    def _join(self) -> None:
        """The caller's streams wait for those of the leaves. Gradients may be used on the
        caller's stream, or after a wait for it, whichever stream they were written on (torch's
        notes on CUDA semantics: "Stream semantics of backward passes").
        """
        engine, site = self._source.active, site_at_hand()
        for run in (self._runs or {}).values():
            leaf = run.capturing or (run.needed and not run.consumers)
            if not (leaf and run.done):
                continue
            for index in set(run.streams) | set(self.callers):
                mine, caller = run.streams.get(index, 0), self.callers.get(index, 0)
                if mine == caller:
                    continue
                actor = engine.stream(index, caller)
                engine.apply(StreamOrder(actor, engine.stream(index, mine)))
                accesses = [
                    (address, where, True)
                    for address, (where, _) in run.written.items()
                    if self._source.device_of_address(address) == index and engine.is_live(address)
                ]
                if accesses:
                    engine.apply(Publication(actor, "backward", accesses, site))

    # -- its operators

    def _running(self) -> _Run | None:
        """The node that this thread runs."""
        return self._now.get(threading.get_ident())

    def summing(self, op: str, addresses: Collection[int]) -> _Run | None:
        """The node whose gradients are being added up, if it runs on another stream than one of the
        nodes that produced them: the engine adds them right after the running node, and before the
        next one. ``addresses``: the memory that the operator uses.
        """
        run = self._running()
        if run is None or op not in SUMS:
            return None
        for consumer in run.consumers:
            if not consumer.arrived:
                continue
            if consumer.streams != run.streams:
                return consumer
            # The node's own operators, on the same stream, take no other node's gradients.
            earlier = [one for one in consumer.producers if one.done]
            if any(one.streams != run.streams for one in earlier) and any(
                address in one.gradients for one in earlier for address in addresses
            ):
                return consumer
        return None

    def summing_on(self, stream: int, index: int, addresses: Collection[int]) -> _Run | None:
        """The node whose gradients the engine itself is adding up, if their stream is known."""
        run = self._running()
        fitting = [
            consumer
            for consumer in (() if run is None else run.consumers)
            if consumer.streams.get(index, 0) == stream
        ]
        for consumer in fitting:
            earlier = (one for one in consumer.producers if one.done)
            if any(address in one.gradients for one in earlier for address in addresses):
                return consumer
        return fitting[0] if fitting else None

    def sum_on(self, consumer: _Run, index: int) -> int:
        """Make the actor that adds up gradients of ``consumer`` wait for them; return it."""
        engine, run = self._source.active, self._running()
        waiter: int = engine.stream(index, consumer.streams.get(index, 0))
        for producer in (*(one for one in consumer.producers if one.done), run):
            if producer is None:
                continue
            for at, _, source, yours in _waits(consumer, producer):
                if at == source == index:
                    key = _key(producer, index, yours)
                    if producer is run:
                        engine.apply(Signal(key, engine.stream(index, yours)))
                    engine.apply(SignalWait(waiter, key))
                    self._record(producer, index, waiter)
        return waiter

    def touched(self, address: int) -> None:
        """The running node has used memory on a stream that its code chose."""
        run = self._running()
        if run is not None:
            run.gradients[address] = self._source.active.block(address)

    def wrote(self, address: int, where: Footprint, op: Operator) -> None:
        """The running node has written memory."""
        run = self._running()
        if run is not None:
            run.written[address] = (where, op)
            run.gradients[address] = self._source.active.block(address)


def _key(run: _Run, index: int, stream: int) -> int:
    return (run.key << 24) + (index << 16) + (stream & 0xFFFF)


def _waits(consumer: _Run, producer: _Run) -> Iterator[tuple[int, int, int, int]]:
    """The streams that wait and those that they wait for, each as a device and a number: different
    streams of one device, and those of nodes on different devices.
    """
    mine, yours = consumer.streams, producer.streams
    if mine != yours:
        for index in set(mine) | set(yours):
            if mine.get(index, 0) != yours.get(index, 0):
                yield index, mine.get(index, 0), index, yours.get(index, 0)
    one, other = consumer.device, producer.device
    if one != other and one >= 0 and other >= 0:
        yield one, mine.get(one, 0), other, yours.get(other, 0)


def _device_of(node: Node) -> int:
    """The device that a node runs on: that of the first result of its forward on a device; -1
    without one (``Node::stream`` in ``node.h``).
    """
    for metadata in node._input_metadata:
        if metadata.device.type == "cuda":
            index: int = metadata.device.index
            return index
    return -1


def _nodes_of(values: Iterable[Any]) -> Iterator[Node]:
    """The nodes that get the gradients of these tensors, or edges of the graph."""
    import torch

    for value in values:
        if not isinstance(value, torch.Tensor):
            yield value[0] if isinstance(value, tuple) else value.node
        elif value.grad_fn is not None:
            yield value.grad_fn
        elif value.requires_grad:
            with torch.enable_grad():
                view: Any = value.view_as(value)
            yield view.grad_fn.next_functions[0][0]
