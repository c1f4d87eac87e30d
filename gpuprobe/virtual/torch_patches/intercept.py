"""What ``device=`` means on a virtual machine: kernels for every operator that takes one.

They run above autograd, whoever calls: Python, or C++ code inside torch. A CUDA device becomes
the host's memory (or a meta tensor) with the device remembered for the storages made meanwhile.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from gpuprobe.code_origin import folder_of
from gpuprobe.frame_variables import variables
from gpuprobe.torch_support.tensors import storage_key
from gpuprobe.virtual import frames
from gpuprobe.virtual.machine import HOST, PINNED, Machine, is_meta
from gpuprobe.virtual.reads.known import is_known
from gpuprobe.virtual.torch_patches.keys import (
    DEVICE,
    Kernels,
    below,
    schemas,
    single_level,
    transformed,
)
from gpuprobe.virtual.torch_patches.parameters import of_kind

_DDP = f"{folder_of(torch)}nn/parallel/distributed.py"
_CPU = torch.device("cpu")
_META = torch.device("meta")
_COPIES = frozenset({"to", "_to_copy"})
_PINS = frozenset({"pin_memory", "_pin_memory", "is_pinned"})


@contextmanager
def placed_on(machine: Machine, place: int) -> Iterator[None]:
    """Storages that this thread makes meanwhile lie in ``place``."""
    local = machine.local
    before, local.new_place = local.new_place, place
    try:
        yield
    finally:
        local.new_place = before


class Intercept:
    """Registers the kernels, and moves tensors from place to place."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def install(self, kernels: Kernels) -> None:
        for name, schema, names in _operators():
            if "device" in names:
                kernel = self._kernel(name, schema, names)
            else:
                kernel = self._like(_operator(schema))
            if kernel is not None:
                full = f"{name}.{schema.overload_name}" if schema.overload_name else name
                kernels.add(full, kernel, DEVICE)

    def _kernel(self, name: str, schema: Any, names: list[str]) -> Callable[..., Any] | None:
        operator = _operator(schema)
        at = names.index("device")
        positional = None if schema.arguments[at].kwarg_only else at
        if name in _COPIES:
            return self._copy(operator, names, positional)
        if name == "is_pinned":
            return lambda tensor, device=None: self.machine.place_of(tensor) == PINNED
        if name in _PINS:
            return lambda tensor, device=None: self.pin(tensor)
        takes_tensor = bool(names) and names[0] in ("self", "input")
        return self._factory(operator, positional, takes_tensor)

    # -- factories

    def _factory(
        self, operator: Any, positional: int | None, takes_tensor: bool
    ) -> Callable[..., Any]:
        machine = self.machine

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if positional is not None and positional < len(args):
                device = args[positional]
            else:
                device = kwargs.get("device")
            tracing = machine.tracing
            if tracing is not None and tracing.under_way():
                device = tracing.named(device)
                if positional is not None and positional < len(args):
                    args = (*args[:positional], device, *args[positional + 1 :])
                elif device is not None:
                    kwargs["device"] = device
                with below():
                    return operator(*args, **kwargs)
            pin = kwargs.get("pin_memory")
            place = None
            if device is not None and device.type == "cuda":
                place = self.index_of(device)
                if pin:
                    raise RuntimeError(
                        "pin_memory can only be used with CPU tensors"
                        if takes_tensor
                        else "Only dense CPU tensors can be pinned"
                    )
                host = _META if machine.valueless else _CPU
                if positional is not None and positional < len(args):
                    args = (*args[:positional], host, *args[positional + 1 :])
                else:
                    kwargs["device"] = host
            elif pin:
                kwargs["pin_memory"] = False
                place = PINNED
            elif not takes_tensor and (asked := _asked_by_torch(machine)) >= 0:
                place = asked
            if place is not None:
                with placed_on(machine, place), below():
                    return operator(*args, **kwargs)
            with below():
                result = operator(*args, **kwargs)
            if (
                not takes_tensor
                and isinstance(result, torch.Tensor)
                and (key := storage_key(result))
            ):
                machine.made_on_host(key, frames.instruction())
            return result

        return kernel

    def index_of(self, device: torch.device) -> int:
        """The index of a CUDA device, the thread's current one where it names none. Raises
        CUDA's error where there is no such device.
        """
        machine = self.machine
        index = machine.local.device if device.index is None else device.index
        if index >= machine.count:
            raise _accelerator_error()(
                "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have "
                f"enough GPUs? (cuda:{index} of {machine.count} virtual devices)"
            )
        return index

    # -- copies

    def _copy(self, operator: Any, names: list[str], positional: int | None) -> Callable[..., Any]:
        machine = self.machine
        local = machine.local

        def kernel(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0]
            if not isinstance(tensor, torch.Tensor):  # a number that C++ wraps as a tensor
                with below():
                    return operator(*args, **kwargs)
            given = dict(zip(names[1:], args[1:], strict=False))
            given.update(kwargs)
            tracing = machine.tracing
            if tracing is not None and tracing.under_way():
                return tracing.copy(operator, tensor, given)
            device = given.get("device")
            source = _place_of(machine, tensor)
            # What the program named is found here; what is called for it, a transform may send
            # through this kernel again, with the host's device.
            explicit, local.explicit = local.explicit, False
            try:
                if device is None:
                    place = source
                elif device.type == "cuda":
                    place = self.index_of(device)
                elif not explicit and device.type in ("cpu", "meta"):
                    place = source  # C++ code that means "where this tensor is"
                elif device.type == "cpu":
                    place = source if source < 0 else HOST
                else:
                    with below():
                        return operator(*args, **kwargs)
                if place == source:
                    if device is not None:
                        given["device"] = _META if is_meta(tensor) else _CPU
                    if given.get("pin_memory"):
                        given["pin_memory"] = None
                    with below():
                        return operator(tensor, **given)
                options = {name: given.get(name) for name in ("dtype", "layout", "memory_format")}
                return self.move(
                    tensor, place, non_blocking=bool(given.get("non_blocking")), **options
                )
            finally:
                local.explicit = explicit

        return kernel

    def _like(self, operator: Any) -> Callable[..., Any]:
        machine = self.machine

        def kernel(tensor: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
            tracing = machine.tracing
            if tracing is not None and tracing.under_way():
                return tracing.like(tensor, other, *args, **kwargs)
            source, place = machine.place_of(tensor), machine.place_of(other)
            if source == place or (source < 0 and place < 0):
                # In inference mode, the parts of this come back, with the host's device.
                explicit, machine.local.explicit = machine.local.explicit, False
                try:
                    with below():
                        return operator(tensor, other, *args, **kwargs)
                finally:
                    machine.local.explicit = explicit
            blocking = args[0] if args else kwargs.get("non_blocking", False)
            return self.move(tensor, place, dtype=other.dtype, non_blocking=blocking)

        return kernel

    def move(
        self,
        tensor: Any,
        place: int,
        *,
        dtype: Any = None,
        layout: Any = None,
        memory_format: Any = None,
        non_blocking: bool = False,
        meta: bool | None = None,
    ) -> Any:
        """A copy of ``tensor`` in another place, differentiable. ``meta``: whether it is to have
        no memory, whatever is known of its values.
        """
        if place < 0 and non_blocking and is_known(self.machine, tensor):
            place = PINNED  # as `_to_copy` does for copies that are not waited for
        copy = (place, dtype, layout, memory_format, non_blocking, meta)
        if torch.is_grad_enabled() and tensor.requires_grad:
            with single_level():
                return _ToCopy.apply(tensor, self, copy)
        return self.copy(tensor, *copy)

    def copy(
        self,
        tensor: Any,
        place: int,
        dtype: Any,
        layout: Any,
        memory_format: Any,
        non_blocking: bool,
        meta: bool | None,
    ) -> Any:
        """What `move` does once autograd has been taken care of."""
        machine = self.machine
        if _is_jagged(tensor):
            memory_format = torch.preserve_format
            return _jagged_again(
                tensor, lambda part: self.copy(part, place, dtype, None, memory_format,
                                               non_blocking, meta),
                lambda part: self.copy(part, place, None, None, memory_format, non_blocking, None),
            )  # fmt: skip
        host = _CPU
        if machine.valueless and (place >= 0 or not is_known(machine, tensor)):
            host = _META
        with placed_on(machine, place), below():
            made = torch.ops.aten._to_copy.default(
                tensor,
                dtype=dtype,
                layout=layout,
                device=host,
                non_blocking=non_blocking,
                memory_format=memory_format,
            )
        return made if meta is None else of_kind(machine, made, meta)

    def pin(self, tensor: Any) -> Any:
        """``Tensor.pin_memory``."""
        machine = self.machine
        place = machine.place_of(tensor)
        if place == PINNED:
            return tensor
        if place >= 0:
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        with placed_on(machine, PINNED), below():
            return tensor.clone(memory_format=torch.contiguous_format)


def _is_jagged(tensor: Any) -> bool:
    return torch._C._dispatch_keys(tensor).has(_NESTED) and hasattr(tensor, "_offsets")


_NESTED = torch._C.DispatchKey.NestedTensor


def _place_of(machine: Machine, tensor: Any) -> int:
    return machine.place_of(tensor._values if _is_jagged(tensor) else tensor)


def _jagged_again(
    tensor: Any, of_values: Callable[[Any], Any], of_indices: Callable[[Any], Any]
) -> Any:
    """A jagged tensor of other parts, with the same symbol for its ragged dimension. torch's own
    code (``to_copy_default`` in ``torch/nested/_internal/ops.py``) asks C++ code whether offsets
    are on the device that the values are on, and all are on the host there.
    """
    from torch.nested._internal import nested_tensor as nested

    lengths = tensor._lengths
    offsets = of_indices(tensor._offsets)
    moved = None if lengths is None else of_indices(lengths)
    ragged = tensor._offsets if lengths is None else lengths
    symbols = nested._tensor_symint_registry
    symbols[offsets if moved is None else moved] = symbols[ragged]
    return nested.NestedTensor(
        of_values(tensor._values),
        offsets=offsets,
        lengths=moved,
        _ragged_idx=tensor._ragged_idx,
        _metadata_cache=tensor._metadata_cache,
    )


class _ToCopy(torch.autograd.function._SingleLevelFunction):
    """A copy to another place whose gradient goes the way back. A transform of ``torch.func`` has
    taken its own level off where a kernel is called, so that the plain kind of function is right.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any, intercept: Any, copy: Any) -> Any:
        ctx.intercept, ctx.copy = intercept, copy
        ctx.back = (_place_of(intercept.machine, tensor), tensor.dtype)
        ctx.meta = is_meta(tensor) if intercept.machine.shapes else None
        if not transformed():
            return intercept.copy(tensor, *copy)
        with torch.enable_grad(), _set_fwd_grad_enabled(True):  # for the transforms further out
            return intercept.copy(tensor, *copy)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        place, dtype = ctx.back
        return ctx.intercept.move(grad, place, dtype=dtype, meta=ctx.meta), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *rest: Any) -> Any:
        return ctx.intercept.copy(tangent, *ctx.copy)


def _asked_by_torch(machine: Machine) -> int:
    """The device of memory that torch's C++ code takes to be where it works: gradients that the
    backward pass makes of nothing, the gradient buckets of DistributedDataParallel. `HOST` for
    all other callers.
    """
    if frames.in_engine():
        return _place_of_gradients(machine, torch._C._current_autograd_node())
    frame = frames.caller()
    if frame is None or frame.f_code.co_filename != _DDP:
        return HOST
    owner = variables(frame).get("self")
    for parameter in owner.parameters() if isinstance(owner, torch.nn.Module) else ():
        return machine.place_of(parameter)
    return HOST


def _place_of_gradients(machine: Machine, node: Any) -> int:
    """Where the nearest leaves behind a node of the backward pass lie, or the nearest copies
    between places left them.
    """
    nodes = deque(after for after, _ in node.next_functions)
    seen = set()
    while nodes:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _ToCopy._backward_cls):
            return int(node.copy[0])
        if (leaf := getattr(node, "variable", None)) is not None:
            return machine.place_of(leaf)
        nodes.extend(after for after, _ in node.next_functions)
    return HOST


@functools.cache
def _operators() -> list[tuple[str, Any, list[str]]]:
    """Operators that take a device, or a tensor whose device is meant: their names, schemas and
    the names of their arguments.
    """
    found = []
    for schema in schemas("aten"):
        names = [argument.name for argument in schema.arguments]
        name = schema.name.removeprefix("aten::")
        if "out" in names or name.endswith("_out"):
            continue
        if "device" in names or (name in ("to", "type_as") and "other" in names):
            found.append((name, schema, names))
    return found


def _operator(schema: Any) -> Any:
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
    return getattr(packet, schema.overload_name or "default")


def _accelerator_error() -> type[Exception]:
    return getattr(torch, "AcceleratorError", RuntimeError)
