"""The names of the steps from one object to another: attributes, elements, variables.

Nothing of the program is called, and no property is read: names come from dicts, slots and the
members of built-in types.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CellType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, Final, TypeAlias

import torch

from gpuprobe.frame_variables import variables
from gpuprobe.model.run.holders import HeldBy, HolderRoot

CACHED: Final = type(functools.cache(lambda: None))
SUSPENDED: Final[dict[type, tuple[str, str]]] = {
    types.GeneratorType: ("gi_frame", "gi_code"),
    types.CoroutineType: ("cr_frame", "cr_code"),
    types.AsyncGeneratorType: ("ag_frame", "ag_code"),
}
"""Types of generators and coroutines: the names of their frame and code."""
_SEQUENCES: Final = (list, tuple, deque)
_SETS: Final = (set, frozenset)
_LONGEST: Final = 40
_HOOKS: Final = "_hooks"


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance`, but for ``__class__``, which a proxy computes."""
    return issubclass(type(value), kinds)


def attributes(value: object) -> dict[str, Any]:
    """The instance's dict; empty if it has none."""
    try:
        found: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:  # slots, or none
        return {}
    return found if type(found) is dict else {}


@dataclass(slots=True)
class Start:
    """A root of the search: what a path begins with."""

    root: HolderRoot
    name: str
    function: str = ""
    file: str = ""
    line: int = 0
    module: str = ""
    error: str = ""
    via: str = ""


@dataclass(slots=True)
class Path:
    """A path in names. ``objects`` are those that the steps lead to."""

    start: Start
    steps: list[HeldBy] = field(default_factory=list)
    objects: list[object] = field(default_factory=list)

    def text(self) -> str:
        """The expression so far."""
        name = "".join(step.label for step in self.steps)
        return f"{self.start.module}.{name}" if self.start.module else name


