"""The program's part of a race: its lines, and its names for streams and tensors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import FrameType, ModuleType
from typing import Any, Final, Protocol

import torch

from gpuprobe.frame_variables import variables
from gpuprobe.hazard_watch.device import Cuda
from gpuprobe.hazards.accesses import RaceContext, Scope
from gpuprobe.hazards.events import CodePosition, Site
from gpuprobe.model.place import Place
from gpuprobe.patching import Patches
from gpuprobe.torch_support.compiled_code import lines_of
from gpuprobe.user_frames import innermost, line_of, name_of

_MOST_FRAMES: Final = 8
_MOST_NAMES: Final = 400
"""Variables of a frame, and attributes of an object, that are checked."""


_MOST_SITES: Final = 4096
_sites: dict[tuple[int, int], CodePosition] = {}  # by id of the code, and instruction: one of each

backward_frames: Final[list[FrameType]] = []
"""The frames that called the backward passes in progress. On CUDA the autograd engine has separate
threads, without any frame of the program.
"""


def program_frame() -> FrameType | None:
    """The innermost frame of the program; in a thread without one, of the thread that called the
    backward pass. None if neither has one.
    """
    frame = innermost(sys._getframe(1))
    return innermost(backward_frames[-1]) if frame is None and backward_frames else frame


def site_at_hand(callers: int = 1) -> CodePosition | None:
    """The position of the innermost frame of the program, resolved by `place`. In a thread without
    one, the place that called the backward pass. ``callers``: the frames above this one that are
    gpuprobe's in any case. They are not looked at: Python makes an object of each that is.
    """
    frame = innermost(sys._getframe(callers))
    if frame is None and backward_frames:
        frame = innermost(backward_frames[-1])
    if frame is None:
        return None
    code = frame.f_code
    key = id(code), frame.f_lasti
    site = _sites.get(key)
    if site is None:  # whose code is alive, so that no other has its id
        if len(_sites) >= _MOST_SITES:
            _sites.clear()
        site = _sites[key] = CodePosition(code, key[1])
    return site


def place(site: Site) -> Place | None:
    """The file and line of a site."""
    if not isinstance(site, CodePosition):
        return None
    code, instruction = site
    line = line_of(code, instruction)
    if origins := lines_of(code.co_filename, line):  # in code that torch's compiler wrote
        return Place(*origins[0])
    name = getattr(code, "co_qualname", code.co_name)
    return Place(name_of(code.co_filename), line, name)


class Blocks:
    """The open ``with torch.cuda.stream(...)`` blocks, as (stream, stream before)."""

    def __init__(self) -> None:
        self.open: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self._here = threading.local()

    def outside(self, device: int) -> int | None:
        """The stream of a device that was current before the outermost open block of this thread;
        None without one.
        """
        opened = getattr(self._here, "before", ())
        return next((number for index, number in opened if index == device), None)

    def install(self, patches: Patches) -> None:
        """Track them until ``patches`` are undone."""
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
    """The places where the program created its streams, by device and number: the last one of each,
    as torch allocates streams in turn.
    """

    def __init__(self) -> None:
        self.sites: dict[tuple[int, int], Site] = {}
        self.made: Callable[[torch.cuda.Stream], None] = lambda stream: None
        """Called with each stream that is created."""

    def install(self, patches: Patches) -> None:
        """Record them until ``patches`` are undone."""
        kind: Any = torch.cuda.Stream
        original, sites = kind.__new__, self.sites

        def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(cls, *args, **kwargs)
            self.made(made)
            # With an id it is another object for an existing stream, such as the current one.
            if "stream_id" not in kwargs or issubclass(cls, torch.cuda.ExternalStream):
                sites[_key(made)] = site_at_hand()
            return made

        patches.set(kind, "__new__", staticmethod(make))


def _on_cuda(stream: torch.Stream) -> bool:
    return bool(stream.device.type == "cuda")


def _key(stream: torch.Stream) -> tuple[int, int]:
    if not hasattr(stream, "cuda_stream"):  # a ``torch.Stream``, which has an id and no handle
        stream = torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
    return int(stream.device_index), int(stream.cuda_stream)


class TensorSource(Protocol):
    """The part of an event source that knows tensors and streams."""

    machine: Cuda
    blocks: Blocks
    creations: Creations

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """The address of a tensor's block; None if it has none."""


def context_at_hand(
    source: TensorSource, actors: Mapping[tuple[int, int], int], address: int
) -> RaceContext:
    """The program's frames, innermost first, with their names for the streams in ``actors`` and for
    the tensors whose memory begins at ``address``.
    """
    scopes: list[Scope] = []
    frame = program_frame()
    while frame is not None and len(scopes) < _MOST_FRAMES:
        scopes.append(_scope(frame, source, actors, address))
        frame = innermost(frame.f_back)
    current = tuple(
        actor
        for (device, number), actor in actors.items()
        if device >= 0 and source.machine.stream(device) == number
    )
    blocks = tuple(
        (actors.get(stream, -1), actors.get(before, -1))
        for stream, before in reversed(source.blocks.open)
    )
    return RaceContext(tuple(scopes), current, blocks, created_streams(source, actors))


def created_streams(source: TensorSource, actors: Mapping[tuple[int, int], int]) -> dict[int, Site]:
    """The known places where the streams of ``actors`` were created."""
    sites = source.creations.sites
    return {actor: sites[key] for key, actor in actors.items() if key in sites}


def _scope(
    frame: FrameType, source: TensorSource, actors: Mapping[tuple[int, int], int], address: int
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


def _variables(frame: FrameType) -> Iterator[tuple[str, object]]:
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


def _attributes(value: object) -> dict[object, object]:
    """The attributes in an object's dict, read without running any code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def names_at_hand(source: TensorSource, addresses: list[int]) -> tuple[str, ...]:
    """Names in the innermost frame of the program for the tensors at ``addresses``."""
    frame = program_frame()
    if frame is None:
        return ()
    return tuple(
        name
        for name, value in _variables(frame)
        if issubclass(type(value), torch.Tensor) and source.block_of(value) in addresses
    )
