"""What a program gets that reads a value which was not computed.

The policy, in this order, wherever such a value is needed (docs/explanation/unknown-values.md):

1. What ``--assume`` gives for the line.
2. Numbers are finite: tests for NaN and infinity take the healthy side. What torch's own code reads
   is answered where it decides nothing that is allocated.
3. A condition of which one side can only fail or warn takes the other side
   (`gpuprobe.native.values.conditions.branches`).
4. Any other condition takes the side that does more (`undecided`), a size is the largest possible
   if that is known, and a number that leaves gpuprobe's view has the value `PLACEHOLDER`. Each is
   noted with its line. Where no report would show the notes, this is the error `ValueNeeded`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import Tensor

from gpuprobe.errors import UnknownValue, ValueNeeded
from gpuprobe.model.plans.assumptions import Assumptions
from gpuprobe.native.values.conditions import branches, passing
from gpuprobe.native.values.conditions.undecided import MOST, side_of
from gpuprobe.native.values.unknown import PLACEHOLDER, UnknownFloat, UnknownInt
from gpuprobe.torch_support.callers import line_now, program_line
from gpuprobe.torch_support.compiled_code import TORCH
from gpuprobe.user_frames import (
    PACKAGE,
    USERS,
    Owner,
    file_and_line,
    innermost,
    is_user_file,
    outside,
    owner_of,
)

COUNT: Final = "how many elements"
FINITE: Final = "numbers that were not computed are finite"
_HARMLESS: Final = (
    ("amp/grad_scaler.py", "gradient scaling finds no overflow", 0.0),
    ("nn/init.py", "resampling in torch's initialisers stops after the first try", 0.0),
    ("optim/_adafactor.py", "norms that Adafactor reads are unknown", PLACEHOLDER),
)
_DEPTH: Final = 8
_INSTALLED: Final = frozenset((Owner.LIBRARY, Owner.TORCH))
_PLUMBING: Final = (PACKAGE, f"{TORCH}_ops.py", f"{TORCH}utils/_python_dispatch.py")


class Reads:
    """The rules, and the notes about where they applied."""

    def __init__(self, assume: Iterable[str] = (), *, reported: bool = False) -> None:
        """``reported``: a report lists the notes, so that decisions are assumed instead of being
        errors.
        """
        self.assumptions = Assumptions(assume)
        self.notes: dict[str, None] = {}
        """What was assumed, in order, each once."""
        self.reported = reported
        self.decided = ""
        """The first line that decided by an unknown value, as ``file:line``."""
        self.bounded = ""
        """The first line of which a size depends on values, and was the largest possible."""
        self.refused: ValueNeeded | None = None
        """The first error that was raised: a program's handler may have caught it."""
        self._verdicts: dict[tuple[tuple[CodeType, int], ...], branches.Verdict | None] = {}
        self._texts: dict[tuple[CodeType, int], bool] = {}
        self._printed = False
        self._streaks: dict[tuple[CodeType, int], int] = {}

    # --- what is read

    def item(self, tensor: Tensor, placeholder: int = 0) -> Any:
        """The element of an unknown tensor."""
        dtype = tensor.dtype
        if dtype is torch.bool:
            return self.decide("true or false")
        given = self._given(floating=dtype.is_floating_point)
        if given is not None:
            return given
        known = _harmless()
        if known is not None:
            self.notes[known[0]] = None
            return known[1] if dtype.is_floating_point else int(known[1])
        if dtype.is_floating_point:
            if self._only_text():  # "%.3f" % number calls no method of it
                self.printed()
                return math.nan
            return UnknownFloat(self)
        if dtype.is_complex:
            self.escape("a complex number", floating=False)
            return complex(PLACEHOLDER, 0.0)
        return UnknownInt(self, self.whole("a whole number", placeholder))

    def scalar(self, tensor: Tensor, placeholder: int = 0) -> Any:
        """`item` for C++ code, which gets a plain number."""
        value = self.item(tensor, placeholder)
        if isinstance(value, UnknownFloat):
            return self.escape("a number")
        return int.__int__(value) if isinstance(value, UnknownInt) else value

    def decide(self, need: str, healthy: bool | None = None) -> bool:
        """The truth of a condition that the program evaluates. Raises UnknownValue where no report
        would show it.
        """
        given = self._given(floating=True)
        if given is not None:
            return bool(given)
        known = _harmless()
        if known is not None:
            self.notes[known[0]] = None
            return bool(known[1])
        frame = _program_frame()
        verdict = self._verdict(frame)
        if verdict is not None and (self.reported or _safe(verdict)):
            decides = file_and_line(verdict.file, verdict.line)
            if verdict.bound:
                self.bounded = self.bounded or decides
            self.notes[f"{decides}: {verdict.why}"] = None
            return verdict.value
        if healthy is not None:
            self.notes[f"{_where()[2]}: {FINITE}"] = None
            return healthy
        if not self.reported:
            raise self.refuse(need)
        return self._undecided(frame, need)

    def _undecided(self, frame: FrameType | None, need: str) -> bool:
        side = side_of(frame)
        place = _where()[2]
        if frame is not None and side.line:
            place = file_and_line(frame.f_code.co_filename, side.line)
        self.decided = self.decided or place
        what = f"`{side.text}`" if side.text else need
        often = f", up to {MOST} times in a row" if side.limited else ""
        self.notes[f"{place}: {what} was not computed: assumed to be {side.value}{often}"] = None
        if not side.limited or frame is None:
            return side.value
        key = frame.f_code, frame.f_lasti
        streak = self._streaks[key] = (self._streaks.get(key, 0) + 1) % (MOST + 1)
        return side.value if streak else not side.value

    def extreme(self, comparison: str) -> bool | None:
        """The answer by which `max` and `min` return the unknown number; None for others."""
        return passing.answer_of_extreme(_program_frame(), comparison)

    def ordered(self) -> bool:
        """Whether a sort compares, in which the order of unknown numbers does not matter."""
        return passing.sorts(_program_frame())

    def escape(self, need: str, *, floating: bool = True) -> float:
        """Note a number that is not followed from here on. Its value: what ``--assume`` gives, NaN
        if it is ``floating`` and only becomes text, else `PLACEHOLDER`. Raises UnknownValue for the
        last where no report would show it.
        """
        given = self._given(floating=True)
        if given is not None:
            return float(given)
        known = _harmless()
        if known is not None:
            self.notes[known[0]] = None
            return PLACEHOLDER
        if floating and self._only_text():
            self.printed()
            return math.nan
        if not self.reported:
            raise self.refuse(need)
        place = _where()[2]
        self.decided = self.decided or place
        self.notes[
            f"{place}: {need} that was not computed is {PLACEHOLDER} here, a placeholder; what the "
            "program decides by it may differ"
        ] = None
        return PLACEHOLDER

    def whole(self, need: str, placeholder: int) -> int:
        """A whole number, such as a size or an index. Raises UnknownValue where no report would
        show it.
        """
        given = self._given(floating=False)
        if given is not None:
            return int(given)
        if not self.reported:
            raise self.refuse(need)
        place, frame = _where()[2], _program_frame()
        if frame is None or not passing.only_added(frame):  # what is done with a sum is followed
            self.decided = self.decided or place
        self.notes[f"{place}: {need} that was not computed is assumed to be {placeholder}"] = None
        return placeholder

    def printed(self) -> None:
        """Note that a number becomes text: the first one, as training prints in each step."""
        if not self._printed:
            self._printed = True
            self.notes[f"{_where()[2]}: numbers that were not computed are printed as nan"] = None

    def filled(self, tensor: Tensor, placeholder: int = 0) -> Any:
        """A host tensor for NumPy, in place of one that is unknown."""
        dtype = tensor.dtype
        given = self._given(floating=dtype.is_floating_point)
        if given is None:
            number = self.escape("an array", floating=dtype.is_floating_point)
            given = number if dtype.is_floating_point or dtype.is_complex else placeholder
        return torch.full(tensor.shape, given, dtype=dtype)

    def listed(self, tensor: Tensor, placeholder: int = 0) -> Any:
        """Nested lists of what `item` gives."""
        if not tensor.numel():
            return torch.empty(tensor.shape).tolist()
        made = self.item(tensor, placeholder)
        for size in reversed(tensor.shape):
            made = [made] * size if made.__class__ is not list else [[*made] for _ in range(size)]
        return made

    def healthy(self) -> None:
        """Note that numbers passed as finite."""
        self.notes[FINITE] = None

    def largest(self, what: str) -> None:
        """Note that a size is the largest possible, since ``what``."""
        place = _where()[2]
        self.bounded = self.bounded or place
        self.notes[f"{place}: {what}, which is the most that can be"] = None

    def refuse(self, what: str) -> UnknownValue:
        """The error for what cannot be known."""
        file, line, place = _where()
        hint = "compute the values (--compute real, compute='real')"
        if file:
            hint += f", or give this one: --assume {file_and_line(file, line)}=VALUE"
        error = ValueNeeded(
            f"{place}: the program needs {what}, which was not computed", hint=hint, place=place
        )
        self.refused = self.refused or error
        return UnknownValue(error)

    # --- rules

    def _given(self, *, floating: bool) -> bool | int | float | None:
        if not self.assumptions:
            return None
        file, line, place = _where()
        given = self.assumptions.at(file, line)
        if given is None:
            return None
        self.notes[f"{place}: {given.text.rpartition('=')[2]}, as --assume has it"] = None
        return given.value if floating or isinstance(given.value, bool) else int(given.value)

    def _only_text(self) -> bool:
        """Whether the number that the program reads only becomes text."""
        frame = reader = _program_frame()
        while reader is not None and _of_numpy(reader):
            reader = reader.f_back
        if reader is None:
            return False
        key = reader.f_code, reader.f_lasti
        if key not in self._texts:
            self._texts[key] = passing.only_text(reader, averaged=reader is not frame)
        return self._texts[key]

    def _verdict(self, frame: FrameType | None) -> branches.Verdict | None:
        """What the condition should be; None where both of its sides work."""
        place: list[tuple[CodeType, int]] = []
        outer = frame
        while outer is not None and len(place) < _DEPTH:
            place.append((outer.f_code, outer.f_lasti))
            outer = outer.f_back
        key = tuple(place)
        if key not in self._verdicts:
            self._verdicts[key] = branches.decide(frame, _passed_by)
        return self._verdicts[key]


