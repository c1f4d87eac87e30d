"""Triton kernels that the program launches itself, on a virtual device.

A kernel allocates nothing; its Python caller does. With values Triton's interpreter runs it on the
host; without, a launch does nothing. But where it writes whole numbers, which may decide about
sizes (the tables of a mixture of experts), and all that it is given is known, the interpreter runs
it once they are asked for. What it reads and writes is found as torch's
compiler finds it, in the kernel's TTIR (``torch/_higher_order_ops/triton_kernel_wrap.py``).
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.errors import GpuprobeError, NotModelled
from gpuprobe.patching import Patches, when_imported
from gpuprobe.torch_support.triton_interpreter import JIT, interpret, patch_helpers
from gpuprobe.virtual.lowering.functions import uncharged
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.reads import known, later
from gpuprobe.virtual.unknown import not_modelled

_AUTOTUNER = "triton.runtime.autotuner"
_PROGRAMS: Final = 1 << 14
"""Of a launch, the most that are interpreted for values without ``compute="real"``: a program takes
milliseconds, or seconds where it sorts."""


def install(machine: Machine, patches: Patches) -> None:
    """Replace what launches kernels, now or when the program imports Triton."""
    for name, replace in ((JIT, _kernels), (_AUTOTUNER, _autotuned)):
        patches.add(when_imported(name, functools.partial(replace, machine, patches)))


def _kernels(machine: Machine, patches: Patches) -> None:
    jit: Any = sys.modules[JIT]
    launches = _Launches(machine)
    patches.set(jit.JITFunction, "run", launches.method())
    patch_helpers(patches)
    driver: Any = sys.modules["triton.runtime.driver"].driver  # that module has imported it
    before = dict(vars(driver))  # the active one has had two names
    driver.set_active(_Driver(machine))
    patches.add(lambda: vars(driver).update(before))


def _autotuned(machine: Machine, patches: Patches) -> None:
    def run(tuner: Any, *args: Any, **kwargs: Any) -> None:
        # Its configurations are timed on a GPU; none of them changes what is allocated.
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        tuner.fn.run(*args, **{**kwargs, **tuner.configs[0].all_kwargs()})
        tuner.nargs = None

    patches.set(sys.modules[_AUTOTUNER].Autotuner, "run", run)


class _Driver:
    """What kernels and their callers ask Triton's driver."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return self._machine.local.device

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self._machine.local.device)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = torch.cuda.get_device_capability()
        return GPUTarget("cuda", major * 10 + minor, 32)

    def get_benchmarker(self) -> Callable[..., Any]:
        """What would time an autotuned kernel's configurations."""
        from triton.testing import do_bench

        timed: Callable[..., Any] = do_bench
        return timed

    @property
    def utils(self) -> Any:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        found = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": found.shared_memory_per_block_optin,
            "max_num_regs": found.regs_per_multiprocessor,
            "multiprocessor_count": found.multi_processor_count,
            "warpSize": found.warp_size,
            "sm_clock_rate": found.clock_rate,
            "mem_clock_rate": found.memory_clock_rate,
            "mem_bus_width": found.memory_bus_width,
        }


