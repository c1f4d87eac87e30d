"""What tensors and storages answer about themselves on a virtual machine.

Replaced on the Python classes ``torch.Tensor`` and ``torch.UntypedStorage``: C++ code goes on
seeing CPU or meta tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpuprobe.patching import Patches
from gpuprobe.virtual import values
from gpuprobe.virtual.machine import PINNED, Machine, Tag, is_meta
from gpuprobe.virtual.torch_patches import constructors, indices
from gpuprobe.virtual.torch_patches.intercept import Intercept
from gpuprobe.virtual.torch_patches.keys import below, transformed

__all__ = ["install"]

_Base = torch._C.TensorBase
_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Attribute(property):
    """In place of an attribute that C++ defines: Dynamo asks those for their class."""

    __objclass__ = torch.Tensor


def install(machine: Machine, intercept: Intercept, patches: Patches) -> None:
    """Replace what needs to know about the virtual machine."""
    _attributes(machine, patches)
    _methods(machine, intercept, patches)
    _storages(machine, patches)
    constructors.install(machine, intercept, patches)
    indices.install(patches)
    _legacy_types(machine, patches)
    _serialization(machine, patches)
    _compile(machine, patches)
    _grouping(machine, patches)


def _attributes(machine: Machine, patches: Patches) -> None:
    devices = [torch.device("cuda", index) for index in range(len(machine.devices))]
    real = {
        name: getattr(_Base, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")
    }

    local = machine.local

    def tag_of(tensor: Any) -> Tag | None:
        if local.inside:
            return None
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            inner = tensor.__tensor_flatten__()[0]  # a DTensor is where its parts are
            return tag_of(getattr(tensor, inner[0])) if inner else None
        return machine.tag_of(tensor)

    def device(tensor: Any) -> torch.device:
        tag = tag_of(tensor)
        if tag is None:
            return real["device"](tensor)
        return devices[tag.place] if tag.place >= 0 else _CPU

    def is_cuda(tensor: Any) -> bool:
        tag = tag_of(tensor)
        return tag is not None and tag.place >= 0

    def is_cpu(tensor: Any) -> bool:
        tag = tag_of(tensor)
        return bool(real["is_cpu"](tensor)) if tag is None else tag.place < 0

    def tensor_is_meta(tensor: Any) -> bool:
        return tag_of(tensor) is None and bool(real["is_meta"](tensor))

    def set_grad_device(tensor: Any, value: Any) -> None:
        raise AttributeError("attribute 'device' of 'torch._C.TensorBase' objects is not writable")

    for name, getter in (
        ("device", device),
        ("is_cuda", is_cuda),
        ("is_cpu", is_cpu),
        ("is_meta", tensor_is_meta),
    ):
        patches.set(torch.Tensor, name, _Attribute(getter, set_grad_device))

    grad = _Base.grad

    def set_grad(tensor: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            mine, other = machine.place_of(tensor), machine.place_of(value)
            if mine != other and max(mine, other) >= 0:
                raise RuntimeError("assigned grad has data located on a different device")
        grad.__set__(tensor, value)

    patches.set(
        torch.Tensor, "grad", _Attribute(grad.__get__, set_grad, grad.__delete__, grad.__doc__)
    )

    def get_device(tensor: Any) -> int:
        tag = tag_of(tensor)
        return tag.place if tag is not None and tag.place >= 0 else -1

    patches.set(torch.Tensor, "get_device", get_device)
    patches.set(torch, "get_device", get_device)

    def data_ptr(tensor: Any) -> int:
        tag = tag_of(tensor)
        if tag is None or tag.block is None:
            return _Base.data_ptr(tensor)
        return tag.block.address + tensor.storage_offset() * tensor.element_size()

    patches.set(torch.Tensor, "data_ptr", data_ptr)


def _methods(machine: Machine, intercept: Intercept, patches: Patches) -> None:
    def place(tensor: Any) -> int:
        return machine.place_of(tensor)

    def numpy(tensor: Any, *, force: bool = False) -> Any:
        index = place(tensor)
        if index >= 0:
            if not force:
                raise TypeError(
                    f"can't convert cuda:{index} device type tensor to numpy. Use Tensor.cpu() to "
                    "copy the tensor to host memory first."
                )
            return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
        if is_meta(tensor) and machine.tag_of(tensor) is not None:
            raise values.refuse("numpy()")
        array = _Base.numpy(tensor, force=force)
        if index == PINNED and machine.observer is not None:
            return machine.observer.aliased(tensor, array)
        return array

    patches.set(torch.Tensor, "numpy", numpy)

    local = machine.local

    def explicitly(method: Callable[..., Any]) -> Callable[..., Any]:
        """C++ code calls `to` as well, with the device that it takes a tensor to be on."""

        def call(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
            before, local.explicit = local.explicit, True
            try:
                return method(tensor, *args, **kwargs)
            finally:
                local.explicit = before

        return functools.wraps(method)(call)

    explicit_to = explicitly(_Base.to)
    # Called where a transform of ``torch.func`` is at work: the transform takes `to` apart before
    # the kernels of `Intercept` see it, and C++ code finds that there is nothing to do.
    explicit_copy = explicitly(torch.ops.aten._to_copy.default)

    def device_of(named: Any) -> torch.device:
        """Of a device without an index, or without a type, C++ code asks CUDA which it is."""
        found = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
        if found.type == "cuda" and found.index is None:
            return torch.device("cuda", machine.local.device)
        return found

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
            if isinstance(named, int):
                named = torch.device("cuda", named)
            return explicit_to(self, named, *rest, **kwargs)
        there = device_of(named)
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
        there = torch.device("cuda", machine.local.device) if device is None else device_of(device)
        if there.type != "cuda":
            raise ValueError(f"Invalid device, must be cuda device: {there}")
        return _Base.cuda(self, there, non_blocking, memory_format=memory_format)

    explicit_cpu = explicitly(_Base.cpu)

    @functools.wraps(_Base.cpu)
    def cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if transformed() and place(self) >= 0:
            return explicit_copy(self, device=_CPU)
        return explicit_cpu(self, *args, **kwargs)

    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "to", to)
    patches.set(torch.Tensor, "cpu", cpu)

    def tolist(tensor: Any) -> Any:
        if place(tensor) >= 0:
            return tensor.cpu().tolist() if tensor.dim() else tensor.item()
        if is_meta(tensor) and machine.tag_of(tensor) is not None:
            raise values.refuse("tolist()")
        if machine.observer is not None and place(tensor) == PINNED:
            machine.observer.host_use(tensor, False, "tolist")
        return _Base.tolist(tensor)

    patches.set(torch.Tensor, "tolist", tolist)
    if machine.shapes:
        for name in ("item", "__float__"):
            patches.set(torch.Tensor, name, values.as_number(machine, getattr(_Base, name)))

    def record_stream(tensor: Any, stream: Any) -> None:
        tag = machine.tag_of(tensor)
        if tag is None or tag.place < 0 or tag.block is None:
            return
        observer = machine.observer
        # The event that the allocator records for an idle stream is done at once.
        if observer is None or not observer.idle(tag.place, stream.number):
            machine.devices[tag.place].record_stream(tag.block, stream.number)
        if observer is not None:
            observer.record_stream(tag, stream.number)

    patches.set(torch.Tensor, "record_stream", record_stream)

    def new_tensor(tensor: Any, data: Any, **options: Any) -> Any:
        options.setdefault("device", tensor.device)
        if options.get("dtype") is None:
            options["dtype"] = data.dtype if isinstance(data, torch.Tensor) else None
            if options["dtype"] is None:
                options["dtype"] = tensor.dtype
        return torch.tensor(data, **options)

    patches.set(torch.Tensor, "new_tensor", new_tensor)

    @functools.wraps(_Base.new)
    def new(tensor: Any, *args: Any, **options: Any) -> Any:
        """The constructor of torch before 0.4, of the tensor's own kind."""
        if machine.tag_of(tensor) is None:
            return _Base.new(tensor, *args, **options)
        device = options.get("device")
        make = {"dtype": tensor.dtype, "device": tensor.device if device is None else device}
        if args and isinstance(args[0], torch.Tensor):
            return args[0].detach()
        if args and isinstance(args[0], (torch.UntypedStorage, torch.TypedStorage)):
            return torch.empty(0, **make).set_(args[0])
        if args and not isinstance(args[0], (int, torch.Size, torch.SymInt)):
            return torch.tensor(args[0], **make)
        size = options.get("size", args[0] if args and isinstance(args[0], torch.Size) else args)
        return torch.empty(size or (0,), **make)

    patches.set(torch.Tensor, "new", new)

    original_type = torch.Tensor.type

    def type_(tensor: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = original_type(tensor)
            short = name.rpartition(".")[2]
            if place(tensor) >= 0:
                return f"torch.cuda.{short}"
            return f"torch.{short}" if machine.tag_of(tensor) is not None else name
        text = dtype if isinstance(dtype, str) else None
        if text is None and not isinstance(dtype, torch.dtype):
            text = f"{dtype.__module__}.{dtype.__name__}"
        if text is not None:
            on_device = text.startswith("torch.cuda.")
            wanted = _LEGACY[text.rpartition(".")[2].removesuffix("Tensor")]
            device = "cuda" if on_device else "cpu"
            if on_device and place(tensor) >= 0:
                device = f"cuda:{place(tensor)}"
            return tensor.to(device=device, dtype=wanted, non_blocking=non_blocking)
        return tensor.to(dtype=dtype, non_blocking=non_blocking)

    patches.set(torch.Tensor, "type", type_)

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
        dtype = f", dtype={tensor.dtype}" if tensor.dtype != torch.get_default_dtype() else ""
        return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)}{dtype})"

    patches.set(torch.Tensor, "__repr__", representation)

    def interface(tensor: Any) -> Any:
        index = place(tensor)
        if index < 0:
            raise AttributeError(
                "Can't get __cuda_array_interface__ on non-CUDA tensor type: "
                f"{tensor.type()} If CUDA data is required use tensor.cuda() to copy tensor to "
                "device memory."
            )
        raise values.not_modelled("__cuda_array_interface__: code outside torch on the tensor")

    patches.set(torch.Tensor, "__cuda_array_interface__", property(interface))

    import torch.utils.dlpack as dlpack

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


