"""What tensors do otherwise on a virtual machine: copies between places, and ways out of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack as dlpack

from gpuprobe.patching import Patches
from gpuprobe.virtual import unknown
from gpuprobe.virtual.machine import PINNED, Machine, is_meta
from gpuprobe.virtual.reads import numbers
from gpuprobe.virtual.reads.known import is_known
from gpuprobe.virtual.torch_patches.indices import device_named
from gpuprobe.virtual.torch_patches.keys import above, passed_by, transformed
from gpuprobe.virtual.torch_patches.parameters import host_values

_Base = torch._C.TensorBase
_CPU = torch.device("cpu")


def install(machine: Machine, patches: Patches) -> None:
    _copies(machine, patches)
    _python_values(machine, patches)
    _new_tensor(patches)
    _record_stream(machine, patches)
    _deepcopy_and_repr(machine, patches)
    _exchange(machine, patches)


def _explicitly(machine: Machine, method: Callable[..., Any]) -> Callable[..., Any]:
    """C++ code calls `to` as well, with the device that it takes a tensor to be on."""

    local = machine.local

    def call(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        before, local.explicit = local.explicit, True
        try:
            if passed_by() and not local.inside:
                with above():  # a class takes its tensors apart
                    return method(tensor, *args, **kwargs)
            return method(tensor, *args, **kwargs)
        finally:
            local.explicit = before

    return functools.wraps(method)(call)


def _device_of(machine: Machine, named: Any) -> torch.device:
    """Of a device without an index, or without a type, C++ code asks CUDA which it is."""
    found = device_named(named)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", machine.local.device)
    return found


def _copies(machine: Machine, patches: Patches) -> None:
    place = machine.place_of
    explicit_to = _explicitly(machine, _Base.to)
    # Called where a transform of ``torch.func`` is at work: the transform takes `to` apart before
    # the kernels of `Intercept` see it, and C++ code finds that there is nothing to do.
    explicit_copy = _explicitly(machine, torch.ops.aten._to_copy.default)

    @functools.wraps(_Base.to)
    def to(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Without a device, C++ code fills in the one that it takes the tensor to be on.
        named = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
        if named is None or isinstance(named, torch.dtype):
            return _Base.to(self, *args, **kwargs)
        rest = args[1:]
        if isinstance(named, torch.Tensor):  # it asks that one in the same way
            named, rest = named.device, (named.dtype, *rest)
            kwargs.pop("tensor", None)
        else:
            kwargs.pop("device", None)
        if not transformed():
            return explicit_to(self, device_named(named), *rest, **kwargs)
        there = _device_of(machine, named)
        if there.type == "cpu" and place(self) >= 0:
            return explicit_copy(self, dtype=rest[0] if rest else kwargs.get("dtype"), device=there)
        return explicit_to(self, there, *rest, **kwargs)

    @functools.wraps(_Base.cuda)
    def cuda(
        self: Any,
        device: Any = None,
        non_blocking: bool = False,
        *,
        memory_format: Any = torch.preserve_format,
    ) -> Any:
        there = _device_of(machine, "cuda" if device is None else device)
        if there.type != "cuda":
            raise ValueError(f"Invalid device, must be cuda device: {there}")
        return _Base.cuda(self, there, non_blocking, memory_format=memory_format)

    explicit_cpu = _explicitly(machine, _Base.cpu)

    @functools.wraps(_Base.cpu)
    def cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if transformed() and place(self) >= 0:
            return explicit_copy(self, device=_CPU)
        return explicit_cpu(self, *args, **kwargs)

    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "to", to)
    patches.set(torch.Tensor, "cpu", cpu)


def _python_values(machine: Machine, patches: Patches) -> None:
    """What gives the program a tensor's values, and may have none to give."""
    place = machine.place_of

    def numpy(tensor: Any, *, force: bool = False) -> Any:
        index = place(tensor)
        if index >= 0:
            if not force:
                raise TypeError(
                    f"can't convert cuda:{index} device type tensor to numpy. Use Tensor.cpu() to "
                    "copy the tensor to host memory first."
                )
            return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
        if machine.shapes:
            if not is_known(machine, tensor) and machine.tag_of(tensor) is not None:
                return unknown.array_of(machine, tensor)
            whole = host_values(machine, tensor)
            array = _Base.numpy(whole.requires_grad_(tensor.requires_grad), force=force)
        else:
            array = _Base.numpy(tensor, force=force)
        if index == PINNED and machine.observer is not None:
            return machine.observer.aliased(tensor, array)
        return array

    patches.set(torch.Tensor, "numpy", numpy)

    def tolist(tensor: Any) -> Any:
        if place(tensor) >= 0:
            return tensor.cpu().tolist() if tensor.dim() else tensor.item()
        if machine.shapes and machine.tag_of(tensor) is not None:
            if not is_known(machine, tensor):
                return unknown.list_of(machine, tensor)
            tensor = host_values(machine, tensor)
        if machine.observer is not None and place(tensor) == PINNED:
            machine.observer.host_use(tensor, False, "tolist")
        return _Base.tolist(tensor)

    patches.set(torch.Tensor, "tolist", tolist)
    if machine.shapes:
        for name, how in (
            ("item", unknown.NUMBER),
            ("__float__", unknown.NUMBER),
            ("__int__", unknown.WHOLE),
            ("__index__", unknown.WHOLE),
            ("__bool__", unknown.TRUTH),
            ("is_nonzero", unknown.TRUTH),
        ):
            patches.set(torch.Tensor, name, unknown.reading(machine, getattr(_Base, name), how))
        numbers.install(patches)