def _safe(verdict: branches.Verdict) -> bool:
    """Whether a verdict holds without a report: tests of finiteness, and checks of libraries, but
    no assertion of a test.
    """
    return not verdict.bound and (
        owner_of(verdict.file) in _INSTALLED or verdict.why.startswith(branches.FINITE)
    )


def _program_frame() -> FrameType | None:
    return outside(sys._getframe(1), _PLUMBING)


def _where() -> tuple[str, int, str]:
    """File and line of the program, and a text of both. A thread of the backward pass has none:
    ``""`` and 0.
    """
    current = program_line()
    if current is None:
        return "", 0, "the backward pass"
    return *current, file_and_line(*current) + _caller(current[0])


def _caller(file: str) -> str:
    """The line of the program that called a library's, as text."""
    frame = None if is_user_file(file) else innermost(sys._getframe(1), USERS)
    return "" if frame is None else f" (called at {file_and_line(*line_now(frame))})"


def _of_numpy(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return owner_of(file) is Owner.LIBRARY and f"{os.sep}numpy{os.sep}" in file


def _passed_by(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PLUMBING)


def _harmless() -> tuple[str, float] | None:
    frame: Any = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        if name.startswith(TORCH):
            for end, what, value in _HARMLESS:
                if name.endswith(end):
                    return what, value
        frame = frame.f_back
    return None
