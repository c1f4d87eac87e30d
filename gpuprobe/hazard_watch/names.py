"""What the program calls the streams and tensors of a race: looked up in its frames when it is
found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import ModuleType
from typing import Any, Final, Protocol

import torch

from gpuprobe.code_origin import name_of
from gpuprobe.frame_variables import variables
from gpuprobe.hazard_watch.places import is_users, program_frame, site_at_hand
from gpuprobe.hazards.accesses import RaceContext, Scope
from gpuprobe.patching import Patches

_MOST_FRAMES: Final = 8
_MOST_NAMES: Final = 400
"""Variables of a frame, and attributes of an object, that are looked at."""


class Blocks:
    """The ``with torch.cuda.stream(...)`` blocks that are open, as (stream, stream before)."""

    def __init__(self) -> None:
        self.open: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self._here = threading.local()

    def outside(self, device: int) -> int | None:
        """The stream of a device that was current before the outermost block that is open in this
        thread; None where none is.
        """
        opened = getattr(self._here, "before", ())
        return next((number for index, number in opened if index == device), None)

    def install(self, patches: Patches) -> None:
        """Follow them until ``patches`` are undone."""
        kind: Any = torch.cuda.StreamContext
        enter, leave = kind.__enter__, kind.__exit__
        opened, here = self.open, self._here

        def __enter__(context: Any) -> Any:
            before = None
            if context.stream is not None:
                before = torch.cuda.current_stream(context.stream.device_index)
            result = enter(context)
            if before is not None:
                opened.append((_key(context.stream), _key(before)))
                here.before = (*getattr(here, "before", ()), _key(before))
            return result

        def __exit__(context: Any, *error: Any) -> Any:
            if context.stream is not None and opened:
                opened.pop()
                here.before = getattr(here, "before", ())[:-1]
            return leave(context, *error)

        patches.set(kind, "__enter__", __enter__)
        patches.set(kind, "__exit__", __exit__)


class Creations:
    """The places where the program made its streams, by device and number: the last one of each,
    as torch gives streams out in turn.
    """

    def __init__(self) -> None:
        self.sites: dict[tuple[int, int], Any] = {}
        self.made: Callable[[Any], None] = lambda stream: None
        """Is given each stream that is made."""

    def install(self, patches: Patches) -> None:
        """Note them until ``patches`` are undone."""
        kind: Any = torch.cuda.Stream
        original, sites = kind.__new__, self.sites

        def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(cls, *args, **kwargs)
            self.made(made)
            # With an id it is another object for a stream that there is: the current one, say.
            if "stream_id" not in kwargs or issubclass(cls, torch.cuda.ExternalStream):
                sites[_key(made)] = site_at_hand()
            return made

        patches.set(kind, "__new__", staticmethod(make))


def _on_cuda(stream: Any) -> bool:
    return bool(stream.device.type == "cuda")


def _key(stream: Any) -> tuple[int, int]:
    if not hasattr(stream, "cuda_stream"):  # a ``torch.Stream``, which has an id and no handle
        stream = torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
    return int(stream.device_index), int(stream.cuda_stream)


class TensorSource(Protocol):
    """What is queried about tensors and streams: an event source."""

    blocks: Blocks
    creations: Creations

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """The address of the block that a tensor lies in; None where it has none."""

    def current_stream(self, device: int) -> int:
        """The number of the stream that work of this thread on a device goes to."""


def context_at_hand(
    source: TensorSource, actors: Mapping[tuple[int, int], int], address: int
) -> RaceContext:
    """The program's frames, innermost first, with what they call the streams in ``actors`` and
    the tensors whose memory begins at ``address``.
    """
    scopes: list[Scope] = []
    frame: Any = program_frame()
    while frame is not None and len(scopes) < _MOST_FRAMES:
        code = frame.f_code
        if is_users(code.co_filename):
            scopes.append(_scope(frame, source, actors, address))
        frame = frame.f_back
    current = tuple(
        actors[key] for key in actors if key[0] >= 0 and source.current_stream(key[0]) == key[1]
    )
    blocks = tuple(
        (actors.get(stream, -1), actors.get(before, -1))
        for stream, before in reversed(source.blocks.open)
    )
    return RaceContext(tuple(scopes), current, blocks, created_streams(source, actors))


def created_streams(source: TensorSource, actors: Mapping[tuple[int, int], int]) -> dict[int, Any]:
    """The places where the streams of ``actors`` were made, as far as they are known."""
    sites = source.creations.sites
    return {actor: sites[key] for key, actor in actors.items() if key in sites}


def _scope(
    frame: Any, source: TensorSource, actors: Mapping[tuple[int, int], int], address: int
) -> Scope:
    streams: dict[int, list[str]] = {}
    tensors: list[str] = []
    for name, value in _variables(frame):
        if issubclass(type(value), torch.Tensor):
            if len(tensors) < 4 and source.block_of(value) == address:
                tensors.append(name)
        elif issubclass(type(value), (torch.cuda.Stream, torch.Stream)) and _on_cuda(value):
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
    found = variables(frame)
    local = list(islice(found.items(), _MOST_NAMES))
    yield from local
    for name, value in local:
        if issubclass(type(value), (torch.Tensor, ModuleType, type)) or not name.isidentifier():
            continue
        attributes = _attributes(value)
        if attributes:
            for attribute, part in list(attributes.items())[:_MOST_NAMES]:
                if isinstance(attribute, str) and attribute.isidentifier():
                    yield f"{name}.{attribute}", part
    for name, value in list(islice(frame.f_globals.items(), _MOST_NAMES)):
        if found.get(name) is not value:  # in a module they are the local ones
            yield name, value


def _attributes(value: Any) -> dict[Any, Any]:
    """What an object has of its own, without running any code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def names_at_hand(source: TensorSource, addresses: list[int]) -> tuple[str, ...]:
    """What the innermost frame of the program calls the tensors at ``addresses``, of those that
    the line at hand names.
    """
    frame = program_frame()
    if frame is None:
        return ()
    return tuple(
        name
        for name, value in _variables(frame)
        if issubclass(type(value), torch.Tensor) and source.block_of(value) in addresses
    )
