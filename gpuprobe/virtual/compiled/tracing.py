"""Tensors that torch's compiler traces with, on a virtual device.

A fake tensor of a device is that device's to all Python code: Dynamo, decompositions, the
partitioner, Inductor. C++ code is told that it is a meta tensor: autograd would ask a CUDA build
for the device's stream, and end the process. So what C++ code makes "like" such a tensor is asked
for on ``meta``, and `Tracing` sends that to the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor, functional_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import HOST, Machine
from gpuprobe.virtual.torch_patches.keys import above, below

_FakeTensor = fake_tensor.FakeTensor
_FunctionalTensor = functional_tensor.FunctionalTensor
_CPU = torch.device("cpu")
_META = torch.device("meta")
_device_of = torch.ops.prim.device.default
_fake_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_to_dtype = torch.ops.aten.to.dtype
_WITHOUT_DEVICE = {torch.ops.aten.to.device: _to_dtype}
_real_device = torch._C.TensorBase.device.__get__
_excluded: Callable[[str], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded


def traced(tensor: Any) -> Any | None:
    """The fake tensor that a tensor of the compiler's is or wraps; None for the program's own."""
    if isinstance(tensor, _FunctionalTensor):
        tensor = tensor.elem
    if torch._is_functional_tensor(tensor):
        tensor = torch._from_functional_tensor(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return traced(torch._C._functorch.get_unwrapped(tensor))
    return tensor if isinstance(tensor, _FakeTensor) else None


class _Local(threading.local):
    def __init__(self) -> None:
        self.compiling = False


class Tracing:
    """What the kernels of the device key do while the compiler traces."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._local = _Local()

    def under_way(self) -> bool:
        """Whether the operator at hand is the compiler's: one that this thread traces, part of
        one, or one with which it works out a constant.
        """
        return _fake_mode(_FAKE) is not None or self._local.compiling or _excluded("Python")

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """This thread is at work in the compiler."""
        before, self._local.compiling = self._local.compiling, True
        try:
            yield
        finally:
            self._local.compiling = before

    def place_of(self, tensor: Any) -> int:
        """Where a tensor of the compiler's would lie, `HOST` for all others."""
        fake = traced(tensor)
        if fake is None or fake.fake_device.type != "cuda":
            return HOST
        return int(fake.fake_device.index or 0)

    def named(self, device: torch.device | None) -> torch.device | None:
        """The device that is meant by one that an operator was given."""
        if device is None or device.type not in ("meta", "cuda"):
            return device
        if _fake_mode(_FAKE) is None or _excluded("Python"):
            return _CPU if device.type == "cuda" else device  # a constant of the compiler's
        if device.type == "cuda" and device.index is not None:
            return device
        return torch.device("cuda", self._machine.local.device)

    def copy(self, operator: Any, tensor: Any, given: dict[str, Any]) -> Any:
        """``to`` and its kin. C++ code would compare devices, and takes this tensor's to be
        ``meta``: what stays where it is names none.
        """
        device = self.named(given.get("device"))
        fake = traced(tensor) if device is not None and _fake_mode(_FAKE) is not None else None
        if fake is not None and fake.fake_device == device:
            device = None
            operator = _WITHOUT_DEVICE.get(operator, operator)
        given["device"] = device
        if device is None and operator is _to_dtype:
            del given["device"]
        with below():
            return operator(tensor, **given)

    def like(self, tensor: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        """``to`` and ``type_as`` with another tensor, whose dtype and device are meant."""
        fake = traced(other)
        names = ("non_blocking", "copy", "memory_format")
        given = {
            "device": _real_device(other) if fake is None else fake.fake_device,
            "dtype": other.dtype,
            **dict(zip(names, args, strict=False)),
            **kwargs,
        }
        return self.copy(torch.ops.aten.to.device, tensor, given)

    def relabel(self, module: Any) -> None:
        """Name the device in a graph where C++ code asked for ``meta``."""
        device = torch.device("cuda", self._machine.local.device)
        for node in module.graph.nodes:
            if node.kwargs.get("device") == _META:
                node.kwargs = {**node.kwargs, "device": device}


def install(machine: Machine, patches: Patches) -> None:
    """Make the compiler's tensors as this module's docstring has them."""
    machine.tracing = Tracing(machine)
    patches.add(lambda: setattr(machine, "tracing", None))
    original = _FakeTensor.__torch_dispatch__.__func__

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device_of:
            return _to_cpp(args)
        return original(cls, func, types, args, kwargs or {})

    patches.set(_FakeTensor, "__torch_dispatch__", classmethod(dispatch))
    fake_mode: Any = fake_tensor.FakeTensorMode
    within = fake_mode.__torch_dispatch__

    def fake_dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": torch.device("cuda", machine.local.device)}
        return within(mode, func, types, args, kwargs or {})

    patches.set(fake_mode, "__torch_dispatch__", fake_dispatch)
    # A kernel of the device key calls what it stands for below that key: the modes that take this
    # apart, in Python, are above it again.
    for kind in (fake_mode, functional_tensor.FunctionalTensorMode, ProxyTorchDispatchMode):
        patches.set(kind, "__torch_dispatch__", _above(kind.__torch_dispatch__))
    handlers: Any = fake_tensor._DISPATCH_META_HANDLERS
    before = handlers[_device_of]
    handlers[_device_of] = _to_cpp
    patches.add(lambda: handlers.__setitem__(_device_of, before))
    _composite(patches)
    _autocast(patches)
    patches.set(fake_tensor, "init_gpu_context", lambda *device: None)
    # Constants are computed with: copies of them to a device are not made while tracing.
    patches.set(fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda mode: True))

    for kind in (_FakeTensor, _FunctionalTensor):
        patches.set(kind, "is_cuda", property(lambda tensor: tensor.device.type == "cuda"))
        patches.set(kind, "is_cpu", property(lambda tensor: tensor.device.type == "cpu"))
        patches.set(kind, "is_meta", property(lambda tensor: tensor.device.type == "meta"))
        patches.set(kind, "get_device", _index_of)
    patches.set(_FunctionalTensor, "device", property(_device_of_functional))


