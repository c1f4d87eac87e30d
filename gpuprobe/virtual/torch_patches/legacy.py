"""Names from before torch 0.4: ``torch.cuda.FloatTensor``, ``Tensor.type``, ``Tensor.new``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

_Base = torch._C.TensorBase
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


def install(machine: Machine, patches: Patches) -> None:
    _types(machine, patches)
    _default_type(patches)
    _new(machine, patches)
    _type(machine, patches)


def _types(machine: Machine, patches: Patches) -> None:
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

            def __call__(cls, *args: Any, device: Any = "cuda", **kwargs: Any) -> Any:
                make = {"dtype": cls._dtype, "device": device}
                if len(args) == 1 and isinstance(args[0], torch.Size):
                    args = tuple(args[0])
                if args and isinstance(args[0], torch.Tensor):
                    return _same_kind(args[0], machine, **make)
                if args and isinstance(args[0], (torch.UntypedStorage, torch.TypedStorage)):
                    return torch.empty(0, **make).set_(args[0])
                if args and not isinstance(args[0], int):
                    return torch.tensor(*args, **make)
                return torch.empty(args or (0,), **make)

        made = Kind(name, (), {"__module__": "torch.cuda", "dtype": dtype, "is_cuda": True})
        patches.set(torch.cuda, name, made)


def _same_kind(tensor: Any, machine: Machine, *, dtype: torch.dtype, device: Any) -> Any:
    """The constructor of a tensor type, given a tensor: an alias. Raises TypeError for one of
    another type (``legacy_tensor_generic_ctor_new`` in ``torch/csrc/utils/tensor_new.cpp``).
    """
    if tensor.dtype != dtype or machine.place_of(tensor) < 0:
        raise TypeError(f"expected a CUDA tensor of {dtype} (got {tensor.type()})")
    return tensor.detach()


def _default_type(patches: Patches) -> None:
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


def _new(machine: Machine, patches: Patches) -> None:
    @functools.wraps(_Base.new)
    def new(tensor: Any, *args: Any, **options: Any) -> Any:
        """The constructor of torch before 0.4, of the tensor's own kind."""
        if machine.tag_of(tensor) is None:
            return _Base.new(tensor, *args, **options)
        device = options.get("device")
        make = {"dtype": tensor.dtype, "device": tensor.device if device is None else device}
        if tensor.layout is torch.sparse_coo:  # indices, values and a size, or nothing
            if not args:
                return torch.sparse_coo_tensor(size=(0,), **make)
            return torch.sparse_coo_tensor(*args, **make)
        if args and isinstance(args[0], torch.Tensor):
            return args[0].detach()
        if args and isinstance(args[0], (torch.UntypedStorage, torch.TypedStorage)):
            return torch.empty(0, **make).set_(args[0])
        if args and not isinstance(args[0], (int, torch.Size, torch.SymInt)):
            return torch.tensor(args[0], **make)
        size = options.get("size", args[0] if args and isinstance(args[0], torch.Size) else args)
        return torch.empty(size or (0,), **make)

    patches.set(torch.Tensor, "new", new)


def _type(machine: Machine, patches: Patches) -> None:
    place = machine.place_of
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
