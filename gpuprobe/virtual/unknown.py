"""Values that were not computed: what the program gets where it reads one, or the error."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

import torch

from gpuprobe.errors import NotModelled, ValueNeeded
from gpuprobe.torch_support.callers import TORCH, installed, place_of, program_line
from gpuprobe.torch_support.conditions import branches
from gpuprobe.virtual.frames import PLUMBING, caller, in_engine, where
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.reads.known import is_known
from gpuprobe.virtual.reads.numbers import UnknownNumber

NO_ANSWER: Final = object()

TRUTH, NUMBER, WHOLE = "truth", "number", "whole"
"""How the program reads a value: ``bool(x)``; as a number of any kind, by ``x.item()`` or
``float(x)``; as a size or an index, by ``int(x)`` or ``range(x)``."""

_METHODS = f"{TORCH}_tensor.py"  # Tensor.__format__ and its like: the program's own calls
_BIG: Final = 64 << 20  # bytes of an array of NaN from which on it is one NaN, repeated
_DEPTH: Final = 6  # frames that a verdict may depend on

# Values that torch's own code reads, and that do not decide what is allocated.
_HARMLESS: Final = (
    ("amp/grad_scaler.py", "gradient scaling finds no overflow", 0.0),
    ("nn/init.py", "resampling in torch's initialisers stops after the first try", 0.0),
    ("optim/_adafactor.py", "norms that Adafactor reads are unknown", math.nan),
)
# The same, of single functions of it.
_IN_FUNCTION: Final = {
    "_detect_is_causal_mask": "the masks of torch.nn.Transformer are causal ones",
}


class Reader:
    """What unknown numbers ask the machine whose they are."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def truth(self, default: bool) -> bool:
        machine = self._machine
        given = _given(machine)
        if given is not None:
            return bool(given)
        verdict = _verdict(machine, caller())
        if verdict is not None and not verdict.bound:
            return _as_decided(machine, verdict)
        word = "true" if default else "false"
        machine.assume(f"{where()}: comparisons with an unknown number are {word}, as with NaN")
        return default

    def finite(self) -> None:
        self._machine.assume(f"{where()}: numbers are finite")

    def whole(self) -> int:
        given = _given(self._machine)
        if given is None:
            raise refuse("a whole number", assumable=True)
        return int(given)


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
            and not is_known(machine, item)
        ]
        if not masks or (name != "index" and args[2].numel() == 1 and len(args[1]) == 1):
            return NO_ANSWER  # a fixed shape; masked_fill
        raise refuse("how many elements a mask selects")
    if name in ("equal", "allclose"):
        if is_known(machine, tensor) and is_known(machine, args[1]):
            return NO_ANSWER
        if name == "allclose":
            if in_engine():  # ``svd_backward`` in FunctionsManual.cpp, of complex matrices
                machine.assume("gradients of decompositions do not depend on the phase")
                return True
            return _truth(machine, "whether two tensors are close")
        return tensor.shape == args[1].shape and _truth(machine, "whether two tensors are equal")
    if is_known(machine, tensor):
        return NO_ANSWER
    if name == "_local_scalar_dense":
        return _scalar(machine, tensor)
    raise refuse(name)


def _scalar(machine: Machine, tensor: Any) -> Any:
    """One element of a tensor."""
    given = _given(machine)
    if given is not None:
        return given if tensor.is_floating_point() or isinstance(given, bool) else int(given)
    known = _known_reader()
    if known is not None:
        what, value = known
        machine.assume(what)
        return value
    reading = machine.local.reading
    if reading == TRUTH or tensor.dtype is torch.bool:
        return _truth(machine, "true or false")
    if machine.unknown_as_nan and _may_be_nan(tensor, reading):
        give_nan(machine)
        return math.nan
    raise refuse("a number", assumable=True)


def _truth(machine: Machine, what: str) -> bool:
    """Whether an unknown condition holds. Raises ValueNeeded where both of its sides work."""
    given = _given(machine)
    if given is not None:
        return bool(given)
    if in_engine():
        machine.assume("torch.autograd's anomaly detection finds no NaN")
        return False
    verdict = _verdict(machine, caller())
    if verdict is None or not (
        machine.unknown_as_nan or (installed(verdict.file) and not verdict.bound)
    ):
        # Where no result tells of it, only checks of libraries pass, and no test's assertions.
        raise refuse(what, assumable=True)
    if verdict.bound:
        machine.bounded = machine.bounded or place_of(verdict.file, verdict.line)
    return _as_decided(machine, verdict)


def _as_decided(machine: Machine, verdict: branches.Verdict) -> bool:
    machine.assume(f"{place_of(verdict.file, verdict.line)}: {verdict.why}")
    return verdict.value


def _given(machine: Machine) -> bool | int | float | None:
    """What the user told about the line that reads a value (``--assume``)."""
    if not machine.assumptions:
        return None
    lines = [program_line()]
    frame = caller()
    if frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
    for file, line in lines:
        found = machine.assumptions.at(file, line)
        if found is not None:
            value = found.text.rpartition("=")[2]
            machine.assume(f"{place_of(file, line)}: {value}, as --assume has it")
            return found.value
    return None


