"""What surrounds CUDA in torch: NVIDIA's marks and profiler, TunableOp, cuFFT's plans.

Nothing of it changes what is allocated: a virtual GPU keeps what a program has set.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine


class Nvtx(threading.local):
    """``torch._C._nvtx``: marks that a profiler of NVIDIA's shows, for each thread. Sources:
    ``torch/csrc/cuda/shared/nvtx.cpp``; NVTX's documentation of what is returned.
    """

    _handles = itertools.count(1)

    def __init__(self) -> None:
        self._depth = 0

    def rangePushA(self, message: str) -> int:
        """The zero-based level of the range."""
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        """The level of the range that ended; -2, NVTX's error, if none had begun."""
        if not self._depth:
            return -2
        self._depth -= 1
        return self._depth

    def rangeStartA(self, message: str) -> int:
        return next(self._handles)

    def rangeEnd(self, handle: int) -> None: ...
    def markA(self, message: str) -> None: ...

    def deviceRangeStart(self, message: str, stream: int) -> object:
        return self.rangeStartA(message)

    def deviceRangeEnd(self, handle: object, stream: int) -> None: ...


class TunableOp:
    """The settings of ``torch.cuda.tunable``. On CUDA there is nothing to tune: cuBLAS's default
    is the only implementation (the module's documentation), so there are no results either.
    Defaults: ``aten/src/ATen/cuda/tunable/README.md``.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._set: dict[str, Any] = {
            "enabled": False,
            "tuning": True,
            "untuned": False,
            "duration": 30,
            "iterations": 100,
            "filename": "",
            "buffer": -1,
        }

    def _filename(self) -> str:
        return self._set["filename"] or f"tunableop_results{self._machine.local.device}.csv"

    def _set_filename(self, name: str, insert_device_ordinal: bool = False) -> None:
        if insert_device_ordinal:
            stem, dot, end = name.rpartition(".")
            name = f"{stem or end}{self._machine.local.device}{dot}{end if dot else ''}"
        self._set["filename"] = name

    def _buffer(self) -> int:
        """KiB; of the L2 cache, unless it was set."""
        if self._set["buffer"] >= 0:
            return int(self._set["buffer"]) << 10
        properties = torch.cuda.get_device_properties()
        return int(properties.L2_cache_size) >> 10

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By their names in ``torch._C``."""

        def setter(name: str) -> Callable[[Any], None]:
            return lambda value: self._set.__setitem__(name, value)

        def getter(name: str) -> Callable[[], Any]:
            return lambda: self._set[name]

        return {
            "_cuda_tunableop_enable": setter("enabled"),
            "_cuda_tunableop_is_enabled": getter("enabled"),
            "_cuda_tunableop_tuning_enable": setter("tuning"),
            "_cuda_tunableop_tuning_is_enabled": getter("tuning"),
            "_cuda_record_untuned_enable": setter("untuned"),
            "_cuda_record_untuned_is_enabled": getter("untuned"),
            "_cuda_tunableop_set_max_tuning_duration": setter("duration"),
            "_cuda_tunableop_get_max_tuning_duration": getter("duration"),
            "_cuda_tunableop_set_max_tuning_iterations": setter("iterations"),
            "_cuda_tunableop_get_max_tuning_iterations": getter("iterations"),
            "_cuda_tunableop_set_filename": self._set_filename,
            "_cuda_tunableop_get_filename": self._filename,
            "_cuda_tunableop_get_results": tuple,
            "_cuda_tunableop_get_validators": lambda: (("PT_VERSION", torch.__version__),),
            "_cuda_tunableop_read_file": lambda filename: False,
            "_cuda_tunableop_write_file": lambda filename: False,
            "_cuda_tunableop_write_file_on_exit": lambda value: None,
            "_cuda_tunableop_set_rotating_buffer_size": setter("buffer"),
            "_cuda_tunableop_get_rotating_buffer_size": self._buffer,
            "_cuda_tunableop_set_numerical_check_tolerances": lambda enable, atol, rtol: None,
        }


_PLANS: Final = 4096
"""Plans that a device's cache has room for: ``CUFFT_DEFAULT_CACHE_SIZE`` in
``aten/src/ATen/native/cuda/CuFFTPlanCache.h``, for CUDA 10 and later."""


def _plan_cache(patches: Patches) -> None:
    """``torch.backends.cuda.cufft_plan_cache``: there are no plans to keep."""
    cache: Any = torch.backends.cuda.cuFFTPlanCache
    room: dict[int, int] = {}

    def set_room(index: int, size: int) -> None:
        if size < 0:
            raise RuntimeError(f"cuFFT plan cache size must be non-negative, but got {size}")
        room[index] = size

    kind: Any = torch.backends.cuda.cuFFTPlanCacheAttrContextProp
    patches.set(cache, "size", kind(lambda index: 0, vars(cache)["size"].setter))
    patches.set(cache, "max_size", kind(lambda index: room.get(index, _PLANS), set_room))
    patches.set(cache, "clear", lambda self: None)
    # It keeps a cache for each device from its first use on.
    patches.set(
        torch.backends.cuda, "cufft_plan_cache", torch.backends.cuda.cuFFTPlanCacheManager()
    )


def _profilers(patches: Patches) -> None:
    """A profiler records what runs on the host; on the device nothing takes time. Without CUDA,
    C++ code would print an error for each operator.
    """
    profiler: Any = torch.autograd.profiler
    cuda = torch.profiler.ProfilerActivity.CUDA
    supported = profiler._supported_activities

    patches.set(profiler, "_supported_activities", lambda: {*supported(), cuda})
    for name in ("_prepare_profiler", "_enable_profiler"):
        patches.set(profiler, name, _of_the_host(getattr(profiler, name), cuda))

    config = profiler.profile.config

    def of_the_host(self: Any, *args: Any, **options: Any) -> Any:
        if self.profiler_kind == profiler.ProfilerState.KINETO_GPU_FALLBACK:
            self.profiler_kind = profiler.ProfilerState.KINETO
        return config(self, *args, **options)

    patches.set(profiler.profile, "config", of_the_host)

    def enter(self: Any) -> Any:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("NVTX annotation context manager is not reentrant")
        self.entered = True
        return self

    patches.set(profiler.emit_nvtx, "__enter__", enter)
    patches.set(profiler.emit_nvtx, "__exit__", lambda self, *error: False)


def _of_the_host(original: Callable[..., Any], cuda: Any) -> Callable[..., Any]:
    def call(config: Any, activities: Any, *rest: Any, **options: Any) -> Any:
        return original(config, set(activities) - {cuda}, *rest, **options)

    return call


def install(machine: Machine, patches: Patches) -> None:
    patches.set(torch.cuda.nvtx, "_nvtx", Nvtx())
    patches.set_each(torch._C, TunableOp(machine).functions())
    _plan_cache(patches)
    _profilers(patches)
