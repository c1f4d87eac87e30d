"""Values that were not computed: what the program gets where it reads one, or the error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.errors import NotModelled, ValueNeeded
from gpuprobe.virtual.frames import TORCH, caller, where
from gpuprobe.virtual.machine import Machine, is_meta

NO_ANSWER: Final = object()

_METHODS = f"{TORCH}_tensor.py"  # Tensor.__format__ and its like: the program's own calls


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
    return not file.startswith(TORCH) or file == _METHODS


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
            if name.startswith(TORCH) and name.endswith(end):
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
