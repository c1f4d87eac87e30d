"""Processes that a program spawns: they have the same virtual GPUs. In a pretended job there are
none: the rank that is pretended runs here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing import context
from typing import Any

import torch.multiprocessing

from gpuprobe.errors import NotModelled
from gpuprobe.patching import Patches
from gpuprobe.virtual.frames import where
from gpuprobe.virtual.machine import Machine

_PREPARE_SAMPLES = "torch.utils.data"
"""The package of the processes that make samples, and use no GPU."""


def install(machine: Machine, patches: Patches, run_on: Callable[..., Any]) -> None:
    """Follow the program into the processes that it spawns, where ``run_on`` is given the GPUs, how
    they compute, the allocator's settings and what to call; or, in a pretended job, have
    ``torch.multiprocessing.spawn`` call what it would spawn, as the rank that is pretended.
    """
    gpus = tuple(device.model for device in machine.devices)
    compute = "shapes" if machine.shapes else "real"

    def following(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def launch(process: Any) -> Any:
            target = process._target
            if target is None or target.__module__.startswith(_PREPARE_SAMPLES):
                return original(process)
            process._target = functools.partial(
                run_on, gpus, compute, machine.settings.conf, target
            )
            try:
                return original(process)
            finally:
                process._target = target

        return staticmethod(launch)

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
    fn(machine.rank % len(machine.devices), *args)  # as many on a machine as it has GPUs


def _refused(*args: Any, **kwargs: Any) -> None:
    raise NotModelled(
        f"{where()} spawns processes, which an estimate does not follow",
        hint="estimate one of them: --ranks N pretends to be one of N processes",
    )
