"""Entering and leaving a virtual machine."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from gpuprobe.allocator.settings import in_environment, parse_conf
from gpuprobe.catalogue.gpus import GpuModel, parse_spec
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.assumptions import Assumptions
from gpuprobe.model.trace import AllocatorSettings
from gpuprobe.patching import Patches
from gpuprobe.torch_support import assignments
from gpuprobe.torch_support.compile_notes import worded
from gpuprobe.torch_support.engine_reports import add_assumptions
from gpuprobe.torch_support.process_gpus import NAME, visible
from gpuprobe.torch_support.version import installed, simulated
from gpuprobe.virtual import boundary, cuda_api, saving
from gpuprobe.virtual.compiled import compiler, triton_kernels
from gpuprobe.virtual.dispatch.mode import DispatchMode, take_higher_order
from gpuprobe.virtual.distributed import children, groups
from gpuprobe.virtual.kernels import attention, fourier, host, jiterator, nearest, normalization
from gpuprobe.virtual.lowering import functions, recurrent, rows
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.operators import modules
from gpuprobe.virtual.torch_patches import autocast, parameters, tensors
from gpuprobe.virtual.torch_patches.intercept import Intercept
from gpuprobe.virtual.torch_patches.keys import DEVICE, Kernels, exclude, include, pass_by

COMPUTE = ("real", "shapes")
RANDOM = ("host", "cuda")

_session: VirtualSession | None = None


def current() -> VirtualSession | None:
    """The session this process is in, None outside."""
    return _session


class VirtualSession:
    """A virtual machine that torch uses between `start` and `stop`."""

    engine = "virtual"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.intercept = Intercept(machine)
        self._patches = Patches()
        self._kernels: Kernels | None = None
        self._mode = machine.dispatch = DispatchMode(machine, rows())

    def start(self) -> None:
        """Raises UsageError if another session is active."""
        global _session
        if _session is not None:
            raise UsageError("another virtual GPU is already active", hint="exit that one first")
        _session = self
        if self.machine.shapes:
            nearest.import_compiler()
        try:
            self._patches.add(add_assumptions(lambda: worded(self.machine.assumed)))
            self._kernels = Kernels()
            self._patches.add(self._kernels.close)
            pass_by(self._patches)
            take_higher_order(self._patches)
            self.intercept.install(self._kernels)
            functions.install(self.machine, self._kernels, self._patches)
            attention.install(self.machine, self._kernels)
            host.install(self.machine, self._kernels)
            normalization.install(self.machine, self._kernels)
            fourier.install(self.machine, self._kernels)
            jiterator.install(self.machine, self._patches)
            recurrent.install(self.machine, self._kernels, self._patches)
            autocast.install(self.machine, self._kernels, self._patches)
            cuda_api.install(self.machine, self._patches)
            children.install(self.machine, self._patches, start_as_parent)
            groups.install(self.machine, self._patches)
            tensors.install(self.machine, self.intercept, self._patches)
            parameters.install(self.machine, self._patches)
            compiler.install(self.machine, self._patches)
            triton_kernels.install(self.machine, self._patches)
            modules.install(self.machine, self._patches)
            boundary.install(self.machine, self._patches)
            saving.install(self.machine, self._patches)
            machine = self.machine
            if machine.shapes:
                assignments.install(
                    self._patches,
                    lambda: bool(machine.given_nan) and not machine.closed,
                    machine.assume,
                )
            _threads(self, self._patches)
            self.enter_thread()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Restore torch."""
        self.machine.close()
        self.pause()

    def pause(self) -> None:
        """Restore torch temporarily: `start` continues with the same machine, whose tensors
        keep their memory.
        """
        global _session
        if _session is self:
            _session = None
        try:
            self.leave_thread()
        finally:
            self._patches.undo()

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the simulation takes for granted, a sentence each."""
        return worded(self.machine.assumed)

    def read_unknown_as_nan(self) -> None:
        """Numbers that the program reads and that were not computed are NaN from now on."""
        self.machine.unknown_as_nan = True

    def refused(self) -> None:
        """No error is kept."""
        return

    def peaks(self) -> dict[int, tuple[int, int]]:
        """Peaks allocated and reserved of each device in use, in bytes, by its physical number."""
        return {
            self.machine.physical(device): (device.sim.peak_allocated, device.sim.peak_reserved)
            for device in self.machine.devices
            if device.sim.peak_allocated
        }

    def keep_stacks(self) -> None:
        """Record the allocation stack of every live block from now on."""
        for device in self.machine.devices:
            device.history.keep_stacks = True
            device.follow_history()

    def enter_thread(self) -> None:
        """Make this thread use the virtual machine."""
        include(DEVICE)
        self._mode.__enter__()
        self.machine.local.entered = True

    def leave_thread(self) -> None:
        """Undo `enter_thread`. The mode stays if the program left another one above it."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        if not self.machine.local.entered:
            return
        self.machine.local.entered = False
        exclude(DEVICE)
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self._mode:
            self._mode.__exit__(None, None, None)


