"""Fakes that users may use in their own tests.

``fake_fleet("8xh100")`` is a context manager inside which NVML and the CUDA driver library are
those of a machine that does not exist. It plugs in below ``nvidia-ml-py``, at the boundary to
the C library: the real ``pynvml`` code runs, and so does any tool that uses it. ``fleets()``
lists the machines there are; a path to a JSON file of the same form works as well.

Outside such a context nothing is changed, and importing this package imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuprobe.testing.fake_machine import fake_fleet
    from gpuprobe.testing.fake_nvml import UnexpectedCall
    from gpuprobe.testing.fleet import Fleet, fleets, load_fleet

__all__ = ["Fleet", "UnexpectedCall", "fake_fleet", "fleets", "load_fleet"]

_HOMES = {
    "Fleet": "gpuprobe.testing.fleet",
    "UnexpectedCall": "gpuprobe.testing.fake_nvml",
    "fake_fleet": "gpuprobe.testing.fake_machine",
    "fleets": "gpuprobe.testing.fleet",
    "load_fleet": "gpuprobe.testing.fleet",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(home), name)
    return value
