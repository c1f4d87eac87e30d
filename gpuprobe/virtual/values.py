"""Tensors without values: what happens where a program needs one (``compute="shapes"``)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.code_origin import PACKAGE, folder_of
from gpuprobe.errors import NotModelled, ValueNeeded
from gpuprobe.virtual.machine import Machine, is_meta

NEED_VALUES: Final = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "bincount",
        "repeat_interleave",
        "is_nonzero",
        "item",
        "argwhere",
        "histc",
        "_assert_async",
        "index",
        "index_put",
        "index_put_",
        "_index_put_impl_",
    }
)
"""Operators whose result, or the size of it, depends on values."""

NO_ANSWER: Final = object()

_TORCH = folder_of(torch)
_METHODS = f"{_TORCH}_tensor.py"  # Tensor.__format__ and its like: the program's own calls
# The code whose frames call the C++ autograd engine.
_ENGINE = frozenset({torch.autograd.graph._engine_run_backward.__code__})
_PLUMBING = (PACKAGE, f"{_TORCH}_ops.py", f"{_TORCH}utils/_python_dispatch.py")
_empty_strided = torch.empty_strided


def answer(machine: Machine, func: Any, args: tuple[Any, ...]) -> Any:
    """What a call that needs values gets: an answer where the machine is to make one up,
    `NO_ANSWER` where the operator can do without. Raises ValueNeeded otherwise.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "_assert_async":
        return None
    if name == "repeat_interleave" and len(args) != 1:
        return NO_ANSWER
    tensor = args[0]
    if name.strip("_").startswith("index"):
        masks = [
            item
            for item in args[1]
            if isinstance(item, torch.Tensor)
            and item.dtype in (torch.bool, torch.uint8)
            and is_meta(item)
        ]
        if not masks or (name != "index" and args[2].numel() == 1 and len(args[1]) == 1):
            return NO_ANSWER  # a fixed shape; masked_fill
        raise refuse("how many elements a mask selects")
    if not is_meta(tensor):
        return NO_ANSWER
    if name == "bincount" or name == "histc":
        raise refuse(name)
    if name == "_local_scalar_dense":
        reader = _reader()
        if reader is not None:
            what, value = reader
            machine.assume(what)
            return value
    if name == "_local_scalar_dense" and machine.unknown_as_nan and _may_be_nan(machine, tensor):
        place = where()
        machine.given_nan = machine.given_nan or place
        machine.assume(f"unknown values are NaN where the program reads them: {place}")
        return float("nan")
    if name == "_local_scalar_dense":
        name = "true or false" if tensor.dtype is torch.bool else "a number"
    raise refuse(name)


def _may_be_nan(machine: Machine, tensor: Any) -> bool:
    """Whether NaN can stand for a value. For a whole number it can where the program takes a
    number of any kind, as ``item()`` gives: a count of right answers is added up and printed, and
    as a size NaN is refused by all that take one. Truth is never made up: no answer is neutral.
    """
    if tensor.is_floating_point():
        return True
    if tensor.is_complex() or tensor.dtype is torch.bool or not machine.local.as_number:
        return False
    frame = caller()  # torch's own code counts and measures with whole numbers
    file = "" if frame is None else frame.f_code.co_filename
    return not file.startswith(_TORCH) or file == _METHODS


