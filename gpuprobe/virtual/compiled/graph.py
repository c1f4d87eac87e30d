"""One graph that Inductor compiled, as it runs on a virtual device.

Without values Inductor's wrapper is the run: it allocates, frees and calls libraries as it would
on CUDA. With values it runs on stand-ins, tensors without values that lie where the program's
lie, and the graph that it was made from is run on the host, out of the allocator's sight; each
result then takes over the block of the wrapper's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpuprobe.torch_support.tensors import is_sparse, of_parts, parts
from gpuprobe.virtual.compiled.values import Values
from gpuprobe.virtual.lowering.functions import uncharged
from gpuprobe.virtual.machine import Machine

_META = torch.device("meta")


class Graph:
    """What AOTAutograd calls, forward or backward. ``wrapper`` is what Inductor made of the graph:
    it takes a list and empties it.
    """

    _boxed_call = True

    def __init__(
        self, machine: Machine, values: Values | None, wrapper: Callable[..., Any]
    ) -> None:
        self._machine = machine
        self._values = values
        self._wrapper = wrapper

    def __call__(self, given: list[Any]) -> Any:
        if self._values is None:
            return self._wrapper(given)
        machine = self._machine
        place = max((_place(machine, item) for item in given), default=-1)
        if place < 0:
            place = self._values.place
        capture = machine.capture
        if capture is not None and place >= 0:
            with uncharged(machine):
                for tensor in self._values.written(given):
                    capture.about_to_write(tensor)
            captured = list(given)
        values = self._values.run(given, place)
        if place < 0:  # a graph of the host's: nothing is charged
            given.clear()
            return values
        stand_ins, theirs = self._stand_ins(given)
        given.clear()
        with standing_in(machine):
            made = self._wrapper(stand_ins)
        results = _Results(machine, theirs, place)
        pairs = zip(made, values, strict=True)
        found = tuple(results.of(new, value) for new, value in pairs)
        if capture is not None:
            capture.note(self._values.compute, captured, {}, found)
        return found

    def _stand_ins(self, given: list[Any]) -> tuple[list[Any], dict[int, Any]]:
        """Tensors without values in the place of a device's. Each of their storages keeps the one
        that it stands for alive. And those storages.
        """
        machine = self._machine
        stand_for: dict[int, Any] = {}
        made = []
        for value in given:
            place = _place(machine, value)
            if place < 0:
                made.append(value)
                continue
            storage = value.untyped_storage()
            other = stand_for.get(storage._cdata)
            if other is None:
                other = torch.UntypedStorage(storage.nbytes(), device="meta")
                machine.track(other, place, charged=False).held = storage
                stand_for[storage._cdata] = other
            made.append(_view(machine, other, value, _META))
        return made, dict.fromkeys(stand_for)


class _Results:
    """The results of one run: values of the host's, in memory that the wrapper has allocated."""

    def __init__(self, machine: Machine, given: dict[int, Any], place: int) -> None:
        self._machine = machine
        self._given = given
        self._place = place
        self._storages: dict[int, Any] = {}

    def of(self, made: Any, value: Any) -> Any:
        """One result. ``made`` is the wrapper's, ``value`` the same computed."""
        machine = self._machine
        if not isinstance(value, torch.Tensor) or not isinstance(made, torch.Tensor):
            return value
        if is_sparse(value):
            pieces = zip(parts(made), parts(value), strict=True)
            own = [self.of(*pair) for pair in pieces]
            with uncharged(machine), torch.no_grad():
                return of_parts(value, own, torch.device("cpu"))
        tag = machine.tag_of(made)
        if tag is None or tag.place < 0 or value.untyped_storage()._cdata in self._given:
            return value  # the host's, or an argument: it is where it was
        storage = made.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is None:
            found = self._storages[storage._cdata] = self._memory(made, value)
            source = tag if tag.held is None else machine.tags.get(tag.held._cdata)
            machine.track(found, self._place, instead=source)
            if found is value.untyped_storage():
                return value
        result = _view(machine, found, made, torch.device("cpu"))
        with uncharged(machine), torch.no_grad():
            return result.copy_(value)

    def _memory(self, made: Any, value: Any) -> Any:
        """The value's own storage where it is laid out as the wrapper's, else a new one."""
        storage = value.untyped_storage()
        if (
            storage.nbytes() == made.untyped_storage().nbytes()
            and storage._cdata not in self._machine.tags
            and value.stride() == made.stride()
            and value.storage_offset() == made.storage_offset()
        ):
            return storage
        return torch.UntypedStorage(made.untyped_storage().nbytes())


@contextmanager
def standing_in(machine: Machine) -> Iterator[None]:
    """What this thread runs has no values."""
    local = machine.local
    before, local.standing_in = local.standing_in, True
    try:
        yield
    finally:
        local.standing_in = before


def _place(machine: Machine, value: Any) -> int:
    return machine.place_of(value) if isinstance(value, torch.Tensor) else -1


def _view(machine: Machine, storage: Any, like: Any, device: torch.device) -> Any:
    """A tensor in ``storage``, laid out like another."""
    with uncharged(machine):
        made = torch.ops.aten.empty.memory_format([0], dtype=like.dtype, device=device)
        return made.set_(storage, like.storage_offset(), like.shape, like.stride())
