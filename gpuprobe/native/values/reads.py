"""What a program gets that reads a value which was not computed, or the error.

In this order: what ``--assume`` gives for the line; what torch's own code may have, as the value
decides nothing that is allocated; for a truth, the way that a branch goes by its two sides
(`gpuprobe.native.values.conditions`); NaN where that is allowed, with a note.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, Final

import torch

from gpuprobe.code_origin import PACKAGE
from gpuprobe.errors import ValueNeeded
from gpuprobe.model.plans.assumptions import Assumptions
from gpuprobe.native.values.conditions import branches
from gpuprobe.torch_support.callers import TORCH, installed, place_of, program_line

TRUTH, NUMBER, ARRAY, COUNT = "true or false", "a number", "numpy()", "how many elements"
EQUAL: Final = "whether two tensors are equal"
_HARMLESS: Final = (
    ("amp/grad_scaler.py", "gradient scaling finds no overflow", 0.0),
    ("nn/init.py", "resampling in torch's initialisers stops after the first try", 0.0),
    ("optim/_adafactor.py", "norms that Adafactor reads are unknown", math.nan),
)
_DEPTH: Final = 8
_PLUMBING: Final = (PACKAGE, f"{TORCH}_ops.py", f"{TORCH}utils/_python_dispatch.py")


class Reads:
    """The rules, and the notes about where they applied."""

    def __init__(
        self,
        assume: Iterable[str] = (),
        *,
        unknown_as_nan: bool = False,
    ) -> None:
        self.assumptions = Assumptions(assume)
        self.notes: dict[str, None] = {}
        """What was assumed, in order, each once."""
        self.unknown_as_nan = unknown_as_nan
        self.given_nan = ""
        """The first line that was given NaN for a value, as ``file:line``."""
        self.bounded = ""
        """The first line of which a size depends on values, and was the largest possible."""
        self._verdicts: dict[tuple[tuple[CodeType, int], ...], branches.Verdict | None] = {}

    def value(self, dtype: Any, how: str = NUMBER) -> bool | int | float:
        """What one element is. Raises ValueNeeded."""
        file, line, place = _where()
        given = self.assumptions.at(file, line) if self.assumptions else None
        if given is not None:
            self.notes[f"{place}: {given.text.rpartition('=')[2]}, as --assume has it"] = None
            floating = dtype.is_floating_point
            return given.value if floating or isinstance(given.value, bool) else int(given.value)
        known = _harmless()
        if known is not None:
            self.notes[known[0]] = None
            return known[1]
        verdict = self._verdict() if how in (TRUTH, EQUAL) else None
        if verdict is not None:
            decides = place_of(verdict.file, verdict.line)
            if verdict.bound:
                self.bounded = self.bounded or decides
            self.notes[f"{decides}: {verdict.why}"] = None
            return verdict.value
        if self.unknown_as_nan and dtype.is_floating_point and how != TRUTH:
            self.given_nan = self.given_nan or place
            self.notes[f"values that are read but not computed are NaN: {place}"] = None
            return math.nan
        raise self.refuse(how, assumable=True)

    def _verdict(self) -> branches.Verdict | None:
        """What the condition that is read should be; None where both of its sides work. If no
        report names the lines, only checks of libraries pass, and no assertions of a test.
        """
        frame: Any = sys._getframe(1)
        while frame is not None and _passed_by(frame):
            frame = frame.f_back
        place: list[tuple[CodeType, int]] = []
        outer = frame
        while outer is not None and len(place) < _DEPTH:
            place.append((outer.f_code, outer.f_lasti))
            outer = outer.f_back
        key = tuple(place)
        if key not in self._verdicts:
            self._verdicts[key] = branches.decide(frame, _passed_by)
        found = self._verdicts[key]
        if found is None or self.unknown_as_nan:
            return found
        return found if installed(found.file) and not found.bound else None

    def largest(self, what: str) -> None:
        """Note that a size is the largest possible, since ``what``."""
        _, _, place = _where()
        self.bounded = self.bounded or place
        self.notes[f"{place}: {what}, which is the most that can be"] = None

    def refuse(self, what: str, *, assumable: bool = False) -> ValueNeeded:
        """The error for what cannot be known."""
        file, _, place = _where()
        hint = "compute the values (--compute real, compute='real')"
        if assumable and file:
            hint += f", or give this one: --assume {place}=VALUE"
        return ValueNeeded(
            f"{place}: the program needs {what}, which compute='shapes' has not computed",
            hint=hint,
            place=place,
        )


def _where() -> tuple[str, int, str]:
    """File and line of the program, and a text of both. A thread of the backward pass has none:
    ``""`` and 0.
    """
    file, line = program_line()
    if file.startswith(PACKAGE):
        return "", 0, "the backward pass"
    return file, line, place_of(file, line)


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


def fill(reads: Reads, tensor: Any, how: str) -> Any:
    """A host tensor with what the rules give for the elements of one that is unknown."""
    return torch.full(tensor.shape, reads.value(tensor.dtype, how), dtype=tensor.dtype)
