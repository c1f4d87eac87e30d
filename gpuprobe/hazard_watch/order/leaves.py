"""Gradients that a backward pass leaves on other streams than the one it was called on.

Gradients must be used on the stream that was current where backward was called, or after a wait
for it, whichever stream they were written on (torch's notes on CUDA semantics: "Stream semantics
of backward passes"). At its end that stream waits for those of the leaves, which torch reports on
CUDA (``exec_post_processing`` in ``torch/csrc/autograd/engine.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from gpuprobe.hazards.footprint import Footprint

_ACCUMULATING: Final = 1 << 63
"""Sequence numbers from here on are those of nodes that accumulate gradients (``UINT64_MAX``)."""

Stream = tuple[int, int]
"""Device and number."""


class Written(NamedTuple):
    """Memory that a node wrote. ``block``: the one at that address then."""

    where: Footprint
    block: object
    stream: Stream


class LeafGradients:
    """One call of backward. ``callers``: the streams that were current there, by device."""

    def __init__(self, callers: dict[int, int]) -> None:
        self.callers = callers
        self._written: dict[int, Written] = {}  # by address
        self._waited: set[Stream] = set()  # that the callers' waited for since the last launch

    def launched(self, stream: Stream) -> bool:
        """A node launches on a stream. Whether that is another one than the caller's."""
        self._waited.clear()
        return self.callers.get(stream[0]) != stream[1]

    def wrote(self, address: int, written: Written) -> None:
        """A node wrote memory on another stream than the caller's."""
        self._written[address] = written

    def waited(self, waiter: Stream, source: Stream) -> None:
        """One stream waits for another."""
        if self.callers.get(waiter[0]) == waiter[1]:
            self._waited.add(source)

    @property
    def leaves(self) -> dict[int, Written]:
        """When backward has returned: the memory written on streams of leaves, by address."""
        return {
            address: one for address, one in self._written.items() if one.stream in self._waited
        }


def gradients(roots: Iterable[Any], result: Any) -> Iterator[Any]:
    """The tensors in which a backward pass leaves gradients: ``result``, what it returned, or the
    gradients of the leaves of ``roots``.
    """
    if result:
        yield from (tensor for tensor in result if tensor is not None)
        return
    seen = set()
    todo = []
    for root in roots:
        node = root.grad_fn if hasattr(root, "grad_fn") else root[0]
        if node is not None:
            todo.append(node)
        elif root.grad is not None:
            yield root.grad
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() >= _ACCUMULATING:
            variable = getattr(node, "variable", None)
            if variable is not None and variable.grad is not None:
                yield variable.grad
        todo += [following for following, _ in node.next_functions if following is not None]
