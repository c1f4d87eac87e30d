"""``torch.tensor``, ``torch.empty`` and their kin: what makes tensors from nothing or from Python
values, where that goes behind the dispatcher's back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import tensors_in
from gpuprobe.virtual.machine import HOST, PINNED, Machine
from gpuprobe.virtual.torch_patches.indices import device_named
from gpuprobe.virtual.torch_patches.intercept import Intercept, placed_on
from gpuprobe.virtual.torch_patches.keys import below
from gpuprobe.virtual.torch_patches.parameters import leaf


def install(machine: Machine, intercept: Intercept, patches: Patches) -> None:
    """``torch.tensor`` and its kin fill memory from Python values behind the dispatcher: they
    do so on the host, and the result is moved.
    """
    # torch keeps the list of its factories, to which `torch.device` contexts apply, from its first
    # use on: it must be of the originals.
    _device_constructors()
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, name, _then_move(getattr(torch, name), machine, intercept))
    _wrappers(machine, patches)
    for name in _SPARSE:
        patches.set(torch, name, _sparse(getattr(torch, name)))
    if machine.shapes:
        _valueless(machine, patches)
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint"):
        patches.set(torch, f"{name}_like", _on_host(getattr(torch, f"{name}_like"), machine))
    for name in ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"):
        patches.set(torch.Tensor, name, _on_host(getattr(torch.Tensor, name), machine))


def _on_host(original: Callable[..., Any], machine: Machine) -> Callable[..., Any]:
    """A factory "like this tensor" that is asked for host memory. Where C++ code asks for that,
    it means the place of the tensor, and does not come by here.
    """

    @functools.wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        tensor = args[0] if args else options.get("input")
        device = options.get("device")
        if (
            device is None
            or machine.local.inside
            or device_named(device).type != "cpu"
            or options.get("pin_memory")
            or not isinstance(tensor, torch.Tensor)
            or machine.place_of(tensor) < 0
        ):
            return original(*args, **options)
        with placed_on(machine, HOST):
            return original(*args, **options)

    return make


def _wrappers(machine: Machine, patches: Patches) -> None:
    """A subclass that wraps tensors (a jagged nested tensor) is, to C++ code, where they are to it:
    autograd asks a device that it takes for CUDA's, and ends the process. To Python it is where
    its parts are.
    """
    original: Any = torch.Tensor._make_wrapper_subclass
    host = torch.device("meta" if machine.shapes else "cpu")

    @functools.wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        device = options.get("device")
        if device is not None and device_named(device).type == "cuda":
            options["device"] = host
        args = tuple(
            host if isinstance(item, torch.device) and item.type == "cuda" else item
            for item in args
        )
        return original(*args, **options)

    patches.set(torch.Tensor, "_make_wrapper_subclass", staticmethod(make))


_SPARSE = (
    "sparse_bsc_tensor",
    "sparse_bsr_tensor",
    "sparse_compressed_tensor",
    "sparse_coo_tensor",
    "sparse_csc_tensor",
    "sparse_csr_tensor",
)


def _sparse(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where their parts lie, then moved: C++ code would move the parts, and ask CUDA to."""

    @functools.wraps(original)
    def build(*args: Any, **options: Any) -> Any:
        device = options.get("device")
        if device is None or device_named(device).type != "cuda":
            return original(*args, **options)
        del options["device"]
        grad = options.pop("requires_grad", False)
        made = original(*args, **options).to(device_named(device))
        return made.requires_grad_() if grad else made

    return build


