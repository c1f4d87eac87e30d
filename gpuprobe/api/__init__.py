"""The use cases, one function each. CLI, TUI and plugins call nothing else.

A package rather than one file: each submodule holds one use case and imports only what that
one needs. The names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuprobe.api.devices import devices
    from gpuprobe.api.diff import diff
    from gpuprobe.api.doctor import diagnose, diagnose_ranks
    from gpuprobe.api.recordings import load, report
    from gpuprobe.api.replay import replay
    from gpuprobe.api.watch import record

__all__ = ["devices", "diagnose", "diagnose_ranks", "diff", "load", "record", "replay", "report"]

_HOMES = {
    "devices": "gpuprobe.api.devices",
    "diagnose": "gpuprobe.api.doctor",
    "diagnose_ranks": "gpuprobe.api.doctor",
    "diff": "gpuprobe.api.diff",
    "load": "gpuprobe.api.recordings",
    "record": "gpuprobe.api.watch",
    "replay": "gpuprobe.api.replay",
    "report": "gpuprobe.api.recordings",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(home), name)
    return value
