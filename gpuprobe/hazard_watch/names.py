"""What the program calls the streams and tensors of a race: looked up in its frames when it is
found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import torch

from gpuprobe.code_origin import name_of
from gpuprobe.hazard_watch.places import is_users
from gpuprobe.hazards.accesses import Context, Scope
from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import storage_key

_MOST_FRAMES: Final = 8
_MOST_NAMES: Final = 400
"""Variables of a frame, and attributes of an object, that are looked at."""


class Blocks:
    """The ``with torch.cuda.stream(...)`` blocks that are open, as (stream, stream before)."""

    def __init__(self) -> None:
        self.open: list[tuple[tuple[int, int], tuple[int, int]]] = []

    def install(self, patches: Patches) -> None:
        """Follow them until ``patches`` are undone."""
        kind: Any = torch.cuda.StreamContext
        enter, leave = kind.__enter__, kind.__exit__
        opened = self.open

        def __enter__(context: Any) -> Any:
            before = None
            if context.stream is not None:
                before = torch.cuda.current_stream(context.stream.device_index)
            result = enter(context)
            if before is not None:
                opened.append((_key(context.stream), _key(before)))
            return result

        def __exit__(context: Any, *error: Any) -> Any:
            if context.stream is not None and opened:
                opened.pop()
            return leave(context, *error)

        patches.set(kind, "__enter__", __enter__)
        patches.set(kind, "__exit__", __exit__)


def _key(stream: Any) -> tuple[int, int]:
    return int(stream.device_index), int(stream.cuda_stream)


def context_at_hand(source: Any, actors: Mapping[tuple[int, int], int], address: int) -> Context:
    """The program's frames, innermost first, with what they call the streams in ``actors`` and
    the tensors whose memory begins at ``address``.
    """
    scopes: list[Scope] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(scopes) < _MOST_FRAMES:
        code = frame.f_code
        if is_users(code.co_filename):
            scopes.append(_scope(frame, source, actors, address))
        frame = frame.f_back
    machine = source.machine
    current = tuple(
        actors[key] for key in actors if key[0] >= 0 and machine.stream(key[0]) == key[1]
    )
    blocks = tuple(
        (actors.get(stream, -1), actors.get(before, -1))
        for stream, before in reversed(source.blocks.open)
    )
    return Context(tuple(scopes), current, blocks)


def _scope(frame: Any, source: Any, actors: Mapping[tuple[int, int], int], address: int) -> Scope:
    streams: dict[int, list[str]] = {}
    tensors: list[str] = []
    for name, value in _variables(frame):
        if isinstance(value, torch.Tensor):
            if len(tensors) < 4 and _begins_at(source, value, address):
                tensors.append(name)
        elif isinstance(value, torch.cuda.Stream):
            actor = actors.get(_key(value))
            if actor is not None:
                streams.setdefault(actor, []).append(name)
    return Scope(
        name_of(frame.f_code.co_filename),
        frame.f_lineno or frame.f_code.co_firstlineno,
        frame.f_code,
        {actor: tuple(names) for actor, names in streams.items()},
        tuple(tensors),
    )


def _variables(frame: Any) -> Iterator[tuple[str, Any]]:
    """Local variables, attributes of local objects one level deep, then global variables."""
    local = frame.f_locals
    for name, value in list(local.items())[:_MOST_NAMES]:
        yield name, value
    for name, value in list(local.items())[:_MOST_NAMES]:
        if isinstance(value, (torch.Tensor, ModuleType, type)) or not name.isidentifier():
            continue
        attributes = _attributes(value)
        if attributes:
            for attribute, part in list(attributes.items())[:_MOST_NAMES]:
                if isinstance(attribute, str) and attribute.isidentifier():
                    yield f"{name}.{attribute}", part
    if frame.f_globals is not local:
        for name, value in list(frame.f_globals.items())[:_MOST_NAMES]:
            yield name, value


def _attributes(value: Any) -> dict[Any, Any]:
    """What an object has of its own, without running any code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _begins_at(source: Any, tensor: torch.Tensor, address: int) -> bool:
    try:
        tag = source.machine.tags.get(storage_key(tensor))
        if tag is None:
            found = source._touch(tensor) if tensor.is_cuda else None
            return found is not None and found[0] == address
        return bool(source._address(tag) == address)
    except (NotImplementedError, RuntimeError, AttributeError):
        return False


def names_at_hand(source: Any, addresses: list[int]) -> tuple[str, ...]:
    """What the innermost frame of the program calls the tensors at ``addresses``, of those that
    the line at hand names.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ()
    return tuple(
        name
        for name, value in _variables(frame)
        if isinstance(value, torch.Tensor)
        and any(_begins_at(source, value, address) for address in addresses)
    )
