"""Values that are computed when they are asked for, of kernels that take long on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from gpuprobe.virtual.machine import Machine, Tag
from gpuprobe.virtual.reads import known

_MOST: Final = 64 << 20
"""Bytes of arguments that are kept for one launch: whole numbers that decide are few."""

_values: Any = Tag.values  # the slot


class _Waiting(Tag):
    """A tag that holds its `_Work` in the place of values."""

    __slots__ = ()

    @property
    def values(self) -> Any:
        _values.__get__(self).do()
        return _values.__get__(self)

    @values.setter
    def values(self, found: Any) -> None:
        self.__class__ = Tag  # type: ignore[assignment]
        _values.__set__(self, found)


class _Work:
    """One launch, with its arguments as they were then."""

    def __init__(
        self, machine: Machine, run: Callable[[list[Any]], bool], given: list[Any]
    ) -> None:
        self._machine = machine
        self._run = run
        self._given = given
        self.written: dict[int, Any] = {}  # what is kept for a storage, by its tag's key

    def do(self) -> None:
        with self._machine.dispatch.below():
            done = self._run(self._given)
        for key, storage in self.written.items():
            tag = self._machine.tags.get(key)
            if tag is not None and type(tag) is _Waiting and _values.__get__(tag) is self:
                tag.values = storage if done else None


def has_values(machine: Machine, tensor: Any) -> bool:
    """As `known.has_values`, of which nothing is computed for it."""
    tag = machine.tag_of(tensor)
    return type(tag) is _Waiting or known.has_values(machine, tensor)


def compute(
    machine: Machine,
    arguments: Sequence[Any],
    written: Sequence[torch.Tensor],
    run: Callable[[list[Any]], bool],
) -> bool:
    """Have ``run`` compute what ``written`` tensors will contain, when that is asked for; it is
    given the arguments, with CPU tensors in the place of tensors without memory, and returns
    whether it could. Returns whether all arguments are known, and few enough to be kept.
    """
    if not known.all_known(machine, list(arguments)):
        return False
    copies: dict[int, Any] = {}
    given: list[Any] = []
    size = 0
    with machine.dispatch.below():
        for item in arguments:
            if not isinstance(item, torch.Tensor):
                given.append(item)
                continue
            tag = machine.tag_of(item)
            if tag is None or tag.values is None:  # on the host, with memory
                return False
            size += tag.nbytes
            if size > _MOST:
                return False
            if tag.key not in copies:
                copies[tag.key] = tag.values.clone()
            given.append(known.window(item, copies[tag.key]))
    work = _Work(machine, run, given)
    for tensor in written:
        tag = machine.tag_of(tensor)
        assert tag is not None  # all arguments have one
        work.written[tag.key] = copies[tag.key]
        tag.values = work
        tag.__class__ = _Waiting
    return True
