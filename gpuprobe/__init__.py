"""gpuprobe: where GPU memory goes, why, and what to do about it.

The public names below are resolved on first use (PEP 562), so ``import gpuprobe`` imports
nothing: a recorded program does not pay for the parts that it does not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuprobe._version import __version__

if TYPE_CHECKING:
    from gpuprobe.api.check import check
    from gpuprobe.api.devices import devices
    from gpuprobe.api.doctor import doctor
    from gpuprobe.api.hazards import allow_sync, declare_access, detect_hazards
    from gpuprobe.api.recordings import diff, load, metrics, replay, report
    from gpuprobe.api.simulated_gpu import virtual_gpu
    from gpuprobe.api.watch import record
    from gpuprobe.integrations.steps import watch_steps
    from gpuprobe.model.run.recording import Recording
    from gpuprobe.planning.estimates import estimate
    from gpuprobe.planning.fit import fit

__all__ = [
    "Recording",
    "__version__",
    "allow_sync",
    "check",
    "declare_access",
    "detect_hazards",
    "devices",
    "diff",
    "doctor",
    "estimate",
    "fit",
    "load",
    "metrics",
    "record",
    "replay",
    "report",
    "virtual_gpu",
    "watch_steps",
]

_HOMES = {
    "Recording": "gpuprobe.model.run.recording",
    "allow_sync": "gpuprobe.api.hazards",
    "check": "gpuprobe.api.check",
    "declare_access": "gpuprobe.api.hazards",
    "detect_hazards": "gpuprobe.api.hazards",
    "devices": "gpuprobe.api.devices",
    "diff": "gpuprobe.api.recordings",
    "doctor": "gpuprobe.api.doctor",
    "estimate": "gpuprobe.planning.estimates",
    "fit": "gpuprobe.planning.fit",
    "load": "gpuprobe.api.recordings",
    "load_ipython_extension": "gpuprobe.integrations.notebook",
    "metrics": "gpuprobe.api.recordings",
    "record": "gpuprobe.api.watch",
    "replay": "gpuprobe.api.recordings",
    "report": "gpuprobe.api.recordings",
    "virtual_gpu": "gpuprobe.api.simulated_gpu",
    "watch_steps": "gpuprobe.integrations.steps",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