_LEGACY = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Bool": torch.bool,
}


def _storages(machine: Machine, patches: Patches) -> None:
    tags = machine.tags
    Storage = torch.UntypedStorage
    base = torch._C.StorageBase

    def tag_of(storage: Any) -> Tag | None:
        return tags.get(storage._cdata)

    original_device = base.device.__get__

    def device(storage: Any) -> torch.device:
        tag = tag_of(storage)
        if tag is None:
            return original_device(storage)
        return torch.device("cuda", tag.place) if tag.place >= 0 else _CPU

    patches.set(Storage, "device", property(device))

    def is_cuda(storage: Any) -> bool:
        tag = tag_of(storage)
        return tag is not None and tag.place >= 0

    patches.set(Storage, "is_cuda", property(is_cuda))

    def data_ptr(storage: Any) -> int:
        tag = tag_of(storage)
        if tag is None or tag.block is None:
            return base.data_ptr(storage)
        return tag.block.address

    patches.set(Storage, "data_ptr", data_ptr)

    def resize_(storage: Any, nbytes: int) -> Any:
        result = base.resize_(storage, nbytes)
        tag = tag_of(storage)
        if tag is not None and tag.nbytes != storage.nbytes():
            machine.resized(tag, storage)
        return result

    patches.set(Storage, "resize_", resize_)

    def as_tensor(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=original_device(storage)).set_(storage)

    def cpu(storage: Any) -> Any:
        if is_cuda(storage):
            return as_tensor(storage).cpu().untyped_storage()
        return original_cpu(storage)

    original_cpu = Storage.cpu
    patches.set(Storage, "cpu", cpu)

    def clone(storage: Any) -> Any:
        if tag_of(storage) is None:
            return original_clone(storage)
        return as_tensor(storage).clone().untyped_storage()

    original_clone = Storage.clone
    patches.set(Storage, "clone", clone)