class _Launches:
    """One machine's launches."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._written: dict[Any, list[str] | None] = {}

    def method(self) -> Callable[..., None]:
        """What is put in the place of ``JITFunction.run``."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
            if not warmup:
                self._launch(kernel, grid, args, kwargs)

        return run

    def _launch(
        self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        machine = self._machine
        names = [parameter.name for parameter in kernel.params]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if not machine.shapes:
            self._interpret(kernel, grid, {name: given[name] for name in names if name in given})
        elif any(later.has_values(machine, tensor) for tensor in tensors.values()):
            wrote = self._writes(kernel, given)
            written = [v for name, v in tensors.items() if wrote is None or name in wrote]
            in_order = {name: given[name] for name in names if name in given}
            if wrote is None or not self._compute_later(kernel, grid, in_order, written):
                for tensor in written:
                    known.forget(machine, tensor)
        place = max((machine.place_of(tensor) for tensor in tensors.values()), default=-1)
        if place >= 0:
            machine.queued(place)
        if machine.observer is not None and place >= 0:
            name = kernel.fn.__name__
            found = self._writes(kernel, given)
            written = [v for key, v in tensors.items() if found is None or key in found]
            if found is None:
                machine.assume(f"the Triton kernel {name} reads and writes all its tensors")
            machine.observer.fused(name, place, list(tensors.values()), written)

    def _compute_later(
        self, kernel: Any, grid: Any, given: dict[str, Any], written: list[torch.Tensor]
    ) -> bool:
        """Have whole numbers that a kernel writes computed once they are asked for. Returns
        whether they will be known.
        """
        machine = self._machine
        if machine.capture is not None or machine.local.standing_in:
            return False
        if all(tensor.is_floating_point() or tensor.is_complex() for tensor in written):
            return False
        sizes = grid(given) if callable(grid) else grid
        if math.prod(sizes) > _PROGRAMS:
            return False

        taken = list(given)  # names: the tensors are not to be kept alive

        def run(values: list[Any]) -> bool:
            try:
                self._interpret(kernel, sizes, dict(zip(taken, values, strict=True)))
            except NotModelled:
                return False
            return True

        return later.compute(machine, list(given.values()), written, run)

    def _interpret(self, kernel: Any, grid: Any, given: dict[str, Any]) -> None:
        """The kernel on the host. Raises NotModelled where Triton's interpreter cannot."""
        local = self._machine.local
        before, local.inside = local.inside, True
        try:
            with uncharged(self._machine):
                interpret(kernel, grid, given)
        except GpuprobeError:
            raise
        except Exception as error:
            raise not_modelled(
                f"the Triton kernel {kernel.fn.__name__} with values: Triton's interpreter gives "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error
        finally:
            local.inside = before

    def _writes(self, kernel: Any, given: dict[str, Any]) -> list[str] | None:
        """The names of the tensors that a kernel writes to; None where that is not known."""
        constants = tuple(
            sorted((k, repr(v)) for k, v in given.items() if not isinstance(v, torch.Tensor))
        )
        key = (id(kernel), constants)
        if key not in self._written:
            self._written[key] = _written_by(kernel, given)
        return self._written[key]


def _written_by(kernel: Any, given: dict[str, Any]) -> list[str] | None:
    from torch._higher_order_ops import triton_kernel_wrap as wrap
    from torch._subclasses.fake_tensor import FakeTensorMode

    taken = {name: given[name] for name in given if name in kernel.arg_names}
    try:
        with FakeTensorMode():
            stand_ins = {
                name: torch.empty(value.shape, dtype=value.dtype)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in taken.items()
            }
        if not hasattr(wrap, "analyze_kernel_access"):
            return _mutated(kernel, stand_ins)
        module, names = wrap.generate_ttir(kernel, stand_ins, {})
        functions = wrap.ttir_to_functions(module)
        wrap.analyze_kernel_access.reset()
        wrap.get_tma_stores.reset()
        tensors = frozenset(
            at for at, name in enumerate(names) if isinstance(taken.get(name), torch.Tensor)
        )
        found = wrap.analyze_kernel_access(
            functions, next(iter(functions)), len(names), tuple(names), tensors
        )
        return [dependency.name for dependency in found.read_writes.writes]
    except Exception:  # noqa: BLE001 - said by the caller: every tensor counts as written
        return None


def _mutated(kernel: Any, given: dict[str, Any]) -> list[str]:
    """The same as older versions of torch find it (2.6: ``identify_mutated_tensors``)."""
    from torch._higher_order_ops import triton_kernel_wrap

    wrap: Any = triton_kernel_wrap
    with_descriptors = len(inspect.signature(wrap.generate_ttir).parameters) > 2
    module, names = wrap.generate_ttir(kernel, given, *([{}] if with_descriptors else []))
    functions = wrap.ttir_to_functions(module)
    for cached in (wrap.analyze_kernel_mutations, getattr(wrap, "get_tma_stores", None)):
        if cached is not None:
            cached.reset()
    found = wrap.analyze_kernel_mutations(functions, next(iter(functions)), len(names))
    return [name for name, written in zip(names, found, strict=False) if written]
