"""Processes that a program spawns: they have the same virtual GPUs. In a pretended job there are
none: the rank that is pretended runs here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from multiprocessing import context, spawn
from typing import Any

import torch.multiprocessing

from gpuprobe.errors import NotModelled
from gpuprobe.patching import Patches
from gpuprobe.virtual.distributed.arrival import Arrival
from gpuprobe.virtual.frames import where
from gpuprobe.virtual.machine import Machine

_PREPARE_SAMPLES = "torch.utils.data"
"""The package of the processes that make samples, and use no GPU."""


class _Starting(threading.local):
    """Whether the process that this thread starts has the GPUs."""

    has_gpus = True


def install(machine: Machine, patches: Patches, start: Callable[..., None]) -> None:
    """Follow the program into the processes that it spawns, where ``start`` is given the GPUs, how
    they compute, the allocator's settings, torch's version and whether memory is endless
    (`Arrival`); in a pretended job, have ``torch.multiprocessing.spawn`` call what it would spawn,
    as the rank that is pretended.
    """
    gpus = tuple(device.model for device in machine.devices[: machine.count])
    compute = "shapes" if machine.shapes else "real"
    version = f"{machine.torch[0]}.{machine.torch[1]}"
    conf = machine.settings.conf if machine.conf_is_given else None
    arrival = Arrival(start, gpus, compute, conf, version, machine.endless)
    starting = _Starting()
    prepare = spawn.get_preparation_data

    def with_gpus(name: str) -> dict[str, Any]:
        found = prepare(name)
        # The first key is unpickled first; multiprocessing ignores those that it does not know.
        return {"gpuprobe_gpus": arrival, **found} if starting.has_gpus else found

    def following(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def launch(process: Any) -> Any:
            target = process._target
            starting.has_gpus = target is None or not target.__module__.startswith(_PREPARE_SAMPLES)
            try:
                return original(process)
            finally:
                starting.has_gpus = True

        return staticmethod(launch)

    patches.set(spawn, "get_preparation_data", with_gpus)
    for kind in (context.SpawnProcess, context.ForkServerProcess):
        patches.set(kind, "_Popen", following(kind._Popen))
    if machine.ranks > 1:
        patches.set_all(
            torch.multiprocessing,
            {"spawn": functools.partial(_as_rank, machine)},
            "torch.multiprocessing",
        )
    elif machine.estimated:
        patches.set_all(torch.multiprocessing, {"spawn": _refused}, "torch.multiprocessing")


def _as_rank(
    machine: Machine,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    fn(machine.rank % machine.count, *args)  # as many on a machine as it has GPUs


def _refused(*args: Any, **kwargs: Any) -> None:
    raise NotModelled(
        f"{where()} spawns processes, which an estimate does not follow",
        hint="estimate one of them: --ranks N pretends to be one of N processes",
    )