def _legacy_types(machine: Machine, patches: Patches) -> None:
    """``torch.cuda.FloatTensor`` and its like."""
    for title, dtype in _LEGACY.items():
        name = f"{title}Tensor"

        class Kind(type):
            _dtype = dtype

            def __instancecheck__(cls, value: Any) -> bool:
                return (
                    isinstance(value, torch.Tensor)
                    and value.dtype == cls._dtype
                    and machine.place_of(value) >= 0
                )

            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                if args and not isinstance(args[0], int):
                    return torch.tensor(*args, dtype=cls._dtype, device="cuda")
                return torch.empty(args or (0,), dtype=cls._dtype, device="cuda")

        made = Kind(name, (), {"__module__": "torch.cuda", "dtype": dtype, "is_cuda": True})
        patches.set(torch.cuda, name, made)

    original = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        text = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        if not text.startswith("torch.cuda."):
            original(kind)
            torch.set_default_device(None)
            return
        torch.set_default_dtype(_LEGACY[text.rpartition(".")[2].removesuffix("Tensor")])
        torch.set_default_device("cuda")

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)


def _serialization(machine: Machine, patches: Patches) -> None:
    """``torch.save`` and ``torch.load`` know where a storage lies, and put it there."""
    import torch.serialization as serialization

    def tag(storage: Any) -> str | None:
        tag = machine.tags.get(storage._cdata)
        return f"cuda:{tag.place}" if tag is not None and tag.place >= 0 else None

    def deserialize(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        device = torch.device(location)
        index = machine.local.device if device.index is None else device.index
        if index >= len(machine.devices):
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but "
                f"torch.cuda.device_count() is {len(machine.devices)}. Please use torch.load "
                "with map_location to map your storages to an existing device."
            )
        untyped = storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
        with below():
            if machine.shapes:
                untyped = torch.UntypedStorage(untyped.nbytes(), device="meta")
        if machine.tags.get(untyped._cdata) is None:
            machine.track(untyped, index)
        return untyped

    before = list(serialization._package_registry)
    serialization.register_package(-1, tag, deserialize)

    def undo() -> None:
        serialization._package_registry[:] = before

    patches.add(undo)


