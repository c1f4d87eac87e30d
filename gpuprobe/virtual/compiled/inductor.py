"""Inductor on a virtual device: what it asks of CUDA and Triton, answered without either."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import make_boxed_func

from gpuprobe.patching import Patches
from gpuprobe.torch_support import compile_watch
from gpuprobe.virtual.compiled import graphs
from gpuprobe.virtual.compiled.graph import Graph
from gpuprobe.virtual.compiled.values import Eagerly, Values
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.reads import known
from gpuprobe.virtual.torch_patches.intercept import placed_on
from gpuprobe.virtual.torch_patches.keys import below

_META = torch.device("meta")
_TIMED = (
    "max_autotune",
    "max_autotune_pointwise",
    "max_autotune_gemm",
    "coordinate_descent_tuning",
    "benchmark_kernel",
    "benchmark_combo_kernel",
)


class NoKernel:
    """In place of a compiled Triton kernel: it allocates nothing and does nothing but report what
    the kernel would read and write. Inductor names its pointers by that: ``in_ptr0``,
    ``out_ptr0``, ``in_out_ptr0``. A kernel of the program's own may write to all its tensors.
    """

    def __init__(self, machine: Machine, name: str, source: str) -> None:
        self._machine = machine
        self._name = name
        found = re.search(rf"^def {re.escape(name)}\(([^)]*)\)", source, re.MULTILINE)
        names = [item.partition(":")[0].strip() for item in (found[1] if found else "").split(",")]
        self._reads = [at for at, name in enumerate(names) if name.startswith("in_")]
        self._writes = [
            at for at, name in enumerate(names) if name.startswith(("out_ptr", "in_out_ptr"))
        ]
        if not self._reads and not self._writes:
            self._reads = self._writes = list(range(len(names)))

    def run(self, *args: Any, **kwargs: Any) -> None:
        machine = self._machine
        reads, writes = (
            [args[at] for at in places if at < len(args) and isinstance(args[at], torch.Tensor)]
            for places in (self._reads, self._writes)
        )
        if machine.shapes:
            for tensor in writes:
                if known.has_values(machine, tensor):
                    known.forget(machine, tensor)
        machine.queued(machine.local.device)
        if machine.observer is not None:
            machine.observer.fused(self._name, machine.local.device, reads, writes)


def install(machine: Machine, patches: Patches) -> None:
    """Patches of ``torch._inductor`` and ``torch._dynamo``; both are imported here."""
    import torch._inductor.compile_fx
    from torch._dynamo import device_interface
    from torch._inductor import async_compile, config
    from torch._inductor.runtime import hints
    from torch.utils import _triton

    interface: Any = device_interface.CudaInterface
    for name in (
        "current_device",
        "set_device",
        "device_count",
        "stream",
        "current_stream",
        "set_stream",
        "synchronize",
        "get_device_properties",
        "memory_allocated",
        "is_bf16_supported",
    ):
        patches.set(interface, name, staticmethod(_late(torch.cuda, name)))
    patches.set(interface, "exchange_device", staticmethod(_late(torch.cuda, "_exchange_device")))
    patches.set(
        interface,
        "maybe_exchange_device",
        staticmethod(_late(torch.cuda, "_maybe_exchange_device")),
    )
    for index in range(torch.cuda.device_count()):  # by which torch 2.5 looks it up
        name = f"cuda:{index}"
        device_interface.register_interface_for_device(name, interface)
        patches.add(functools.partial(device_interface.device_interfaces.pop, name, None))
    raw = lambda index: 0  # noqa: E731
    patches.set(interface, "get_raw_stream", staticmethod(raw))
    patches.set(torch._C, "_cuda_getCurrentRawStream", raw)
    patches.set(interface, "Event", torch.cuda.Event)
    patches.set(interface, "Stream", torch.cuda.Stream)
    _compile_fx(machine, patches)
    patches.add(compile_watch.start())
    # Answers that were kept from before, and these when they are over.
    create: Any = hints.DeviceProperties.create
    for cached in (*vars(_triton).values(), getattr(create, "__func__", create)):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
            patches.add(cached.cache_clear)
    workers = device_interface.caching_worker_device_properties
    workers.pop("cuda", None)
    patches.add(lambda: workers.pop("cuda", None))
    patches.set(_triton, "triton_hash_with_backend", lambda: "GPUPROBE")

    patches.set(
        async_compile.AsyncCompile,
        "triton",
        lambda self, name, source, device_str="cuda": NoKernel(machine, name, source),
    )
    patches.set(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided(machine))
    for name, value in {
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "compile_threads": 1,
    }.items():
        before = getattr(config, name)
        setattr(config, name, value)
        patches.add(functools.partial(setattr, config, name, before))
    import torch._functorch.config as functorch_config

    before = functorch_config.enable_autograd_cache
    functorch_config.enable_autograd_cache = False
    patches.add(lambda: setattr(functorch_config, "enable_autograd_cache", before))


def _compile_fx(machine: Machine, patches: Patches) -> None:
    from torch._inductor import compile_fx

    module: Any = compile_fx
    inner = functools.partial(_compile_graph, machine, module.compile_fx_inner)
    whole = module.compile_fx

    @functools.wraps(whole)
    def compile_(model: Any, inputs: Any, inner_compile: Any = inner, **options: Any) -> Any:
        patched = options.get("config_patches")
        if patched:
            options["config_patches"] = _without_timing(machine, patched)
        with machine.tracing.compiling():
            try:
                return whole(model, inputs, inner_compile=inner_compile, **options)
            except Exception as error:  # noqa: BLE001 - it is said, and the program goes on
                _runs_eagerly(machine, error)
                return model

    patches.set(module, "compile_fx", compile_)
    graphs.install(machine, patches)
    _padding(machine, patches)


def _padding(machine: Machine, patches: Patches) -> None:
    """Matrix products with odd sizes: Inductor times whether padding pays, where its estimate does
    not rule it out (``_should_pad`` in ``torch/_inductor/fx_passes/pad_mm.py``).
    """
    from torch._inductor import utils
    from torch._inductor.fx_passes import pad_mm

    def padded(key: str) -> bool:
        machine.assume("matrix products are padded to aligned sizes if torch.compile would time it")
        return True

    def bandwidth() -> float:
        """As ``triton.testing.get_dram_gbps``: two transfers per clock, in GB/s."""
        found = torch.cuda.get_device_properties()
        return found.memory_clock_rate * found.memory_bus_width * 2 / 1e6 / 8

    patches.set(pad_mm, "get_cached_should_pad", padded)
    patches.set(utils, "get_gpu_dram_gbps", bandwidth)


def _without_timing(machine: Machine, patched: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that have kernels chosen by timing them."""
    if any(patched.get(name) for name in _TIMED):
        machine.assume(
            "max-autotune: kernels would be chosen by timing them on the GPU; the default mode's "
            "kernels are used"
        )
    return {name: value for name, value in patched.items() if name not in _TIMED}