class Names:
    """Names for the steps of paths; each object's are read once."""

    def __init__(self) -> None:
        self._labels: dict[int, dict[int, str]] = {}
        self._attributes: dict[int, dict[int, str]] = {}

    def path(
        self, start: Start, objects: Sequence[object], given: dict[tuple[int, int], str]
    ) -> Path:
        """The path along these objects. ``given``: the labels of the steps that no object has."""
        path = Path(start)
        _begin(path, start, objects[0])
        hooks = start.root is HolderRoot.HOOK
        at = 0
        while at + 1 < len(objects):
            parent: Any = objects[at]
            child: Any = objects[at + 1]
            label = given.get((id(parent), id(child)))
            following = objects[at + 2] if at + 2 < len(objects) else None
            if label is None and is_a(parent, FunctionType):
                at += self._through_function(path, parent, child, following)
                continue
            if label is None and (root := self._own_root(path, parent, child)) is not None:
                _begin(path, root, child)
            elif label is None and is_a(parent, type) and type(child) is dict:
                name = f"{type.__getattribute__(parent, '__name__')}"
                _begin(path, Start(HolderRoot.CLASS, name), parent)
                self._step(path, child, following)
                at += 1
            elif label is None and _owns(parent, child):
                self._step(path, child, following)
                at += 1
            elif label is None and _is_inner(parent, child):
                pass
            else:
                label = self._label(parent, child) if label is None else label
                hooks = hooks or _HOOKS in label
                path.steps.append(_step(label, child))
                path.objects.append(child)
            hooks = hooks or (bool(path.steps) and _HOOKS in path.steps[-1].label)
            at += 1
        if hooks and path.start.root not in (
            HolderRoot.CYCLE,
            HolderRoot.EXCEPTION,
            HolderRoot.OUTSIDE,
        ):
            path.start.root = HolderRoot.HOOK
        return path

    def _step(self, path: Path, owned: dict[str, Any], value: object) -> None:
        """Add the attribute of an instance, by its dict."""
        if value is None:  # the path ends with the dict
            path.steps.append(_step(".__dict__", owned))
            path.objects.append(owned)
            return
        key = self._keys(owned).get(id(value), "…")
        path.steps.append(_step(f".{key}", value))
        path.objects.append(value)

    def _keys(self, owned: dict[str, Any]) -> dict[int, str]:
        if id(owned) not in self._attributes:
            names: dict[int, str] = {}
            for key, value in list(dict.items(owned)):
                names.setdefault(id(value), str(key) if type(key) is str else "…")
            self._attributes[id(owned)] = names
        return self._attributes[id(owned)]

    def _through_function(self, path: Path, function: Any, child: Any, after: Any) -> int:
        """Begin again at a variable of a closure or a default; how many objects it passes."""
        code = function.__code__
        place = {"file": code.co_filename, "line": code.co_firstlineno, "via": path.text()}
        own = code.co_name
        if child is function.__closure__ and is_a(after, CellType):
            at = next(at for at, cell in enumerate(function.__closure__) if cell is after)
            inner = f".<locals>.{function.__name__}"
            around = function.__qualname__.removesuffix(inner).rpartition(".")[2]
            start = Start(HolderRoot.CLOSURE, code.co_freevars[at], around, **place)
            content = gc.get_referents(after)
            _begin(path, start, content[0] if content else after)
            return 3
        if child is function.__defaults__ and after is not None:
            positional = code.co_varnames[: code.co_argcount]
            names = positional[len(positional) - len(function.__defaults__) :]
            named = zip(names, function.__defaults__, strict=True)
            name = next(name for name, value in named if value is after)
            _begin(path, Start(HolderRoot.DEFAULT, name, own, **place), after)
            return 2
        if child is function.__kwdefaults__ and after is not None:
            name = next(name for name, value in child.items() if value is after)
            _begin(path, Start(HolderRoot.DEFAULT, name, own, **place), after)
            return 2
        if type(child) is dict and _owns(function, child) and after is not None:
            self._step(path, child, after)
            return 2
        path.steps.append(_step(f".{_of_function(function, child)}", child))
        path.objects.append(child)
        return 1

    def _own_root(self, path: Path, parent: Any, child: object) -> Start | None:
        """The root that the path begins with instead, if the parent is one."""
        if type(parent) in SUSPENDED:
            frame_name, code_name = SUSPENDED[type(parent)]
            frame, code = getattr(parent, frame_name), getattr(parent, code_name)
            name = None if frame is None else variable_of(frame, child)
            line = code.co_firstlineno if frame is None else frame.f_lineno
            return Start(
                HolderRoot.GENERATOR,
                name or "(a value of an expression)",
                code.co_name,
                code.co_filename,
                line or code.co_firstlineno,
                via=path.text(),
            )
        if type(parent) is FrameType:
            code = parent.f_code
            error = next((one for one in path.objects if is_a(one, BaseException)), None)
            return Start(
                HolderRoot.LOCAL if error is None else HolderRoot.EXCEPTION,
                variable_of(parent, child) or "(a value of an expression)",
                code.co_name,
                code.co_filename,
                parent.f_lineno or code.co_firstlineno,
                error="" if error is None else type(error).__name__,
                via=path.text(),
            )
        if type(parent) is CACHED:
            function = attributes(parent).get("__wrapped__")
            if function is child:
                return None
            code = function.__code__ if type(function) is FunctionType else None
            return Start(
                HolderRoot.CACHE,
                f"{path.text()}, a functools.cache",
                "" if code is None else code.co_name,
                "" if code is None else code.co_filename,
                0 if code is None else code.co_firstlineno,
                via=path.text(),
            )
        return None

    def label(self, parent: object, child: object) -> str:
        """How the parent refers to the child, of any two objects."""
        if _owns(parent, child):
            return ".__dict__"
        if is_a(parent, FunctionType):
            return f".{_of_function(parent, child)}"
        return self._label(parent, child)

    def _label(self, parent: object, child: object) -> str:
        known = self._labels.get(id(parent))
        if known is None:
            known = {}
            for value, label in _inside(parent):
                known.setdefault(id(value), label)
            self._labels[id(parent)] = known
        return known.get(id(child)) or f" → {type(child).__name__}"


def _begin(path: Path, start: Start, value: object) -> None:
    path.start = Start(
        start.root,
        start.name,
        start.function,
        start.file,
        start.line,
        start.module,
        start.error,
        start.via,
    )
    path.steps = [_step(start.name, value)]
    path.objects = [value]


def _step(label: str, value: object) -> HeldBy:
    return HeldBy(label, type(value).__name__, size_of(value))


def size_of(value: Any) -> int | None:
    """The length of a built-in container, or of its subclass, by the built-in method."""
    for kind in (dict, list, tuple, set, frozenset, deque):
        if issubclass(type(value), kind):
            return kind.__len__(value)
    return None


