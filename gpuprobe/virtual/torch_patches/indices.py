"""Devices named by a number: ``device=0``, ``torch.device(0)``.

Where it is given a number, torch's C++ code asks which kind of accelerator it has: there is
none. The functions of Python that take a device are replaced by ones that name its kind, CUDA.
Source: ``THPDevice_pynew`` in ``torch/csrc/Device.cpp``, ``toDevice`` in
``torch/csrc/utils/python_arg_parser.h``.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.jit.annotations

from gpuprobe.patching import Patches

_FACTORIES = (
    "arange",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")


def install(patches: Patches) -> None:
    """Replace `torch.device` and all that takes one as ``device=``."""
    for name in _FACTORIES:
        if hasattr(torch, name):
            patches.set(torch, name, _indexed(getattr(torch, name)))
    for name in _METHODS:
        patches.set(torch.Tensor, name, _indexed(getattr(torch.Tensor, name)))
    parse = torch._C._nn._parse_to

    def parse_to(*args: Any, **options: Any) -> Any:
        """What ``Module.to`` asks."""
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        like = args[0] if args else options.pop("tensor", None)
        if isinstance(like, torch.Tensor):  # C++ code sees where its memory really is
            args = (like.device, like.dtype, *args[1:])
        return indexed_parse(*args, **options)

    indexed_parse = _indexed(parse)
    patches.set(torch._C._nn, "_parse_to", parse_to)
    _device_type(patches)


def device_named(value: Any) -> torch.device:
    """A device as it may be given: itself, text, or the index of a CUDA device."""
    if isinstance(value, torch.device):
        return value
    return torch.device("cuda", value) if isinstance(value, int) else torch.device(value)


def _indexed(original: Callable[..., Any]) -> Callable[..., Any]:
    innermost = inspect.unwrap(original)

    @functools.wraps(original)
    def build(*args: Any, **options: Any) -> Any:
        device = options.get("device")
        if type(device) is int:
            options["device"] = torch.device("cuda", device)
        if args and not isinstance(args[0], torch.Tensor):
            kind = type(args[0])
            overrides = getattr(kind, "__torch_function__", None)
            if overrides is not None:  # a class that is no tensor: TensorDict
                for known in (build, innermost):  # as the class learned of torch's function
                    found = overrides(known, (kind,), args, options)
                    if found is not NotImplemented:
                        return found
        return original(*args, **options)

    return build


def _device_type(patches: Patches) -> None:
    """A stand-in for the class ``torch.device``, whose instances are those of the class itself."""
    real: Any = torch.device

    class Kind(type):
        def __call__(cls, *args: Any, **options: Any) -> Any:
            first = args[0] if args else options.get("device", options.get("index"))
            if type(first) is int and len(args) + len(options) == 1:
                return real("cuda", first)
            return real(*args, **options)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

        def __subclasscheck__(cls, other: type) -> bool:
            return other is cls or issubclass(other, real)

        def __getattr__(cls, name: str) -> Any:
            return getattr(real, name)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is real

        def __hash__(cls) -> int:
            return hash(real)

    stand_in: Any = Kind("device", (), {"__module__": "torch", "__doc__": real.__doc__})
    patches.set(torch, "device", stand_in)

    def reduce(device: Any) -> tuple[Any, ...]:
        """As before: pickle finds the class by its name, and wants the same object."""
        return stand_in, (device.type,) if device.index is None else (device.type, device.index)

    copyreg.pickle(real, reduce)
    patches.add(lambda: copyreg.dispatch_table.pop(real, None))
    of_annotation = torch.jit.annotations.try_ann_to_type

    def try_ann_to_type(ann: Any, *args: Any, **options: Any) -> Any:
        """TorchScript compares by identity; code older than the stand-in names the class."""
        return of_annotation(stand_in if ann is real else ann, *args, **options)

    patches.set_all(torch.jit.annotations, {"try_ann_to_type": try_ann_to_type}, "torch.jit.")