def _runs_eagerly(machine: Machine, error: Exception) -> None:
    line = str(error).strip().partition("\n")[0]
    machine.assume(
        f"code that cannot be compiled here runs eagerly: {type(error).__name__}: {line}"
    )


def _compile_graph(
    machine: Machine, original: Callable[..., Any], module: Any, inputs: Any, **options: Any
) -> Any:
    """``compile_fx_inner``: one graph, forward or backward."""
    with machine.tracing.compiling():
        machine.tracing.relabel(module)
        values = None if machine.shapes else Values(machine, module)
        try:
            made = original(module, inputs, **options)
        except Exception as error:  # noqa: BLE001 - it is said, and the program goes on
            _runs_eagerly(machine, error)
            return make_boxed_func(Eagerly(machine, module).run)
        if not hasattr(made, "current_callable"):
            return made  # a graph without operators, which `compile_fx_inner` does not compile
        made.current_callable = Graph(machine, values, made.current_callable)
        return made


def _late(owner: Any, name: str) -> Callable[..., Any]:
    """``owner.name``, looked up when it is called."""
    return lambda *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def _empty_strided(machine: Machine) -> Callable[..., Any]:
    make = torch.ops.aten.empty_strided.default

    def empty_strided_cuda(size: Any, stride: Any, dtype: Any) -> Any:
        with placed_on(machine, machine.local.device), below():
            return make(size, stride, dtype=dtype, device=_META)

    return empty_strided_cuda