def _composite(patches: Patches) -> None:
    """Have operators that are made of others (``nll_loss``, ``var``, ``relu6``) be differentiated
    through those, as on CUDA. To C++ code the compiler's tensors are on ``meta``, for which Python
    code in ``torch/_refs`` implements a hundred of these operators: torch takes such a one to be
    a single operator, without a derivative (``resolve_key`` in ``torch/_ops.py``).
    """
    original = torch._ops.resolve_key
    meta, cuda = torch._C.DispatchKey.AutogradMeta, torch._C.DispatchKey.AutogradCUDA

    def resolve(operator: Any, key: Any) -> Any:
        if key != meta:
            return original(operator, key)
        found = original(operator, cuda)
        return original(operator, meta) if found == cuda else found

    def forget() -> None:
        """What torch has resolved already, and keeps."""
        for operator in torch._ops.get_cached_ops():
            operator._uncache_dispatch(meta)

    patches.set(torch._ops, "resolve_key", resolve)
    forget()
    patches.add(forget)


def _above(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        with above():
            return original(*args, **kwargs)

    return dispatch


def _autocast(patches: Patches) -> None:
    """The compiler turns autocast off around what it runs, and the device key with it, which is
    one of autocast's.
    """
    guard: Any = torch._C._DisableAutocast

    @contextmanager
    def disabled() -> Iterator[None]:
        with guard(), above():
            yield

    patches.set(torch._C, "_DisableAutocast", disabled)
    kinds = _autocast_devices()
    patches.set(
        torch._C,
        "_is_any_autocast_enabled",
        lambda: any(torch.is_autocast_enabled(kind) for kind in kinds),
    )


def _autocast_devices() -> list[str]:
    """The devices for which torch has autocast, those aside whose keys gpuprobe uses."""
    found = []
    for kind in ("cuda", "cpu", "xpu", "hpu", "xla", "mps", "mtia"):
        try:
            torch.is_autocast_enabled(kind)
        except RuntimeError:
            continue
        found.append(kind)
    return found


def _to_cpp(args: tuple[Any, ...]) -> torch.device:
    """What C++ code is told of a fake tensor's device."""
    fake = args[0]
    if fake.fake_mode.in_kernel_invocation or fake.fake_device.type == "cuda":
        return _META
    return fake.fake_device


def _index_of(tensor: Any) -> int:
    device = tensor.device
    return -1 if device.type == "cpu" else int(device.index or 0)


def _device_of_functional(tensor: Any) -> torch.device:
    inner = torch._from_functional_tensor(tensor.elem)
    return inner.device
