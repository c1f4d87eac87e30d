"""Frozen dataclasses that are cheap to define.

``dataclasses.dataclass(frozen=True)`` compiles six methods for every class, 0.45 ms each time;
the thirty classes of `gpuprobe.model.machine.devices` would cost a fifth of the whole running
time of ``gpuprobe info``. `record` makes dataclasses (``fields``, ``replace`` and
``is_dataclass`` work) whose methods are shared instead. Creating an instance takes a few
microseconds more: use the real thing for what is created by the thousand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["record"]

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, slots: bool = False) -> Callable[[type[T]], type[T]]:
        """As ``dataclass(frozen=True)``; ``slots`` is accepted for the type checker and ignored."""
        if not frozen:
            raise TypeError("a record is frozen")
        return _made

    def _made(cls: type[T]) -> type[T]:
        # A dataclass that is not frozen refuses bases that are: for it, those are not either.
        bases = [base for base in cls.__mro__[1:] if "_record_names" in base.__dict__]
        for base in bases:
            base.__dataclass_params__.frozen = False
        if not cls.__doc__:  # else dataclass() makes one of the signature, in 0.3 ms
            cls.__doc__ = cls.__name__
        made = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
        names = []
        defaults = []
        for f in made.__dataclass_fields__.values():
            names.append(f.name)
            if f.default is not dataclasses.MISSING:
                defaults.append((f.name, f.default, None))
            elif f.default_factory is not dataclasses.MISSING:
                defaults.append((f.name, None, f.default_factory))
        made._record_names = tuple(names)
        made._record_name_set = frozenset(names)
        made._record_defaults = tuple(defaults)
        for method in (__init__, __repr__, __eq__, __hash__, __setattr__, __delattr__):
            if method.__name__ not in cls.__dict__:
                setattr(made, method.__name__, method)
        # `dataclasses.replace` and readers of the class rely on it.
        for one in (made, *bases):
            one.__dataclass_params__.frozen = True
        return made


def __init__(self: Any, *args: object, **values: object) -> None:
    # A report makes thousands of these: no loop over the names in Python unless one is missing.
    names = self._record_names
    state = self.__dict__
    if args:
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {len(names)} values, not {len(args)}")
        state.update(zip(names, args, strict=False))
        if values and not values.keys().isdisjoint(state):
            name = next(name for name in state if name in values)
            raise TypeError(f"{type(self).__name__} got two values for {name!r}")
    state.update(values)
    if len(state) < len(names):
        for name, default, factory in self._record_defaults:
            if name not in state:
                state[name] = default if factory is None else factory()
    if state.keys() != self._record_name_set:
        wrong = sorted(set(values) - set(names)) or sorted(set(names) - set(state))
        raise TypeError(f"{type(self).__name__}: missing or unknown: {', '.join(wrong)}")


def __repr__(self: Any) -> str:
    inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._record_names)
    return f"{type(self).__qualname__}({inside})"


def __eq__(self: object, other: object) -> object:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self is other or self.__dict__ == other.__dict__


def __hash__(self: Any) -> int:
    return hash(tuple(getattr(self, name) for name in self._record_names))


def __setattr__(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
