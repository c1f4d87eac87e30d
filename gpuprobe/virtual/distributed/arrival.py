"""How a spawned process comes to the virtual GPUs of the program that spawned it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from gpuprobe.patching import when_imported


class Arrival:
    """What is unpickled in a spawned process before it imports the program: ``start`` is called
    there with ``given`` as soon as torch is imported, so that what a module does at its top level
    finds the GPUs. ``start`` goes by its name: its module imports torch, and this one does not.
    """

    def __init__(self, start: Callable[..., None], *given: Any) -> None:
        self._start = start
        self._given = given

    def __reduce__(self) -> Any:
        return _arrive, (self._start.__module__, self._start.__name__, self._given)


def _arrive(module: str, name: str, given: tuple[Any, ...]) -> None:
    when_imported("torch", lambda: getattr(import_module(module), name)(*given))
