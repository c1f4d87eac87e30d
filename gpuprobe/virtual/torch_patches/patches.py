"""Attributes of torch that are replaced while a virtual device exists, and put back after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch.jit._builtins import _get_builtin_table

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """Replacements, undone in reverse order by `undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        # torch fills this with its first use: it must be of the originals.
        self._operators: dict[int, str] = _get_builtin_table()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``, or add it. What a class inherits is left on its base."""
        old = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        operator = self._operators.get(id(old))
        if operator is not None:  # TorchScript knows torch's functions by their identity
            self._operators[id(value)] = operator
            self._undo.append(lambda: self._operators.pop(id(value), None))
        if old is _ABSENT:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, old))

    def set_all(self, owner: Any, values: Mapping[str, Any], within: str) -> None:
        """`set` several, also in the modules below ``within`` that imported them by name."""
        old = {name: vars(owner)[name] for name in values if name in vars(owner)}
        for name, value in values.items():
            self.set(owner, name, value)
        for path, module in list(sys.modules.items()):
            if module is owner or not path.startswith(within) or module is None:
                continue
            names = vars(module)
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
