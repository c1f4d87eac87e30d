"""The place that calls each operator: its line, the module that runs, and whether it decodes.

The place of an operator of the backward pass is that of the operator whose gradient it computes:
torch gives both the same sequence number (``torch.autograd.graph.Node._sequence_nr``, which its
profiler uses for this). Places are numbered, so that what counts by place does so in columns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

from gpuprobe.model.place import NoPlace, SourceLine
from gpuprobe.model.trace import Frame
from gpuprobe.sampler.failures import from_program
from gpuprobe.sampler.tracing.calls import BackwardCalls, ModuleCalls
from gpuprobe.torch_support import compiled_code
from gpuprobe.user_frames import USERS, innermost, is_user_frame, name_of, place_of

_getframe: Final = sys._getframe
_any_generated: Final = compiled_code.any_known
_sequence_now: Final = torch._C._autograd._get_sequence_nr
_node_now: Final = torch._C._current_autograd_node
_thread_now: Final = threading.get_ident

OUTSIDE: Final = 0
"""The place of what no operator of the program does."""

_NOWHERE: Final = (None, OUTSIDE)
_MOST_INSTRUCTIONS: Final = 1 << 16
"""Instructions whose line is known: a program may create code all the time."""

_DECODING: Final = "decoding"
"""In the keys of places while ``generate`` decodes."""


class OperatorPlaces:
    """The places of one recording. ``current`` is the number of the latest call of `here`."""

    def __init__(
        self,
        modules: ModuleCalls,
        backward: BackwardCalls,
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._modules = modules
        self._backward = backward
        self._on_fault = on_fault
        self.current = OUTSIDE
        self.counted = False
        """Whether the counter of launches queries the place of each operator."""
        self.in_generate: Callable[[], bool] = lambda: False
        """Whether a call of ``generate`` is in progress in this thread."""
        self.decoding = False
        """Whether the running call of a model decodes one token of each sequence."""
        # Line, module, and whether they decode.
        self.places: list[tuple[SourceLine, str, bool]] = [(NoPlace.UNKNOWN, "", False)]
        self.frames: list[Frame | None] = [None]
        """The frame of each place that has a line."""
        self._numbers: dict[tuple[Any, ...], int] = {}
        # Of code objects, which these keep: the number of each instruction's line is slow to read.
        self._of_instruction: dict[tuple[int, int, str, bool], tuple[object, int]] = {}
        self._of_node: dict[int, int] = {}  # sequence number -> place
        self._sequence = 0
        self._thread = 0
        self._failed = False

    def begin(self) -> None:
        """Follow the graph of autograd that this thread creates from now on."""
        self._of_node.clear()
        self._sequence = _sequence_now()
        self._thread = _thread_now()

    def forget(self) -> None:
        """Forget the graph: a step has ended."""
        self._of_node.clear()

    def viewed(self) -> None:
        """An operator is called that only makes a view: it has no use of its place, but its
        gradient may.
        """
        if _sequence_now() != self._sequence and _node_now() is None:
            self.here()

    def here(self) -> int:
        """The number of the place that calls an operator; called in its thread, before it runs."""
        if self._failed:
            return OUTSIDE
        try:
            if _any_generated() and (generated := self._generated_place(_getframe(1))):
                place = generated
            elif (node := _node_now()) is not None:
                known = self._of_node.get(node._sequence_nr())
                place = self._backward_place() if known is None else known
            else:
                place = self._forward_place(_getframe(1))
        except Exception as error:  # an internal error must not end the program
            if from_program(error):
                raise
            self._failed = True
            self._on_fault(error)
            return OUTSIDE
        self.current = place
        return place

    def _forward_place(self, frame: FrameType | None) -> int:
        """The user's innermost line, in the module that runs."""
        running = self._modules.stack
        module = running[-1] if running else ""
        frame = innermost(frame, USERS)
        if frame is None:
            place = self._number((module,), NoPlace.NO_USER_FRAME, module, None)
        else:
            code = frame.f_code
            instruction = id(code), frame.f_lasti, module, self.decoding
            _, place = self._of_instruction.get(instruction, _NOWHERE)
            if not place:
                shown = Frame(name_of(code.co_filename), frame.f_lineno or 0, code.co_name)
                key = code.co_filename, *shown[1:], module
                place = self._number(key, place_of(shown), module, shown)
                if len(self._of_instruction) >= _MOST_INSTRUCTIONS:
                    self._of_instruction.clear()
                self._of_instruction[instruction] = code, place
        sequence = _sequence_now()
        if sequence != self._sequence and _thread_now() == self._thread:
            # The nodes of the graph that were created for this operator, before it runs.
            for one in range(self._sequence, sequence):
                self._of_node[one] = place
            self._sequence = sequence
        return place

    def _generated_place(self, frame: FrameType | None) -> int:
        """The place of the generated code that runs, if its line in the program is known; 0
        otherwise.
        """
        while frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno or 0
            origins = compiled_code.lines_of(file, line)
            if origins is not None:
                frames = (Frame(name_of(one.file), one.line, one.function) for one in origins)
                shown = next((one for one in frames if is_user_frame(one)), None)
                if shown is None:
                    return OUTSIDE
                module = compiled_code.module_of(file, line)
                return self._number((file, line, module), place_of(shown), module, shown)
            frame = frame.f_back
        return 0

    def _backward_place(self) -> int:
        """The line that called the backward pass: for the accumulation of gradients, and for graphs
        from before the step.
        """
        frames = self._backward.running
        number = self._numbers.get(frames)
        if number is None:
            shown = next((one for one in frames if is_user_frame(one)), None)
            place = NoPlace.AUTOGRAD_ENGINE if shown is None else place_of(shown)
            number = self._number(frames, place, "", shown)
        return number

    def _number(
        self, key: tuple[Any, ...], place: SourceLine, module: str, frame: Frame | None
    ) -> int:
        if self.decoding:
            key = (*key, _DECODING)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.places)
            # Not what follows a call of generate, up to the next call of a model.
            self.places.append((place, module, self.decoding and self.in_generate()))
            self.frames.append(frame)
        return number
