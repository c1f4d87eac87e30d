"""Fakes for the tests of users.

``fake_fleet("8xh100")`` is a context manager that replaces NVML and the CUDA driver library by
those of a simulated machine. It plugs in below ``nvidia-ml-py``, at the boundary to the C library:
the real ``pynvml`` code runs, and so does any tool that uses it. ``fleets()`` lists the available
machines; the path of a JSON file in the same format works as well.

Outside such a context nothing changes, and importing this package imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuprobe.testing.fake_machine import fake_fleet
    from gpuprobe.testing.fake_nvml import UnexpectedCall
    from gpuprobe.testing.fleet import Fleet, fleets, load_fleet

__all__ = ["Fleet", "UnexpectedCall", "fake_fleet", "fleets", "load_fleet"]

_MODULES = {
    "Fleet": "gpuprobe.testing.fleet",
    "UnexpectedCall": "gpuprobe.testing.fake_nvml",
    "fake_fleet": "gpuprobe.testing.fake_machine",
    "fleets": "gpuprobe.testing.fleet",
    "load_fleet": "gpuprobe.testing.fleet",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value
