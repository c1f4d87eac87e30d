"""Which containers of a program hold tensors: what keeps memory that grows.

The variables of functions that run, or that a failure ended, and the globals of the program are
searched; nothing of the program is called. What a library, a generator or C code keeps is not
found.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, Final

import torch

from gpuprobe.analysis.trace.frames import is_user_frame
from gpuprobe.frame_variables import variables
from gpuprobe.model.run.session import Holder
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import Bytes, Count
from gpuprobe.torch_support.tensors import storage_key

MOST_HOLDERS: Final = 5
_LEAST: Final = 3
"""The elements with tensors from which a container is one that grows."""
_MOST_OBJECTS: Final = 20_000
_MOST_ELEMENTS: Final = 50_000  # in all containers together
_DEPTH: Final = 4  # of containers and instances within one another
_NESTED: Final = 3  # of containers within an element
_MOST_NESTED: Final = 20  # of each of these containers

_CONTAINERS: Final = (list, tuple, set, frozenset, deque, dict)
_LEAVES: Final = (str, bytes, int, float, complex, type(None), type, FunctionType, ModuleType)


def holders(
    error: BaseException | None = None, running: FrameType | None = None
) -> tuple[Holder, ...]:
    """The containers of the program that hold the most: those with autograd graphs first, which
    keep more than their tensors. ``error``: what ended the program; ``running``: the innermost
    frame of the calling thread to search, while it runs.
    """
    search = _Search()
    found: list[Holder] = []
    for function, names in _scopes(error, running):
        found += search.holders(function, names)
    return _most(found)


def with_earlier(found: tuple[Holder, ...], before: tuple[Holder, ...]) -> tuple[Holder, ...]:
    """Those at the end of the program, and those that functions had which have returned."""
    known = {(one.name, one.function) for one in found}
    returned = [one for one in before if one.function and (one.name, one.function) not in known]
    return _most([*found, *returned])


def _most(found: list[Holder]) -> tuple[Holder, ...]:
    found.sort(key=lambda one: (not one.graphs, -one.bytes, -one.tensors, one.name))
    return tuple(found[:MOST_HOLDERS])


def _scopes(
    error: BaseException | None, running: FrameType | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each function of the program that runs, or that the failure ended, and its
    variables; then the globals of the program, with "" for its name.
    """
    frames = []
    at: TracebackType | None = None if error is None else error.__traceback__
    while at is not None:
        frames.append(at.tb_frame)
        at = at.tb_next
    while running is not None:
        frames.append(running)
        running = running.f_back
    for frame in frames:
        code = frame.f_code
        place = Frame(code.co_filename, code.co_firstlineno, code.co_name)
        if code.co_name != "<module>" and is_user_frame(place):
            yield code.co_name, variables(frame)
    main = sys.modules.get("__main__")
    if main is not None:
        yield "", dict(vars(main))


class _Search:
    """Searches each object once, and no more than a limited number of objects and elements."""

    def __init__(self) -> None:
        self._visited: set[int] = set()
        self._elements = _MOST_ELEMENTS

    def holders(self, function: str, names: dict[str, Any]) -> Iterator[Holder]:
        """Those among the variables of a function, and within them."""
        waiting = deque((name, one, 0) for name, one in names.items() if not name.startswith("__"))
        while waiting and len(self._visited) < _MOST_OBJECTS and self._elements > 0:
            name, value, depth = waiting.popleft()
            leaf = _is(value, (*_LEAVES, torch.Tensor, torch.optim.Optimizer))
            if leaf or id(value) in self._visited:
                continue
            self._visited.add(id(value))
            if _is(value, _CONTAINERS):
                holder = self._holder(name, function, value)
                if holder is not None:
                    yield holder
                    continue
            if depth < _DEPTH:
                waiting.extend((inner, each, depth + 1) for inner, each in _inside(name, value))

    def _holder(self, name: str, function: str, container: Any) -> Holder | None:
        """The container, if several of its elements hold tensors other than parameters."""
        items = tensors = graphs = 0
        storages: dict[int, int] = {}
        for element in _first(container, self._elements):
            self._elements -= 1
            inner = [one for one in _tensors(element) if not _is(one, (torch.nn.Parameter,))]
            items += bool(inner)
            for tensor in inner:
                tensors += 1
                graphs += tensor.grad_fn is not None
                if key := storage_key(tensor):
                    storages[key] = tensor.untyped_storage().nbytes()
        if items < _LEAST:
            return None
        return Holder(
            name=name,
            kind=type(container).__name__,
            function=function,
            tensors=Count(tensors),
            graphs=Count(graphs),
            bytes=Bytes(sum(storages.values())),
        )


def _is(value: object, kinds: tuple[type, ...]) -> bool:
    """`isinstance`, but for ``__class__``, which a proxy computes."""
    return issubclass(type(value), kinds)


def _first(container: Any, most: int) -> list[Any]:
    """The first elements, or values, by the methods of the built-in type. None of a dict or set
    that another thread changes.
    """
    kind: Any = next(each for each in _CONTAINERS if _is(container, (each,)))
    values = dict.values(container) if kind is dict else kind.__iter__(container)
    try:
        return list(itertools.islice(values, most))
    except RuntimeError:
        return []


def _inside(name: str, value: Any) -> Iterator[tuple[str, object]]:
    """What an object consists of, with the expressions for it."""
    if _is(value, (dict,)):
        keys = list(itertools.islice(dict.__iter__(value), _MOST_OBJECTS))
        for key, each in zip(keys, _first(value, _MOST_OBJECTS), strict=False):
            yield f"{name}[{key!r}]" if type(key) in (str, int) else f"{name}[…]", each
    elif _is(value, _CONTAINERS):
        for at, each in enumerate(_first(value, _MOST_OBJECTS)):
            yield f"{name}[{at}]", each
    else:
        for key, each in list(_attributes(value).items()):
            if key == "_modules" and type(each) is dict:
                yield from ((f"{name}.{child}", module) for child, module in each.items())
            elif key not in ("_parameters", "_buffers"):
                yield f"{name}.{key}", each


def _tensors(element: object, depth: int = _NESTED) -> Iterator[torch.Tensor]:
    """The tensors of an element: itself, in containers, or in attributes of an instance."""
    if _is(element, (torch.Tensor,)):
        yield element
    elif depth and not _is(element, (torch.nn.Module, *_LEAVES)):
        inner: list[Any] = []
        if _is(element, _CONTAINERS):
            inner = _first(element, _MOST_NESTED)
        elif depth == _NESTED:
            inner = _first(_attributes(element), _MOST_NESTED)
        for each in inner:
            yield from _tensors(each, depth - 1)


def _attributes(value: object) -> dict[str, Any]:
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # slots, or none
        return {}
    return attributes if type(attributes) is dict else {}