def _then_move(
    original: Callable[..., Any], machine: Machine, intercept: Intercept
) -> Callable[..., Any]:
    @functools.wraps(original)
    def build(data: Any, *args: Any, **options: Any) -> Any:
        if machine.local.inside:
            return original(data, *args, **options)
        wanted = options.get("device")
        if wanted is None:
            wanted = _default_device()
        device = None if wanted is None else device_named(wanted)
        is_tensor = isinstance(data, torch.Tensor)
        if device is None or device.type == "cpu":
            if not options.get("pin_memory"):
                if is_tensor and machine.place_of(data) >= 0:
                    if original.__name__ == "tensor":
                        return _copy_of(data, device, options)
                    if device is not None:
                        return _shared(original.__name__, data, device, args, options)
                if machine.shapes and options.get("requires_grad"):
                    options["requires_grad"] = False
                    return leaf(machine, original(data, *args, **options))
                return original(data, *args, **options)
        elif device.type != "cuda":
            return original(data, *args, **options)
        if is_tensor:
            place = machine.place_of(data)
            if original.__name__ == "tensor":
                return _copy_of(data, device, options)
            if place >= 0:
                return _shared(original.__name__, data, device, args, options)
        grad = options.pop("requires_grad", False)
        pin = options.pop("pin_memory", False)
        options["device"] = "cpu"
        result = original(data, *args, **options)
        if pin:
            result = intercept.pin(result)
        elif device is not None:
            machine.local.reason = "new tensor from host values"
            try:
                result = result.to(device)
            finally:
                machine.local.reason = ""
        return result.requires_grad_() if grad else result

    return build


def _copy_of(data: Any, device: Any, options: dict[str, Any]) -> Any:
    """``torch.tensor(tensor)``: a detached copy."""
    result = data.detach().to(device=device, dtype=options.get("dtype"), copy=True)
    return result.requires_grad_(options.get("requires_grad", False))


def _shared(
    name: str, data: Any, device: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """``torch.as_tensor(tensor)`` and ``asarray``: the tensor itself, copied only if its device or
    dtype is another one, or with ``copy=True``.
    """
    dtype = args[0] if args else options.get("dtype")
    result = data.to(device=device, dtype=dtype, copy=bool(options.get("copy")))
    if name == "as_tensor":
        return result
    if options.get("requires_grad"):
        return result.requires_grad_()
    return result.detach() if result.requires_grad else result


def _default_device() -> torch.device | None:
    """What ``with torch.device(...)`` or ``set_default_device`` asks for; None for the CPU.

    ``torch.get_default_device`` finds out by making a tensor, so it cannot be asked here.
    """
    for at in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(at)
        if isinstance(mode, DeviceContext):
            return None if mode.device.type == "cpu" else mode.device
    return None


# Factories of what a model is made of. Others keep their values, whatever their size.
_VALUELESS = (
    "empty",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "normal",
    "empty_strided",
)


def _valueless(machine: Machine, patches: Patches) -> None:
    """Large host tensors of floating point have no values either: a model is built on the host
    first, and would need its memory there.
    """

    def wrap(name: str) -> Callable[..., Any]:
        original = getattr(torch, name)

        @functools.wraps(original)
        def build(*args: Any, **options: Any) -> Any:
            if machine.local.inside:
                return original(*args, **options)
            if name == "normal" and any(True for _ in tensors_in((args, options))):
                return original(*args, **options)  # like its arguments
            device = options.get("device")
            if device is None:
                device = _default_device()
            if device is not None and device_named(device).type != "cpu":
                return original(*args, **options)
            dtype = options.get("dtype")
            if dtype is None:
                dtype = _implied(name, args, options)
            if not (dtype.is_floating_point or dtype.is_complex):
                return original(*args, **options)
            given, options = options, {**options, "device": "meta"}
            place = PINNED if options.pop("pin_memory", False) else HOST
            options.pop("generator", None)
            with below(), torch._C._DisableTorchDispatch():
                nbytes = original(*args, **options).untyped_storage().nbytes()
            if machine.in_child() or machine.limits.allow(dtype, nbytes):
                made = original(*args, **{**given, "requires_grad": False})
                return leaf(machine, made) if given.get("requires_grad") else made
            with placed_on(machine, place), below():
                return original(*args, **options)

        return build

    for name in _VALUELESS:
        patches.set(torch, name, wrap(name))


def _implied(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> torch.dtype:
    """The dtype of a factory that was given none."""
    if name == "full":
        fill = options.get("fill_value", args[1] if len(args) > 1 else 0.0)
        if isinstance(fill, bool):
            return torch.bool
        if isinstance(fill, int):
            return torch.int64
        if isinstance(fill, torch.Tensor):
            return fill.dtype
    return torch.get_default_dtype()