def _threads(session: VirtualSession, patches: Patches) -> None:
    """Dispatch keys and modes belong to threads: new ones get them as they begin."""
    original = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        if session.machine.closed or session.machine.local.entered:
            original(thread)
            return
        session.enter_thread()
        try:
            original(thread)
        finally:
            session.leave_thread()

    patches.set(threading.Thread, "run", run)


OTHER_TORCH: Final = (
    "that the program does with the simulated version of torch what it does with the installed "
    "one, whose code it runs; known differences of the kernels on GPUs and of their workspaces are "
    "applied"
)


def machine_of(
    spec: str | Sequence[GpuModel],
    compute: str = "real",
    conf: str | None = None,
    order: str = "driver",
    endless: bool = False,
    assume: Sequence[str] = (),
    torch_version: str = "",
) -> Machine:
    """The machine that ``spec`` describes: ``h100-80gb``, ``2xa100-40gb``, or catalogue entries.

    ``CUDA_VISIBLE_DEVICES`` selects among those that a text names, if it selects any.

    ``endless`` devices never run out of memory. ``assume``: values that were not computed, as
    ``FILE:LINE=VALUE``.

    ``conf`` is an allocator setting in the form of ``PYTORCH_CUDA_ALLOC_CONF``; None reads that
    variable, and again when the program first uses a GPU, as torch does. ``torch_version`` is the
    one whose CUDA kernels are simulated (see `gpuprobe.torch_support.version.simulated`). Raises
    ConfigError for an unknown GPU or setting, UsageError for an unknown ``compute``, a bad
    assumption, and such a version.
    """
    if compute not in COMPUTE:
        raise UsageError(f"unknown compute {compute!r}", hint=f"one of: {', '.join(COMPUTE)}")
    models = parse_spec(spec) if isinstance(spec, str) else tuple(spec)
    text = in_environment() if conf is None else conf
    settings = parse_conf(text) if text else AllocatorSettings()
    machine = Machine(
        models,
        compute,
        settings,
        order=order,
        endless=endless,
        torch_version=simulated(torch_version),
    )
    machine.conf_is_given = conf is not None
    machine.assumptions = Assumptions(assume)
    if machine.torch != installed():
        machine.assume(OTHER_TORCH)
    setting = os.environ.get(NAME)
    if isinstance(spec, str) and visible(setting, models):  # else it is about this machine's GPUs
        machine.select(setting)
        del machine.devices[machine.count :]
    return machine


def start_as_parent(
    gpus: Sequence[GpuModel],
    compute: str,
    conf: str | None,
    torch_version: str = "",
    endless: bool = False,
) -> None:
    """Give this process, to its end, GPUs like those of the program that spawned it."""
    machine = machine_of(gpus, compute, conf, endless=endless, torch_version=torch_version)
    session = VirtualSession(machine)
    session.machine.unknown_as_nan = compute == "shapes"
    session.start()
    atexit.register(session.stop)


@contextmanager
def virtual_gpu(
    gpu: str = "h100-80gb",
    compute: str = "real",
    *,
    conf: str | None = None,
    assume: Sequence[str] = (),
    torch_version: str = "",
    random: str = "host",
) -> Iterator[Any]:
    """Give torch a CUDA device that exists only in software, inside this context.

    ``gpu`` names an entry of the catalogue, or several: ``"2xa100-40gb"``. ``compute="real"``
    computes every value on the CPU; ``"shapes"`` computes none, so that a large model takes
    seconds, and a line that needs a value raises `ValueNeeded`. Yields the `VirtualSession`.

    ``random="cuda"`` draws the numbers that the GPU would draw with the same seed, where they are
    normal, uniform or whole; ``"host"`` those of the CPU.

    Raises ConfigError for a GPU that is not in the catalogue, UsageError inside another one and
    for an unknown ``compute`` or ``random``.
    """
    if random not in RANDOM:
        raise UsageError(f"unknown random {random!r}", hint=f"one of: {', '.join(RANDOM)}")
    machine = machine_of(gpu, compute, conf, assume=assume, torch_version=torch_version)
    machine.cuda_numbers = random == "cuda"
    session = VirtualSession(machine)
    session.start()
    try:
        yield session
    except Exception as error:
        known = boundary.explained(error)
        if known is None:
            raise
        raise known from error
    finally:
        session.stop()