def _owns(parent: object, child: object) -> bool:
    """Whether the child is the dict of the parent's attributes."""
    return type(child) is dict and not is_a(parent, dict) and attributes(parent) is child


def _is_inner(parent: object, child: object) -> bool:
    """Whether the step has no name: a cell's content, or the frame of a traceback."""
    return type(parent) is CellType or (
        type(parent) is TracebackType and type(child) in (FrameType, TracebackType)
    )


def variable_of(frame: FrameType, value: object) -> str | None:
    """The name of the variable of a frame that has this value."""
    return next((name for name, one in variables(frame).items() if one is value), None)


def _of_function(function: Any, child: object) -> str:
    for name in ("__closure__", "__defaults__", "__kwdefaults__", "__globals__", "__code__"):
        if getattr(function, name) is child:
            return name
    return "__dict__" if type(child) is dict else "…"


_Parts: TypeAlias = Iterator[tuple[object, str]]


def _inside(value: Any) -> _Parts:
    """The objects that a value consists of, and how they are reached from it."""
    for kind, of_kind in _INSIDE:
        if issubclass(type(value), kind):
            yield from of_kind(value)
            break
    yield from _members(value)


def _of_dict(value: Any) -> _Parts:
    for key, each in list(dict.items(value)):
        yield each, f"[{_key(key)}]"
    for key in list(dict.keys(value)):
        yield key, f" → key {_key(key)}"


def _of_sequence(value: Any) -> _Parts:
    kind: Any = next(each for each in _SEQUENCES if is_a(value, each))
    names = _fields(value) if kind is tuple else ()
    for at, each in enumerate(list(kind.__iter__(value))):
        yield each, f".{names[at]}" if at < len(names) else f"[{at}]"


def _of_set(value: Any) -> _Parts:
    kind: Any = next(each for each in _SETS if is_a(value, each))
    for each in list(kind.__iter__(value)):
        yield each, "{…}"


def _by(owner: Any, *names: str) -> Callable[[Any], _Parts]:
    """Reads members as a built-in type defines them: a subclass may have a property instead."""
    members = [(owner.__dict__[name], f".{name}") for name in names]
    return lambda value: ((member.__get__(value), label) for member, label in members)


_INSIDE: Final[tuple[tuple[type | tuple[type, ...], Callable[[Any], _Parts]], ...]] = (
    (dict, _of_dict),
    (_SEQUENCES, _of_sequence),
    (_SETS, _of_set),
    (functools.partial, _by(functools.partial, "func", "args", "keywords")),
    (MethodType, _by(MethodType, "__self__", "__func__")),
    (types.BuiltinMethodType, _by(types.BuiltinMethodType, "__self__")),
    (
        BaseException,
        _by(BaseException, "__traceback__", "__context__", "__cause__", "args"),
    ),
    (
        torch.Tensor,
        _by(torch._C.TensorBase, "_backward_hooks", "_post_accumulate_grad_hooks"),
    ),
    (staticmethod, _by(staticmethod, "__func__")),
    (classmethod, _by(classmethod, "__func__")),
    (property, _by(property, "fget", "fset", "fdel")),
)


def _members(value: object) -> _Parts:
    for key, each in list(attributes(value).items()):
        yield each, f".{key}"
    for base in type.__getattribute__(type(value), "__mro__"):
        own = type.__getattribute__(base, "__dict__")
        for name, member in list(own.items()):
            if type(member) is types.MemberDescriptorType:
                try:
                    yield member.__get__(value), f".{name}"
                except (AttributeError, TypeError, ValueError):  # an empty slot
                    continue


def _fields(value: object) -> Sequence[str]:
    for base in type.__getattribute__(type(value), "__mro__"):
        names = type.__getattribute__(base, "__dict__").get("_fields")
        if type(names) is tuple:
            return names
    return ()


_LITERAL: Final = (str, int, float, bool, bytes, type(None))


def _key(key: object) -> str:
    """A key of a dict as the program writes it, if it is a literal."""
    if type(key) in _LITERAL:
        text = repr(key)
    elif type(key) is tuple and all(type(each) in _LITERAL for each in key):
        text = ", ".join(map(repr, key))
    else:
        return "…"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
