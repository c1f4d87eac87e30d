"""Compilers of kernels that are not installed, as far as programs on a simulated GPU need them.

NVIDIA's CUTLASS and cuTile compile kernels from Python functions. A kernel takes no memory of
torch's: the functions that launch it do, and without values a launch has nothing to do. So what a
program finds in these packages here does nothing, whatever it calls.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

PACKAGES = ("cutlass", "cuda.bindings", "cuda.tile")


class Nothing:
    """Takes every call, and gives itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def get_device_multiprocessor_count(self) -> int:
        import torch

        found: int = torch.cuda.get_device_properties().multi_processor_count
        return found

    def get_max_active_clusters(self, size: int) -> int:
        """Of kernels whose blocks take a multiprocessor each, as those here do."""
        return self.get_device_multiprocessor_count() // size

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __iter__(self) -> Iterator[Any]:
        """Error and result of the driver's functions."""
        return iter((self, self))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def __int__(self) -> int:
        return 1

    def __or__(self, other: Any) -> Nothing:
        return self

    __ror__ = __or__


NOTHING = Nothing()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NOTHING


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name == "cuda" or any(f"{name}.".startswith(f"{package}.") for package in PACKAGES):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """For the rest of this process, where the packages are not installed."""
    sys.meta_path.append(_Finder())