def _record_stream(machine: Machine, patches: Patches) -> None:
    def record_stream(tensor: Any, stream: Any) -> None:
        tag = machine.tag_of(tensor)
        if tag is None or tag.place < 0 or tag.block is None:
            return
        # Whether the stream is busy matters when the block is freed: the event is recorded then.
        machine.devices[tag.place].record_stream(tag.block, stream.number)
        if machine.observer is not None:
            machine.observer.record_stream(tag, stream.number)

    patches.set(torch.Tensor, "record_stream", record_stream)


def _new_tensor(patches: Patches) -> None:
    def new_tensor(tensor: Any, data: Any, **options: Any) -> Any:
        options.setdefault("device", tensor.device)
        if options.get("dtype") is None:
            options["dtype"] = data.dtype if isinstance(data, torch.Tensor) else None
            if options["dtype"] is None:
                options["dtype"] = tensor.dtype
        return torch.tensor(data, **options)

    patches.set(torch.Tensor, "new_tensor", new_tensor)


def _deepcopy_and_repr(machine: Machine, patches: Patches) -> None:
    original_deepcopy = torch.Tensor.__deepcopy__

    def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
        tag = machine.tag_of(tensor) if type(tensor) is torch.Tensor else None
        if tag is None or not tensor.is_leaf:
            return original_deepcopy(tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        with torch.no_grad():
            copy = tensor.detach().clone()
        copy.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copy.grad = deepcopy(tensor.grad, memo)
        memo[id(tensor)] = copy
        return copy

    patches.set(torch.Tensor, "__deepcopy__", deepcopy)

    original_repr = torch.Tensor.__repr__

    def representation(tensor: Any, **kwargs: Any) -> str:
        if not is_meta(tensor) or machine.tag_of(tensor) is None:
            return original_repr(tensor, **kwargs)
        if is_known(machine, tensor):
            text = original_repr(host_values(machine, tensor), **kwargs).removesuffix(")")
            at = text.rfind(", dtype=") % (len(text) + 1)
            device = f", device='{tensor.device}'" if tensor.is_cuda else ""
            grad = ""
            if tensor.grad_fn is not None:
                grad = f", grad_fn=<{tensor.grad_fn.name()}>"
            elif tensor.requires_grad:
                grad = ", requires_grad=True"
            return f"{text[:at]}{device}{text[at:]}{grad})"
        dtype = f", dtype={tensor.dtype}" if tensor.dtype != torch.get_default_dtype() else ""
        return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)}{dtype})"

    patches.set(torch.Tensor, "__repr__", representation)


def _exchange(machine: Machine, patches: Patches) -> None:
    """``__cuda_array_interface__`` and DLPack."""

    def interface(tensor: Any) -> Any:
        if machine.place_of(tensor) < 0:
            raise AttributeError(
                "Can't get __cuda_array_interface__ on non-CUDA tensor type: "
                f"{tensor.type()} If CUDA data is required use tensor.cuda() to copy tensor to "
                "device memory."
            )
        raise unknown.not_modelled("__cuda_array_interface__: code outside torch on the tensor")

    patches.set(torch.Tensor, "__cuda_array_interface__", property(interface))

    original_from, original_to = dlpack.from_dlpack, dlpack.to_dlpack
    capsules: dict[int, tuple[Any, Any]] = {}  # as a capsule does, these keep their tensor alive

    def from_dlpack(data: Any, *args: Any, **kwargs: Any) -> Any:
        """Memory of a virtual device stays that device's."""
        _, tensor = capsules.pop(id(data), (None, data))
        if isinstance(tensor, torch.Tensor) and machine.tag_of(tensor) is not None:
            return tensor.detach()
        return original_from(data, *args, **kwargs)

    def to_dlpack(tensor: Any) -> Any:
        if machine.tag_of(tensor) is None:
            return original_to(tensor)
        capsule = object()
        capsules[id(capsule)] = (capsule, tensor)
        return capsule

    patches.set(dlpack, "to_dlpack", to_dlpack)
    for module in (dlpack, torch):
        patches.set(module, "from_dlpack", from_dlpack)
