"""Steps of a program that only infers: each outermost call of a model in ``inference_mode``."""

from __future__ import annotations

import torch

from gpuprobe.sampler.hooks.discover import is_trained


class InferenceSteps:
    """Which calls of models end a step. Where an optimizer is alive that trains the first one, none
    does: they belong to an evaluation before training, between its steps or after it.
    """

    def __init__(self) -> None:
        self._open = 0  # calls of models inside one another
        self._trains: bool | None = None  # not looked yet: it takes some ten milliseconds

    def begins(self) -> None:
        self._open += 1

    def ends(self) -> None:
        self._open -= 1

    def trains(self) -> None:
        """An optimizer is at work: no call ends a step from here on."""
        self._trains = True

    def ends_step(self, model: torch.nn.Module) -> bool:
        """Whether the call of ``model`` that has just ended was a step."""
        if self._trains or self._open > 0 or not torch.is_inference_mode_enabled():
            return False
        if self._trains is None:
            self._trains = is_trained(model)
        return not self._trains