def _verdict(machine: Machine, frame: FrameType | None) -> branches.Verdict | None:
    """`branches.decide`, remembered by where the program is."""
    key: list[tuple[CodeType, int]] = []
    outer = frame
    while outer is not None and len(key) < _DEPTH:
        key.append((outer.f_code, outer.f_lasti))
        outer = outer.f_back
    verdicts = machine.verdicts
    place = tuple(key)
    if place not in verdicts:
        verdicts[place] = branches.decide(frame, _passed_by)
    return verdicts[place]


def _passed_by(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PLUMBING)


def _may_be_nan(tensor: Any, reading: str) -> bool:
    """Whether NaN can stand for a value. For a whole number it can where the program takes a
    number of any kind, as ``item()`` gives: a count of right answers is added up and printed, and
    as a size NaN is refused by all that take one.
    """
    if reading == WHOLE:
        return False
    if tensor.is_floating_point():
        return True
    if tensor.is_complex() or tensor.dtype is torch.bool or reading != NUMBER:
        return False
    frame = caller()  # torch's own code counts and measures with whole numbers
    file = "" if frame is None else frame.f_code.co_filename
    return not file.startswith(TORCH) or file == _METHODS


def give_nan(machine: Machine) -> UnknownNumber:
    """NaN for what the program reads, of which the result tells."""
    place = where()
    machine.given_nan = machine.given_nan or place
    machine.local.unknown = True
    machine.assume(f"values that are read but not computed are NaN: {place}")
    return UnknownNumber(Reader(machine))


def reading(machine: Machine, method: Callable[..., Any], how: str) -> Callable[..., Any]:
    """``method`` of a tensor, by which the program reads its value in one of the ways above."""
    local = machine.local
    reader = Reader(machine)

    @functools.wraps(method)
    def read(tensor: Any) -> Any:
        before, local.reading = local.reading, how
        local.unknown = False
        try:
            result = method(tensor)
            if local.unknown and method.__name__ == "item":
                return UnknownNumber(reader)
            return result
        finally:
            local.reading = before
            local.unknown = False

    return read


def array_of(machine: Machine, tensor: Any) -> Any:
    """The NumPy array of a host tensor that has no values: NaN. Large ones are one NaN that is
    repeated, in memory that cannot be written. Raises ValueNeeded for whole numbers, which have
    no NaN, and TypeError for types that NumPy has not.
    """
    import numpy

    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    given = _given(machine)
    if given is None:
        if not (machine.unknown_as_nan and (tensor.is_floating_point() or tensor.is_complex())):
            raise refuse("numpy()", assumable=True)
        give_nan(machine)
        given = math.nan
    shape = tuple(tensor.shape)
    if tensor.numel() * dtype.itemsize > _BIG:
        return numpy.broadcast_to(numpy.array(given, dtype=dtype), shape)
    return numpy.full(shape, given, dtype=dtype)


def list_of(machine: Machine, tensor: Any) -> Any:
    """``tolist()`` of a host tensor that has no values. Raises ValueNeeded for booleans."""
    value: Any = _given(machine)
    if value is None:
        if not machine.unknown_as_nan or tensor.is_complex() or tensor.dtype is torch.bool:
            raise refuse("tolist()", assumable=True)
        value = give_nan(machine)
    elif not isinstance(value, bool):
        value = float(value) if tensor.is_floating_point() else int(value)
    made: Any = value
    for length in reversed(tensor.shape):
        made = [made] * length if made is value else [list(made) for _ in range(length)]
    return made


def _known_reader() -> tuple[str, float] | None:
    """What torch's own code that reads a value is given, and the assumption in words."""
    frame = caller()
    if frame is not None and frame.f_code.co_filename.startswith(TORCH):
        what = _IN_FUNCTION.get(frame.f_code.co_name)
        if what is not None:
            return what, True
    for _ in range(6):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        for end, what, value in _HARMLESS:
            if name.startswith(TORCH) and name.endswith(end):
                return what, value
        frame = frame.f_back
    return None


def refuse(what: str, *, assumable: bool = False) -> ValueNeeded:
    """The error for a value that does not exist, with the program's line that needs it.
    ``assumable``: the user may give it (``--assume``).
    """
    place = where()
    return ValueNeeded(
        f"{place} needs the value of a tensor ({what}), which compute='shapes' has not computed",
        hint=hint_of(place) if assumable else _ALL,
        place=place,
    )


_ALL: Final = "compute all values (--compute real, compute='real')"


def hint_of(place: str) -> str:
    """What to do where a line needs a value that the user may know."""
    return f"{_ALL}, or give this one: --assume {place}=false (or true, or a number)"


NO_SHAPE_RULE: Final = "this torch cannot compute the shape of"


def no_shape_rule(func: Any) -> ValueNeeded:
    """The error for an operator that torch cannot run on shapes alone."""
    place = where()
    return ValueNeeded(
        f"{place}: {NO_SHAPE_RULE} {func}'s result without values, which compute='shapes' has not "
        "computed",
        hint="compute the values (--compute real, compute='real')",
        place=place,
    )


def not_modelled(what: str) -> NotModelled:
    """The error for what a virtual device cannot imitate, with the program's line."""
    return NotModelled(f"{where()}: a virtual GPU cannot do this: {what}")
