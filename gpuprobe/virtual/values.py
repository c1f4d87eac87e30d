"""Tensors without values: what happens where a program needs one (``compute="shapes"``)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import torch

from gpuprobe.errors import NotModelled, ValueNeeded
from gpuprobe.virtual.machine import Machine, is_meta

__all__ = ["NEED_VALUES", "NO_ANSWER", "answer", "caller", "instruction", "not_modelled", "program_line", "refuse", "where", "without_values"]

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
    }
)
"""Operators whose result, or the size of it, depends on values."""

NO_ANSWER: Final = object()

_OURS = str(Path(__file__).resolve().parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_PLUMBING = (_OURS, f"{_TORCH}/_ops.py", f"{_TORCH}/utils/_python_dispatch.py")
_empty_strided = torch.empty_strided


def answer(machine: Machine, func: Any, args: tuple[Any, ...]) -> Any:
    """What a call that needs values gets: an answer where the machine was told to make one up,
    `NO_ANSWER` where the operator can do without. Raises ValueNeeded otherwise.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "_assert_async":
        return None
    if name == "repeat_interleave" and len(args) != 1:
        return NO_ANSWER
    tensor = args[0]
    if not is_meta(tensor):
        return NO_ANSWER
    if name == "bincount" or name == "histc":
        raise refuse(name)
    if name in ("_local_scalar_dense", "item") and machine.unknown_as_nan:
        if _found_inf(tensor):
            machine.assume("gradient scaling finds no overflow")
            return 0.0
        if tensor.is_floating_point():
            machine.assume(f"unknown values are NaN where the program reads them: {where()}")
            return float("nan")
    if name == "_local_scalar_dense" and _found_inf(tensor):
        machine.assume("gradient scaling finds no overflow")
        return 0.0
    raise refuse(name)


def _found_inf(tensor: Any) -> bool:
    """Whether the value is read by torch's gradient scaler, which asks for overflows."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("grad_scaler.py"):
            return True
        frame = frame.f_back
    return False


def refuse(what: str) -> ValueNeeded:
    """The error for a value that does not exist, with the program's line that needs it."""
    return ValueNeeded(
        f"{where()} needs the value of a tensor ({what}), and with compute='shapes' nothing is "
        "computed",
        hint="use compute='real', or leave that line out while memory is estimated",
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
        if not name.startswith((_OURS, _TORCH)) and not name.startswith("<frozen"):
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


def instruction() -> tuple[int, int]:
    """Which instruction of which Python frame is at work, gpuprobe's and torch's plumbing
    aside: a frame's id and an offset into its code.
    """
    frame = caller()
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)


def without_values(value: Any) -> Any:
    """The arguments of one call with every host tensor that has values replaced by one that has
    none: torch refuses to mix them. Scalars stay, torch allows those.
    """
    if isinstance(value, torch.Tensor):
        if is_meta(value) or not value.dim() or value.layout is not torch.strided:
            return value
        return _empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if type(value) is list or type(value) is tuple:
        for item in value:
            if isinstance(item, (torch.Tensor, list, tuple)):
                return type(value)(without_values(item) for item in value)
    return value
