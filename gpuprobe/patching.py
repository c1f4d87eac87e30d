"""Putting a function in the place of another, and back; and waiting for a module to do so in.

Several parts of gpuprobe may replace the same attribute, and so may the program while they are at
work. Whatever the order in which they go, each leaves what the others have put there, and when the
last of gpuprobe's is gone the attribute is what it was before the first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_ABSENT = object()


class _Replacement:
    """One that is in force: ``before`` is what comes back when it goes."""

    __slots__ = ("before", "owner", "value")

    def __init__(self, owner: Any, value: Any, before: Any) -> None:
        self.owner = owner
        self.value = value
        self.before = before


_in_force: dict[tuple[int, str], list[_Replacement]] = {}
"""By the owner's id (which they keep alive) and the attribute's name, oldest first."""
_originals: dict[int, Any] = {}
"""What each replacement in force took the place of, by the replacement's id."""


def original_of(value: Any) -> Any:
    """What was there before gpuprobe put ``value`` in its place; ``value`` itself for all else."""
    while id(value) in _originals:
        value = _originals[id(value)]
    return value


@contextmanager
def originals() -> Iterator[None]:
    """Everything is what it was before the first replacement, for code that makes tables of what
    it finds.
    """
    now = []
    for (_, name), found in _in_force.items():
        owner = found[0].owner
        now.append((owner, name, vars(owner).get(name, _ABSENT)))
        _put(owner, name, found[0].before)
    try:
        yield
    finally:
        for owner, name, value in now:
            _put(owner, name, value)


def _put(owner: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def patch(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set ``owner.name``; return what puts the old value back. Calling that twice does no harm.

    An attribute that the owner only inherited is deleted again. Where the program has put its own
    over ours since, that stays: what it calls inside it is ours, which must then only pass calls
    on.
    """
    mine = _Replacement(owner, value, vars(owner).get(name, _ABSENT))
    setattr(owner, name, value)
    key = (id(owner), name)
    _in_force.setdefault(key, []).append(mine)
    if callable(value) and mine.before is not _ABSENT:
        _originals[id(value)] = mine.before

    def restore() -> None:
        found = _in_force.get(key, [])
        if mine not in found:
            return
        _originals.pop(id(mine.value), None)
        above = found[found.index(mine) + 1 :]
        found.remove(mine)
        if not found:
            del _in_force[key]
        if above:
            if above[0].before is mine.value:
                above[0].before = mine.before
        elif vars(owner).get(name, _ABSENT) is mine.value:
            _put(owner, name, mine.before)

    return restore


class Patches:
    """Replacements that are undone together, the latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        # TorchScript knows torch's functions by their identity. It fills this table with its first
        # use, which must be of the originals.
        builtins = sys.modules.get("torch.jit._builtins")
        self._torchscript: dict[int, str] = (
            {} if builtins is None else builtins._get_builtin_table()
        )

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``, or add it. What a class inherits is left on its base."""
        operator = self._torchscript.get(id(vars(owner).get(name, _ABSENT)))
        self._undo.append(patch(owner, name, value))
        if operator is not None:
            self._torchscript[id(value)] = operator
            self._undo.append(lambda: self._torchscript.pop(id(value), None))

    def set_each(self, owner: Any, values: Mapping[str, Any]) -> None:
        """`set` several attributes of one owner."""
        for name, value in values.items():
            self.set(owner, name, value)

    def set_all(self, owner: Any, values: Mapping[str, Any], within: str) -> None:
        """`set` several, also in the modules below ``within`` that imported them by name."""
        old = {name: vars(owner)[name] for name in values if name in vars(owner)}
        self.set_each(owner, values)
        for path, module in list(sys.modules.items()):
            if module is owner or not path.startswith(within):
                continue
            names = getattr(module, "__dict__", {})  # programs put all kinds of things there
            for name, value in old.items():
                if names.get(name, _ABSENT) is value and callable(value):
                    self.set(module, name, values[name])

    def add(self, undo: Callable[[], Any]) -> None:
        """Have ``undo`` called, for changes that are not attributes."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back. What fails is tried for all, then the first failure is raised."""
        failed: BaseException | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # noqa: BLE001 - the others are still to be put back
                failed = failed or error
        if failed is not None:
            raise failed


class _After(importlib.abc.Loader):
    """A loader that does what another does, and then calls back."""

    def __init__(self, loader: Any, callback: Callable[[], None]) -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # whoever only asks where a module is may want more

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module must not see that another loader stood in for its own.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._callback()


class _Finder(importlib.abc.MetaPathFinder):
    """Stays until the module is there: many a program asks for a spec long before it imports, or
    tries again after an import that failed.
    """

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        # Those before this one have been asked; another of these may be behind it.
        behind = sys.meta_path.index(self) + 1 if self in sys.meta_path else 0
        for finder in sys.meta_path[behind:]:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find and find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _After(spec.loader, self._imported)
                return spec
        return None

    def close(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _imported(self) -> None:
        if self in sys.meta_path:
            self.close()
            self._callback()


def when_imported(name: str, callback: Callable[[], None]) -> Callable[[], None]:
    """Call back as soon as the module has been imported; at once if it is already there. Returns
    what gives up waiting.

    So the program decides when torch is imported: what it sets in the environment before
    (``CUDA_VISIBLE_DEVICES``, ``OMP_NUM_THREADS``) still counts.
    """
    if name in sys.modules:
        callback()
        return lambda: None
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)
    return finder.close
