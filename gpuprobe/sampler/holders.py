"""Which containers of a program hold tensors: what keeps memory that grows.

The variables of functions that run, or that a failure ended, and the globals of the program's
modules are searched, with attributes of instances, classes and functions, closures, defaults of
parameters, hooks and `functools.cache` within them; nothing of the program is called. What a
library, a generator or C code keeps is not found.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import CellType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
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
_MOST_OBJECTS: Final = 20_000  # from the program's functions and script, and from its modules
_MOST_ELEMENTS: Final = 50_000  # in all containers together, for each of these two
_DEPTH: Final = 8  # of containers and instances within one another
_NESTED: Final = 3  # of containers within an element
_MOST_NESTED: Final = 20  # of each of these containers

_CONTAINERS: Final = (list, tuple, set, frozenset, deque, dict)
_LEAVES: Final = (str, bytes, int, float, complex, type(None), ModuleType)
_CACHED: Final = type(functools.cache(lambda: None))


def holders(
    error: BaseException | None = None, running: FrameType | None = None
) -> tuple[Holder, ...]:
    """The containers of the program that hold the most: those with autograd graphs first, which
    keep more than their tensors. ``error``: what ended the program; ``running``: the innermost
    frame of the calling thread to search, while it runs.
    """
    search = _Search()
    found: list[Holder] = []
    # A module with thousands of objects must not keep the search from the script's own.
    for scopes in (_script(error, running), _modules()):
        entries = [
            (name, function, one)
            for function, names in scopes
            for name, one in names.items()
            if not name.rpartition(".")[2].startswith("__")
        ]
        found.extend(search.holders(entries))
    return _most(found)


def with_earlier(found: tuple[Holder, ...], before: tuple[Holder, ...]) -> tuple[Holder, ...]:
    """Those at the end of the program, and those that functions had which have returned."""
    known = {(one.name, one.function) for one in found}
    returned = [one for one in before if one.function and (one.name, one.function) not in known]
    return _most([*found, *returned])


def _most(found: list[Holder]) -> tuple[Holder, ...]:
    found.sort(key=lambda one: (not one.graphs, -one.bytes, -one.tensors, one.name))
    return tuple(found[:MOST_HOLDERS])


_Scopes = Iterator[tuple[str, dict[str, Any]]]


def _script(error: BaseException | None, running: FrameType | None) -> _Scopes:
    """The name of each function of the program that runs, or that the failure ended, and its
    variables; then the globals of the script, with "" for its name.
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


def _modules() -> _Scopes:
    """The globals of the modules of the program that the script imports."""
    main = sys.modules.get("__main__")
    for name, module in list(sys.modules.items()):
        if module is main or name.partition(".")[0] == "gpuprobe":  # also where not installed
            continue
        if _is(module, (ModuleType,)) and _is_program_module(module):
            yield "", {f"{name}.{key}": one for key, one in list(vars(module).items())}


def _is_program_module(module: ModuleType) -> bool:
    path = vars(module).get("__file__")
    return type(path) is str and is_user_frame(Frame(path, 1, ""))


class _Search:
    """Searches each object once."""

    def __init__(self) -> None:
        self._visited: set[int] = set()
        self._elements = 0  # that may still be looked at

    def holders(self, entries: list[tuple[str, str, object]]) -> Iterator[Holder]:
        """Those among the entries (expression, function, object), and within them: of a limited
        number of objects and elements.
        """
        self._elements = _MOST_ELEMENTS
        most_objects = len(self._visited) + _MOST_OBJECTS
        # Variables come before what is within instances and functions, which may be too much.
        for name, owner, value in entries:
            if id(value) not in self._visited and (holder := self._holder(name, owner, value)):
                self._visited.add(id(value))
                yield holder
        waiting = deque((*entry, 0) for entry in entries)
        while waiting and len(self._visited) < most_objects and self._elements > 0:
            name, owner, value, depth = waiting.popleft()
            leaf = _is(value, (*_LEAVES, torch.Tensor, torch.optim.Optimizer))
            if leaf or id(value) in self._visited:
                continue
            self._visited.add(id(value))
            if holder := self._holder(name, owner, value):
                yield holder
            elif depth < _DEPTH:
                waiting.extend((*inner, depth + 1) for inner in _inside(name, owner, value))

    def _holder(self, name: str, function: str, container: Any) -> Holder | None:
        """A container, if several of its elements hold tensors other than parameters."""
        if not _is(container, _CONTAINERS):
            return None
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


