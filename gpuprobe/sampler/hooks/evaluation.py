"""The evaluations of a program that trains: calls of a model in eval mode, without a backward pass.

Whether a backward pass follows is known when it begins, or when the step ends without one. Until
then a call in eval mode counts as an evaluation. A program that trains a model in eval mode (its
batch norms frozen, or to change its input) shows that with its first backward pass; from then on
calls with gradients are training.
"""

from __future__ import annotations

import sys
from typing import Final

import torch

from gpuprobe.analysis.evaluation import evaluation_finding
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place, program_name
from gpuprobe.sampler.timeline import EVALUATION
from gpuprobe.sampler.tracing.tensors import passed_tensors
from gpuprobe.user_frames import USERS, innermost, name_of


class Evaluations:
    """Decides which calls of a model are an evaluation, and finds those with gradients."""

    def __init__(self) -> None:
        self._trains_in_eval = False
        self._open = False  # the running call is an evaluation with gradients enabled
        self._kept: dict[Place | None, None] = {}  # where models were called, since the last step
        self._reported: set[Place | None] = set()
        self._new: list[Finding] = []

    def phase_of(self, evaluation: bool) -> str:
        """The phase of a call that begins. ``evaluation``: the model is in eval mode."""
        grad = torch.is_grad_enabled()
        if not evaluation or (grad and self._trains_in_eval):
            self._open = False
            return "forward"
        self._open = grad
        return EVALUATION

    def returned(self, result: object) -> None:
        """The call returns this."""
        if self._open:
            self._open = False
            if any(tensor.requires_grad for tensor, _ in passed_tensors(result)):
                self._kept[_caller()] = None

    def backward_begins(self) -> bool:
        """A backward pass begins. Whether it is that of calls that were taken for evaluations."""
        if not self._kept:
            return False
        self._kept.clear()
        self._trains_in_eval = True
        return True

    def trains(self) -> None:
        """A call in training mode begins: no backward pass follows the evaluations before it."""
        self._settle()

    def step_ends(self) -> list[Finding]:
        """The findings that are new, as the step, or the program, ends."""
        self._settle()
        found, self._new = self._new, []
        return found

    def _settle(self) -> None:
        for place in self._kept:
            if place not in self._reported:
                self._reported.add(place)
                self._new.append(evaluation_finding(place))
        self._kept.clear()


_OF_MODULES: Final = torch.nn.modules.module.__file__


def _caller() -> Place | None:
    """The line of the program that calls the model, not one in the ``forward`` of a module that has
    it as a part: training runs that, too.
    """
    frame = innermost(sys._getframe(1), USERS)
    outer = frame
    while outer is not None:
        frame, called_by = outer, outer.f_back
        outer = None
        if called_by is not None and called_by.f_code.co_filename == _OF_MODULES:
            outer = innermost(called_by, USERS)
    if frame is None:
        return None
    code = frame.f_code
    return Place(
        name_of(code.co_filename), frame.f_lineno or code.co_firstlineno, program_name(code.co_name)
    )
