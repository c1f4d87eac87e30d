"""``torch.autocast("cuda")`` on a virtual device.

torch's own kernels for the AutocastCUDA key are in every build, and cast nothing that is not on
a CUDA device. These do what those do, for tensors on a virtual one. Which operators have one is
asked of the installed torch; what is done to their arguments is listed here. Source:
``aten/src/ATen/autocast_mode.h`` and ``.cpp``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.torch_patches.keys import CAST, Kernels, below_cast, exclude, include, schemas

LOWER: Final = frozenset(
    [
        "_convolution",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "prelu",
        "addmm",
        "addmv",
        "addr",
        "matmul",
        "einsum",
        "mm",
        "mv",
        "linalg_vecdot",
        "linear",
        "addbmm",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "linalg_multi_dot",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "_scaled_dot_product_flash_attention",
        "scaled_dot_product_attention",
    ]
)
"""``lower_precision_fp``: every argument to the autocast dtype."""

SET_DTYPE: Final = frozenset(
    [
        "prod",
        "softmax",
        "log_softmax",
        "cumprod",
        "cumsum",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "sum",
    ]
)
"""``fp32_set_opt_dtype``: the result's dtype is float32, where the call names none."""

PROMOTE: Final = frozenset(
    [
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "vdot",
        "grid_sampler",
        "index_put",
        "tensordot",
        "scatter_add",
    ]
)
"""``promote``: every argument to the widest dtype among them."""

BANNED: Final = frozenset({"binary_cross_entropy"})
_APPEND_DTYPE: Final = frozenset({"norm"})
# All others are ``fp32``: every argument to float32.


class Casts:
    """The casts, and the cache of casted weights."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._cache: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def eligible(self, value: Any) -> bool:
        """A floating tensor on a device, but not of double precision (``is_eligible``)."""
        return (
            isinstance(value, torch.Tensor)
            and value.dtype.is_floating_point
            and value.dtype is not torch.float64
            and self._machine.place_of(value) >= 0
        )

    def to(self, value: Any, dtype: torch.dtype) -> Any:
        """``cached_cast`` of one argument: a tensor, a list of them, or something else."""
        if isinstance(value, torch.Tensor):
            if value.dtype is dtype or not self.eligible(value):
                return value
            if (
                value.dtype is torch.float32
                and value.requires_grad
                and value.is_leaf
                and not value._is_view()
                and dtype is torch.get_autocast_dtype("cuda")
                and torch.is_autocast_cache_enabled()
                and not torch.is_inference_mode_enabled()
            ):
                found = self._cache.get(id(value))
                if found is not None and found[0]() is value:
                    return found[1]
                made = value.to(dtype)
                self._cache[id(value)] = (weakref.ref(value), made)
                return made
            return value.to(dtype)
        if type(value) in (list, tuple):
            return type(value)(self.to(item, dtype) for item in value)
        return value

    def clear(self) -> None:
        """``torch.clear_autocast_cache``."""
        self._cache.clear()

    def widest(self, values: Any, dtype: torch.dtype) -> torch.dtype:
        """``promote_type``: float32 if any eligible tensor has it."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if self.eligible(value):
                    dtype = torch.promote_types(dtype, value.dtype)
            elif isinstance(value, (list, tuple)):
                dtype = self.widest(value, dtype)
        return dtype


def install(machine: Machine, kernels: Kernels, patches: Patches) -> None:
    """Register the kernels, and have them follow ``torch.set_autocast_enabled``."""
    casts = Casts(machine)
    for name, operator in _operators():
        base = name.partition(".")[0]
        kernels.add(name, _kernel(casts, base, operator), CAST)

    original = torch.set_autocast_enabled

    def set_enabled(*args: Any) -> None:
        original(*args)
        device, enabled = args if len(args) == 2 else ("cuda", args[0])
        if device == "cuda":
            (include if enabled else exclude)(CAST)

    patches.set(torch, "set_autocast_enabled", set_enabled)
    clear = torch.clear_autocast_cache

    def clear_cache() -> None:
        clear()
        casts.clear()

    patches.set(torch, "clear_autocast_cache", clear_cache)
    patches.add(lambda: exclude(CAST))


@functools.cache
def _operators() -> list[tuple[str, Any]]:
    """Every operator with an AutocastCUDA kernel in this torch."""
    found = []
    for schema in schemas("aten"):
        full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        try:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCUDA"):
                continue
        except RuntimeError:  # an operator of TorchScript only
            continue
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
        found.append(
            (full.removeprefix("aten::"), getattr(packet, schema.overload_name or "default"))
        )
    return found


def _kernel(casts: Casts, name: str, operator: Any) -> Callable[..., Any]:
    if name in BANNED:
        return _banned(casts, operator)
    if name in SET_DTYPE:
        return _set_dtype(casts, operator)
    if name in _APPEND_DTYPE:
        return _append_dtype(casts, operator)
    if name in PROMOTE:

        def promote(*args: Any, **kwargs: Any) -> Any:
            with below_cast():
                values = (*args, *kwargs.values())
                dtype = casts.widest(values, torch.get_autocast_dtype("cuda"))
                return _call(casts, operator, args, kwargs, dtype)

        return promote
    lower = name in LOWER

    def cast(*args: Any, **kwargs: Any) -> Any:
        with below_cast():
            dtype = torch.get_autocast_dtype("cuda") if lower else torch.float32
            return _call(casts, operator, args, kwargs, dtype)

    return cast


def _call(
    casts: Casts, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Any:
    to = casts.to
    return operator(
        *[to(value, dtype) for value in args],
        **{key: to(value, dtype) for key, value in kwargs.items()},
    )


def _set_dtype(casts: Casts, operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    at = names.index("dtype")
    keyword = operator._schema.arguments[at].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with below_cast():
            if casts.eligible(args[0]):
                if not keyword and at < len(args):
                    if args[at] is None:
                        args = (*args[:at], torch.float32, *args[at + 1 :])
                elif kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
            return operator(*args, **kwargs)

    return kernel


def _append_dtype(casts: Casts, operator: Any) -> Callable[..., Any]:
    """``norm`` without a dtype becomes ``norm`` with one."""
    overload = {
        "Scalar": "ScalarOpt_dtype",
        "ScalarOpt_dim": "ScalarOpt_dim_dtype",
    }.get(operator._overloadname)
    other = getattr(torch.ops.aten.norm, overload) if overload else None
    defaults = [a.default_value for a in operator._schema.arguments if a.has_default_value()]
    count = len(operator._schema.arguments)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with below_cast():
            if other is None:
                return operator(*args, **kwargs)
            dtype = torch.float32 if casts.eligible(args[0]) else args[0].dtype
            args = (*args, *defaults[len(defaults) - (count - len(args)) :][: count - len(args)])
            return other(*args, dtype=dtype)

    return kernel


def _banned(casts: Casts, operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(casts.eligible(value) for value in args):
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
                "autocast.\nMany models use a sigmoid layer right before the binary cross entropy "
                "layer.\nIn this case, combine the two layers using "
                "torch.nn.functional.binary_cross_entropy_with_logits\nor "
                "torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits "
                "are\nsafe to autocast."
            )
        with below_cast():
            return operator(*args, **kwargs)

    return kernel