_Inner = Iterator[tuple[str, str, object]]


def _inside(name: str, function: str, value: Any) -> _Inner:
    """What an object consists of: the expression for it, the function that it is a variable of,
    and itself.
    """
    kinds: tuple[tuple[type | tuple[type, ...], Callable[[str, str, Any], _Inner]], ...] = (
        (dict, _of_dict),
        (_CONTAINERS, _of_container),
        (FunctionType, _of_function),
        (MethodType, _of_method),
        (functools.partial, _of_partial),
        (_CACHED, _of_cache),
        (type, _of_class),
        (object, _of_instance),
    )
    return next(inner for kind, inner in kinds if issubclass(type(value), kind))(
        name, function, value
    )


def _of_dict(name: str, function: str, value: Any) -> _Inner:
    keys = list(itertools.islice(dict.__iter__(value), _MOST_OBJECTS))
    for key, each in zip(keys, _first(value, _MOST_OBJECTS), strict=False):
        inner = f"{name}[{key!r}]" if type(key) in (str, int) else f"{name}[…]"
        yield inner, function, each


def _of_container(name: str, function: str, value: Any) -> _Inner:
    for at, each in enumerate(_first(value, _MOST_OBJECTS)):
        yield f"{name}[{at}]", function, each


def _of_method(name: str, function: str, value: MethodType) -> _Inner:
    yield f"{name}.__self__", function, value.__self__
    yield name, function, value.__func__


def _of_partial(name: str, function: str, value: functools.partial[Any]) -> _Inner:
    for part in ("func", "args", "keywords"):
        member = functools.partial.__dict__[part]  # a subclass may have a property instead
        yield f"{name}.{part}", function, member.__get__(value)


def _of_cache(name: str, function: str, value: object) -> _Inner:
    """The dict of a `functools.cache`. One that forgets what is old is not found."""
    own = _attributes(value)
    for each in gc.get_referents(value):
        if type(each) is dict and each is not own:
            yield f"{name}, a functools.cache", function, each


def _of_instance(name: str, function: str, value: object) -> _Inner:
    for key, each in list(_attributes(value).items()):
        if key == "_modules" and type(each) is dict:
            for child, module in each.items():
                yield f"{name}.{child}", function, module
        elif key not in ("_parameters", "_buffers"):
            yield f"{name}.{key}", function, each
    for base in type.__getattribute__(type(value), "__mro__"):
        yield base.__name__, "", base


def _of_function(name: str, function: str, value: FunctionType) -> _Inner:
    """Attributes, defaults of parameters, and the variables of the function around it."""
    code = value.__code__
    if not is_user_frame(Frame(code.co_filename, code.co_firstlineno, code.co_name)):
        return
    for key, each in list(value.__dict__.items()):
        yield f"{name}.{key}", function, each
    positional = code.co_varnames[: code.co_argcount]
    defaults = value.__defaults__ or ()
    named = zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    for key, each in (*named, *(value.__kwdefaults__ or {}).items()):
        yield key, code.co_name, each
    around = value.__qualname__.removesuffix(f".<locals>.{value.__name__}").rpartition(".")[2]
    for key, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        filled = _is(cell, (CellType,)) and gc.get_referents(cell)
        if filled:
            yield key, around, filled[0]


def _of_class(_name: str, _function: str, kind: type) -> _Inner:
    """The attributes of a class of the program."""
    module = sys.modules.get(str(type.__getattribute__(kind, "__module__")))
    main = module is sys.modules.get("__main__")
    if main or (module is not None and _is_program_module(module)):
        for key, each in list(type.__getattribute__(kind, "__dict__").items()):
            if not key.startswith("__"):
                yield f"{kind.__name__}.{key}", "", each


def _tensors(element: object, depth: int = _NESTED) -> Iterator[torch.Tensor]:
    """The tensors of an element: itself, in containers, or in attributes of an instance."""
    if _is(element, (torch.Tensor,)):
        yield element
    elif depth and not _is(element, (torch.nn.Module, type, FunctionType, *_LEAVES)):
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
