"""The kernels that each traced step launches, with their line, module and phase.

`gpuprobe.torch_support.engine_reports` counts; this module numbers the places. The counter queries
the place before each operator, so only the frames between the operator and the program's line are
walked, once for all kernels of the operator. The place of an operator of the backward pass is that
of the operator whose gradient it computes: torch gives both the same sequence number
(``torch.autograd.graph.Node._sequence_nr``, which its profiler uses for this).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

from gpuprobe.analysis.trace.frames import is_user_frame, place_of
from gpuprobe.code_origin import PACKAGE, name_of
from gpuprobe.model.place import NoPlace, SourceLine
from gpuprobe.model.run.launches import LaunchPlace, StepLaunches, step_launches
from gpuprobe.model.trace import Frame
from gpuprobe.sampler.failures import from_program
from gpuprobe.sampler.tracing.calls import BackwardCalls, ModuleCalls
from gpuprobe.torch_support import compiled_code
from gpuprobe.torch_support.engine_reports import LaunchCounter

_sequence_now: Final = torch._C._autograd._get_sequence_nr
_node_now: Final = torch._C._current_autograd_node
_thread_now: Final = threading.get_ident

_OUTSIDE: Final = 0
"""The place of kernels that no operator launched."""

_DECODING: Final = "decoding"
"""In the keys of places while ``generate`` decodes."""


class LaunchTrace:
    """The launches of steps, while this is on."""

    def __init__(
        self,
        counter: LaunchCounter,
        modules: ModuleCalls,
        backward: BackwardCalls,
        path: Callable[[], str],
        on_fault: Callable[[Exception], None],
    ) -> None:
        """``path`` returns the phase that the program is in."""
        self._counter = counter
        self._modules = modules
        self._backward = backward
        self._path = path
        self._on_fault = on_fault
        self.on = False
        self.in_generate: Callable[[], bool] = lambda: False
        """Whether a call of ``generate`` is in progress in this thread."""
        self._decoding = False
        self._decoded = 0
        self._mixed = False
        # Line, module, and whether they decode.
        self._places: list[tuple[SourceLine, str, bool]] = [(NoPlace.UNKNOWN, "", False)]
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._is_user: dict[str, bool] = {}  # by file name
        self._of_node: dict[int, int] = {}  # sequence number -> place
        self._sequence = 0
        self._thread = 0
        self._phases: dict[str, int] = {}

    def begin(self) -> None:
        """A step that is traced begins."""
        if self.on:
            return
        self._sequence = _sequence_now()
        self._thread = _thread_now()
        self.on = self._counter.start(self._here)
        self.path_changed(self._path())

    def stop(self) -> None:
        """Stop counting, and forget the counts."""
        if self.on:
            self.on = False
            self._counter.stop()
            self._of_node.clear()

    def path_changed(self, path: str) -> None:
        """The program is in another phase."""
        if self.on:
            self._counter.phase(self._phases.setdefault(path, len(self._phases)))

    @property
    def outside_modules(self) -> bool:
        """Whether no module is running."""
        return not self._modules.running

    def call_begins(self, decodes: bool, mixed: bool) -> None:
        """An outermost call of a module begins. ``decodes``: one token of each sequence, in
        ``generate``; ``mixed``: that calls several models, so that no call is one token.
        """
        self._mixed |= mixed
        self._decoded += decodes and self.on
        self._decoding = decodes

    def take(self) -> StepLaunches | None:
        """The launches since the last call; None while this is off."""
        if not self.on:
            return None
        phases = list(self._phases)
        known: dict[tuple[int, int], LaunchPlace] = {}
        found = []
        for kernel, number, phase, count in self._counter.take():
            where = known.get((number, phase))
            if where is None:
                place, module, decodes = self._places[number]
                where = LaunchPlace(phases[phase], str(place), module, decodes and not self._mixed)
                known[number, phase] = where
            found.append((kernel, where, count))
        self._of_node.clear()
        decoded = 0 if self._mixed else self._decoded
        self._decoded, self._mixed = 0, False
        return step_launches(found, decoded)

    def _here(self) -> int:
        """The number of the place that calls the operator."""
        try:
            return self._place_now()
        except Exception as error:  # an internal error must not end the program
            if from_program(error):
                raise
            self.stop()
            self._on_fault(error)
            return _OUTSIDE

    def _place_now(self) -> int:
        if compiled_code.any_known() and (generated := self._generated_place()):
            return generated
        node = _node_now()
        if node is not None:
            found = self._of_node.get(node._sequence_nr())
            return self._backward_place() if found is None else found
        place = self._line()
        sequence = _sequence_now()
        if sequence != self._sequence and _thread_now() == self._thread:
            # The nodes of the graph that were created for this operator, before it runs.
            for number in range(self._sequence, sequence):
                self._of_node[number] = place
            self._sequence = sequence
        return place

    def _line(self) -> int:
        """The user's innermost line, in the module that runs."""
        frame: FrameType | None = sys._getframe(2)
        known = self._is_user
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            user = known.get(file)
            if user is None:
                user = known[file] = not file.startswith(PACKAGE) and is_user_frame(
                    Frame(name_of(file), 1, code.co_name)
                )
            if user:
                break
            frame = frame.f_back
        module = self._modules.running
        if frame is None:
            return self._number((module,), NoPlace.NO_USER_FRAME, module)
        key: tuple[Any, ...] = (file, frame.f_lineno, code.co_name, module)
        number = self._numbers.get((*key, _DECODING) if self._decoding else key)
        if number is None:
            shown = Frame(name_of(file), frame.f_lineno or 0, code.co_name)
            number = self._number(key, place_of(shown), module)
        return number

    def _generated_place(self) -> int:
        """The place of the generated code that runs, if its line in the program is known; 0
        otherwise.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno or 0
            origins = compiled_code.lines_of(file, line)
            if origins is not None:
                frames = (Frame(name_of(one.file), one.line, one.function) for one in origins)
                shown = next((place_of(one) for one in frames if is_user_frame(one)), None)
                if shown is None:
                    return 0
                module = compiled_code.module_of(file, line)
                return self._number((file, line, module), shown, module)
            frame = frame.f_back
        return 0

    def _backward_place(self) -> int:
        """The line that called the backward pass: for the accumulation of gradients, and for graphs
        from before the step.
        """
        frames = self._backward.running
        number = self._numbers.get(frames)
        if number is None:
            shown = next((place_of(one) for one in frames if is_user_frame(one)), None)
            number = self._number(frames, shown or NoPlace.AUTOGRAD_ENGINE, "")
        return number

    def _number(self, key: tuple[Any, ...], place: SourceLine, module: str) -> int:
        if self._decoding:
            key = (*key, _DECODING)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._places)
            # Not what follows a call of generate, up to the next call of a model.
            self._places.append((place, module, self._decoding and self.in_generate()))
        return number
