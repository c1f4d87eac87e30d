"""The rule of evaluations that keep what a backward pass would use."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.place import Place
from gpuprobe.model.rules import define

WITH_GRADIENTS: Final = define(
    "GP306",
    "evaluation-with-gradients",
    Level.WARNING,
    "An evaluation runs without gradients",
    description="""
    A model in eval mode computes a result that requires gradients, and no backward pass follows:
    autograd keeps the activations of each forward pass for as long as its result, or a loss that
    is computed from it, is kept. `model.eval()` does not change that. Detected by the model's
    calls: a program that never calls `eval()` has no evaluations that can be detected.
    """,
    remedy="run the evaluation under `torch.no_grad()`, or `torch.inference_mode()`",
)


def evaluation_finding(place: Place | None) -> Finding:
    """The finding of the line that calls the model."""
    return WITH_GRADIENTS.finding(
        "the model is in eval mode, and its forward pass keeps what a backward pass would use; "
        "none follows",
        fix="Run the evaluation without gradients.",
        code="with torch.no_grad():",
        location=place,
    )
