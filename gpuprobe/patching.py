"""Replacing an attribute and restoring it; and waiting for a module to be imported.

Several parts of gpuprobe may replace the same attribute, and so may the program meanwhile. In
whatever order the replacements end, each keeps what the others have set, and after the last one of
gpuprobe the attribute is what it was before the first.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast

_Manager = TypeVar("_Manager", bound=Callable[..., Any])

_ABSENT = object()


class _Replacement:
    """An active replacement: ``before`` is the value to restore."""

    __slots__ = ("before", "owner", "value")

    def __init__(self, owner: object, value: object, before: Any) -> None:
        self.owner = owner
        self.value = value
        self.before = before


_active: dict[tuple[int, str], list[_Replacement]] = {}
"""By the owner's id (the replacements keep it alive) and the attribute's name, oldest first."""
_originals: dict[int, Any] = {}
"""The value that each active replacement replaced, by the replacement's id."""


def original_of(value: Any) -> Any:
    """The value that gpuprobe replaced by ``value``; ``value`` itself if it is not a
    replacement.
    """
    while id(value) in _originals:
        value = _originals[id(value)]
    return value


def open_at_exit(manager: _Manager) -> _Manager:
    """For a function that returns a context manager made from a generator: a context that the
    program has not left when Python ends stays open. Python would continue the generator while it
    takes the modules apart.
    """

    @functools.wraps(manager)
    def made(*args: Any, **named: Any) -> Any:
        if not _contexts:
            atexit.register(_keep_open)
        context = manager(*args, **named)
        _contexts.add(context)
        return context

    return cast(_Manager, made)


_contexts: weakref.WeakSet[Any] = weakref.WeakSet()


def _keep_open() -> None:
    import ctypes  # 4 ms, only for these programs

    for context in list(_contexts):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))  # never released


def _put(owner: object, name: str, value: object) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def patch(owner: object, name: str, value: object) -> Callable[[], None]:
    """Set ``owner.name``; return a function that restores the old value. Calling that twice does no
    harm.

    An attribute that the owner only inherited is deleted again. If the program has replaced ours
    since, its replacement stays: it calls ours, which must then only pass calls on.
    """
    mine = _Replacement(owner, value, vars(owner).get(name, _ABSENT))
    setattr(owner, name, value)
    key = (id(owner), name)
    _active.setdefault(key, []).append(mine)
    if callable(value) and mine.before is not _ABSENT:
        _originals[id(value)] = mine.before

    def restore() -> None:
        found = _active.get(key, [])
        if mine not in found:
            return
        _originals.pop(id(mine.value), None)
        above = found[found.index(mine) + 1 :]
        found.remove(mine)
        if not found:
            del _active[key]
        if above:
            if above[0].before is mine.value:
                above[0].before = mine.before
        elif vars(owner).get(name, _ABSENT) is mine.value:
            _put(owner, name, mine.before)

    return restore


class Patches:
    """Replacements that are undone together, the latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        # TorchScript identifies torch's functions by their identity. It fills this table at its
        # first use, which must be with the originals.
        builtins = sys.modules.get("torch.jit._builtins")
        self._torchscript: dict[int, str] = (
            {} if builtins is None else builtins._get_builtin_table()
        )

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace ``owner.name``, or add it. An inherited attribute is not changed in the base
        class.
        """
        operator = self._torchscript.get(id(vars(owner).get(name, _ABSENT)))
        self._undo.append(patch(owner, name, value))
        if operator is not None:
            self._torchscript[id(value)] = operator
            self._undo.append(lambda: self._torchscript.pop(id(value), None))

    def set_each(self, owner: object, values: Mapping[str, Any]) -> None:
        """`set` several attributes of one owner."""
        for name, value in values.items():
            self.set(owner, name, value)

    def set_all(self, owner: object, values: Mapping[str, Any], within: str) -> None:
        """`set` several, also in the modules below ``within`` that imported them by name."""
        old = {name: vars(owner)[name] for name in values if name in vars(owner)}
        self.set_each(owner, values)
        for path, module in list(sys.modules.items()):
            if module is owner or not path.startswith(within):
                continue
            names = getattr(module, "__dict__", {})  # programs put any object into sys.modules
            for name in old.keys() & names.keys():  # in C: there are thousands of modules
                value = names[name]
                if value is old[name] and callable(value):
                    self.set(module, name, values[name])

    def add(self, undo: Callable[[], object]) -> None:
        """Add a function that undoes a change of another kind."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Restore everything. If some fail, all are tried, then the first failure is raised."""
        failed: BaseException | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # noqa: BLE001 - the others must still be restored
                failed = failed or error
        if failed is not None:
            raise failed


class _After(importlib.abc.Loader):
    """A loader that does what another does, and then calls back. ``begin`` is called before; what
    it returns is called after the import, also if that fails.
    """

    def __init__(
        self, loader: Any, callback: Callable[[], None], begin: Callable[[], Callable[[], None]]
    ) -> None:
        self._loader = loader
        self._callback = callback
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # code that only searches for a module may use more

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module must not notice that another loader replaced its own.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        end = self._begin()
        try:
            self._loader.exec_module(module)
        finally:
            end()
        self._callback()


def _nothing() -> Callable[[], None]:
    return lambda: None


class _Finder(importlib.abc.MetaPathFinder):
    """Waits until the module is imported: many programs request a spec long before they import, or
    try again after an import that failed.
    """

    def __init__(
        self, name: str, callback: Callable[[], None], begin: Callable[[], Callable[[], None]]
    ) -> None:
        self._name = name
        self._callback = callback
        self._begin = begin

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        # The finders before this one have already been queried; another of these may be behind it.
        behind = sys.meta_path.index(self) + 1 if self in sys.meta_path else 0
        for finder in sys.meta_path[behind:]:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find and find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _After(spec.loader, self._imported, self._begin)
                return spec
        return None

    def close(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _imported(self) -> None:
        if self in sys.meta_path:
            self.close()
            self._callback()


def when_imported(
    name: str,
    callback: Callable[[], None],
    begin: Callable[[], Callable[[], None]] = _nothing,
) -> Callable[[], None]:
    """Call ``callback`` as soon as the module has been imported; at once if it already is. Returns
    a function that stops waiting. ``begin`` is called when an import begins, and what it returns
    when that import has ended or failed.

    So the program decides when torch is imported: what it sets in the environment before
    (``CUDA_VISIBLE_DEVICES``, ``OMP_NUM_THREADS``) still has an effect.
    """
    if name in sys.modules:
        callback()
        return lambda: None
    finder = _Finder(name, callback, begin)
    sys.meta_path.insert(0, finder)
    return finder.close
