"""Which stream a node of the autograd graph runs on, and when an event of CUDA ends.

A node runs on the stream that was current on its output's device when its forward operator ran,
and that stream is current in its hooks (``torch/csrc/autograd/engine.cpp``, ``evaluate_function``;
``Node::stream`` in ``node.h``). A node that accumulates a leaf's gradient has the stream that was
current when it was made: at the first use of the leaf in a graph, or earlier if something kept the
node alive (a hook, DDP).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch.autograd.graph import Node

from gpuprobe.torch_support.version import installed

Streams = dict[int, int]
"""Stream numbers by device index; 0 if a device has none."""
Below = Callable[[], AbstractContextManager[object]]

_ACCUMULATING: Final = 1 << 63
"""From this sequence number on, nodes accumulate gradients (``UINT64_MAX``)."""
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_numbers: Final = itertools.count(1)


class NodeStreams:
    """The streams of the nodes of one machine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Switches of the current streams, as the number that the next node would have.
        self._switches: list[int] = []
        self._then: list[Streams] = []
        self._key = f"gpuprobe: streams {next(_numbers)}"
        self._used: dict[int, Streams] = {}  # leaves since the last backward pass, by id
        # Leaves that were used before the first switch, by id. Nearly all programs have none.
        self._early: dict[int, weakref.ref[torch.Tensor]] = {}

    def switched(self, streams: Streams, below: Below) -> None:
        """Nodes that are created from now on run on these streams. ``below``: as for
        `leaves_used`.
        """
        early, self._early = self._early, {}
        for leaf in [ref() for ref in early.values()]:
            if leaf is not None:
                self._note_stream(leaf, {}, below)
        with self._lock:
            self._switches.append(torch._C._autograd._get_sequence_nr())
            self._then.append(dict(streams))

    def leaves_used(
        self,
        values: Iterable[object],
        streams: Streams,
        below: Below = torch.overrides.enable_reentrant_dispatch,
    ) -> None:
        """An operator with these arguments is recorded by autograd: it may have created the nodes
        that accumulate the gradients of its leaves. Each node keeps its stream in its metadata.
        ``below``: the context in which the dispatcher calls no mode.
        """
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.requires_grad and value.is_leaf:
                    if streams or self._switches:
                        self._leaf_used(value, streams, below)
                    elif not self._used_early(value):
                        self._early[id(value)] = weakref.ref(value)
            elif type(value) is list or type(value) is tuple:
                self.leaves_used(value, streams, below)

    def _leaf_used(self, leaf: torch.Tensor, streams: Streams, below: Below) -> None:
        if self._used.get(id(leaf)) == streams:
            return
        self._used[id(leaf)] = dict(streams)
        kept = self._note_stream(leaf, streams, below)
        if kept is not None:
            self._used[id(leaf)] = kept

    def _used_early(self, leaf: torch.Tensor) -> bool:
        ref = self._early.get(id(leaf))
        return ref is not None and ref() is leaf

    def _note_stream(self, leaf: torch.Tensor, streams: Streams, below: Below) -> Streams | None:
        """Store the streams in the node of a leaf, unless it has some. Returns what the node then
        has; None if there is no such node.
        """
        if type(leaf) not in _PLAIN and not hasattr(leaf, "_local_tensor"):
            return None  # a view of an unknown subclass may be anything
        if leaf.layout is not torch.strided:
            return None  # such a layout has no views
        with below(), torch.enable_grad():
            view = leaf.view_as(leaf)
        node = None if view.grad_fn is None else view.grad_fn.next_functions[0][0]
        if node is None:
            return None
        found: Streams = node.metadata.setdefault(self._key, dict(streams))
        return found

    def forget_leaves(self) -> None:
        """Forget nodes of leaves, when the graph may no longer exist: they are searched again at
        the next use.
        """
        self._used.clear()

    def of(self, node: Node) -> Streams | None:
        """The streams of a node; None if unknown."""
        sequence = node._sequence_nr()
        if sequence >= _ACCUMULATING:
            found: Streams | None = node.metadata.get(self._key)
            if found is None and hasattr(node, "variable"):
                leaf = node.variable
                found = {} if self._used_early(leaf) else self._used.get(id(leaf))
            return found
        at = bisect_right(self._switches, sequence) - 1
        return self._then[at] if at >= 0 else {}


_LIFETIME: Final = "_gpuprobe_lifetime"


class _Lifetime:
    """An attribute of an event that ends with the event."""

    __slots__ = ("__weakref__",)


def _leaves_references() -> bool:
    """Whether a weak reference to a CUDA event outlives it: events of torch 2.10 to 2.12 are freed
    without clearing it, so that its next use, by the garbage collector too, reads freed memory
    (`torch.Event` supports weak references from 2.10 on, and the destructor of its subclass
    `torch._C._CudaEventBase` clears them from 2.13 on).
    """
    return (2, 10) <= installed() <= (2, 12)


_LEAVES_REFERENCES: Final = _leaves_references()


def lifetime_of(event: torch.Event) -> object:
    """An object whose weak references report the end of an event: the event itself, or an
    attribute. The same object each time. Raises TypeError if neither is possible: a `torch.Event`
    before 2.10.
    """
    if not _LEAVES_REFERENCES or not isinstance(event, torch.cuda.Event):
        return event
    found = event.__dict__.get(_LIFETIME)
    if found is None:
        found = event.__dict__[_LIFETIME] = _Lifetime()
    return found