def as_number(machine: Machine, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of a tensor, which gives its value as a number of any kind."""
    local = machine.local

    @functools.wraps(method)
    def read(tensor: Any) -> Any:
        before, local.as_number = local.as_number, True
        try:
            return method(tensor)
        finally:
            local.as_number = before

    return read


# Values that torch's own code reads, and that do not decide what is allocated.
_HARMLESS = (
    ("amp/grad_scaler.py", "gradient scaling finds no overflow", 0.0),
    ("nn/init.py", "resampling in torch's initialisers ends at the first try", 0.0),
    ("optim/_adafactor.py", "norms that Adafactor reads are unknown", float("nan")),
)


def _reader() -> tuple[str, float] | None:
    """What torch's own code that reads a value is given, and the assumption in words."""
    frame = caller()
    for _ in range(6):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        for end, what, value in _HARMLESS:
            if name.startswith(_TORCH) and name.endswith(end):
                return what, value
        frame = frame.f_back
    return None


def refuse(what: str) -> ValueNeeded:
    """The error for a value that does not exist, with the program's line that needs it."""
    return ValueNeeded(
        f"{where()} needs the value of a tensor ({what}), and with compute='shapes' nothing is "
        "computed",
        hint="compute the values (--compute real, compute='real'), or leave that line out while "
        "memory is estimated",
    )


def no_shape_rule(func: Any) -> ValueNeeded:
    """The error for an operator that torch cannot run on shapes alone."""
    return ValueNeeded(
        f"{where()}: this torch cannot tell the shape of {func}'s result without values, and with "
        "compute='shapes' nothing is computed",
        hint="compute the values (--compute real, compute='real')",
    )


def not_modelled(what: str) -> NotModelled:
    """The error for what a virtual device cannot imitate, with the program's line."""
    return NotModelled(f"{where()}: a virtual GPU cannot do this: {what}")


def where() -> str:
    """The innermost line of the program, as ``file:line``."""
    file, line = program_line()
    return f"{file}:{line}"


def program_line() -> tuple[str, int]:
    """File and line of the innermost frame that is neither gpuprobe's nor torch's."""
    frame: Any = sys._getframe(1)
    last = ("<unknown>", 0)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((PACKAGE, _TORCH, "<frozen")):
            return name, frame.f_lineno or 0
        last = (name, frame.f_lineno or 0)
        frame = frame.f_back
    return last


def caller() -> Any:
    """The innermost Python frame that is not gpuprobe's or torch's plumbing; None at the top."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PLUMBING):
        frame = frame.f_back
    return frame


def in_engine() -> bool:
    """Whether C++ code of the backward pass is at work, and no Python code called by it."""
    if torch._C._current_autograd_node() is None:
        return False
    frame = caller()
    return frame is not None and frame.f_code in _ENGINE


def instruction() -> tuple[int, int]:
    """Which instruction of which Python frame is at work, gpuprobe's and torch's plumbing
    aside: a frame's id and an offset into its code.
    """
    frame = caller()
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)


def packed(data: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    """``_pack_padded_sequence`` of a tensor without values: the lengths have theirs."""
    if is_meta(lengths):
        raise refuse("the lengths of sequences")
    time = 1 if batch_first else 0
    column = torch.zeros(
        (lengths.numel(), data.size(time), 1)
        if batch_first
        else (data.size(time), lengths.numel(), 1)
    )
    _, sizes = torch.ops.aten._pack_padded_sequence.default(column, lengths, batch_first)
    shape = (int(lengths.sum()), *data.shape[2:])
    return torch.empty(shape, dtype=data.dtype, device="meta"), sizes


def ctc(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any
) -> tuple[Any, Any]:
    """``_ctc_loss``: the loss of each sequence, and its alphas. Source: ``ctc_loss_gpu_template``
    in ``aten/src/ATen/native/cuda/LossCTC.cu``: alphas are (batch, time, 2 * longest + 1).
    """
    if isinstance(target_lengths, torch.Tensor):
        if is_meta(target_lengths):
            raise refuse("the lengths of targets")
        longest = int(target_lengths.max())
    else:
        longest = max(target_lengths)
    time, batch = log_probs.shape[:2]
    make = {"dtype": log_probs.dtype, "device": "meta"}
    return torch.empty((batch,), **make), torch.empty((batch, time, 2 * longest + 1), **make)


def elementwise_loss(given: Any, target: Any, reduction: int = 1, *_: Any, **options: Any) -> Any:
    """``mse_loss``, ``smooth_l1_loss``: made for all losses, then given one element's shape.
    Source: ``TORCH_META_FUNC(mse_loss)`` in ``aten/src/ATen/native/Loss.cpp``.
    """
    if options.get("out") is not None:
        return options["out"].resize_(() if reduction else given.shape)
    shape = torch.broadcast_shapes(given.shape, target.shape)
    made = torch.empty(shape, dtype=torch.result_type(given, target), device="meta")
    return made.resize_(()) if reduction else made


def cross_entropy_loss(
    given: Any, target: Any, weight: Any = None, reduction: int = 1, **options: Any
) -> Any:
    """``binary_cross_entropy``. Source: ``binary_cross_entropy_out_cuda`` in
    ``aten/src/ATen/native/cuda/Loss.cu``.
    """
    return elementwise_loss(given, given, reduction, **options)


def nothing(*args: Any, **kwargs: Any) -> None:
    """An operator that only writes into its arguments."""


BY_SHAPE: Final[dict[str, Callable[..., Any]]] = {
    "_pack_padded_sequence": packed,
    "_ctc_loss": ctc,
    "mse_loss": elementwise_loss,
    "smooth_l1_loss": elementwise_loss,
    "binary_cross_entropy": cross_entropy_loss,
    "_fused_sgd_": nothing,
    "_fused_adagrad_": nothing,
}
"""Operators that lack a meta kernel, whose meta kernel makes other memory than CUDA's does, or
whose arguments keep their values: what they return.
"""


def without_values(value: Any) -> Any:
    """The arguments of one call with every host tensor that has values replaced by one that has
    none: torch refuses to mix them. Scalars stay, torch allows those.
    """
    if isinstance(value, torch.Tensor):
        if is_meta(value) or not value.dim() or value.layout is not torch.strided:
            return value
        return _empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if type(value) is list or type(value) is tuple:
        made = [without_values(item) for item in value]
        # The same object where nothing changed: who holds a tensor is counted elsewhere.
        if any(one is not other for one, other in zip(made, value, strict=True)):
            return type(value)(made)
    return value