def _compile(machine: Machine, patches: Patches) -> None:
    """Compiled code would be built for the host: it runs eagerly, and the report says so."""

    def compile_(model: Any = None, **options: Any) -> Any:
        machine.assume("what torch.compile would compile runs eagerly: fused kernels save memory")
        if model is not None:
            machine.compiled[_name_of(model)] = None
        return model if model is not None else lambda function: function

    patches.set(torch, "compile", compile_)
    patches.set(
        torch.nn.Module, "compile", lambda module, *args, **kwargs: compile_(module) and None
    )


def _name_of(code: Any) -> str:
    """What a reader knows a module or a function by."""
    if isinstance(code, torch.nn.Module):
        return type(code).__qualname__
    return str(getattr(code, "__qualname__", type(code).__qualname__))


def _grouping(machine: Machine, patches: Patches) -> None:
    """Optimizers group their tensors by device and dtype, in C++: the device is the host's."""
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(tensorlists: Any, with_indices: bool = False) -> Any:
        found: dict[Any, Any] = {}
        for (_, dtype), (lists, positions) in group(tensorlists, True).items():
            for at, index in enumerate(positions):
                first = lists[0][at]
                key = (_CPU if first is None else first.device, dtype)
                columns, places = found.setdefault(key, ([[] for _ in lists], []))
                for column, values_ in zip(columns, lists, strict=True):
                    if values_:
                        column.append(values_[at])
                places.append(index)
        if not with_indices:
            return {key: (columns, []) for key, (columns, _) in found.items()}
        return found

    patches.set(torch._C, "_group_tensors_by_device_and_dtype", grouped)
