"""The largest value that fits, as a JSON document."""

from __future__ import annotations

from typing import Annotated, Final

from gpuprobe.model.io.encoder import InnerObject, keys
from gpuprobe.model.plans.estimate import Verdict
from gpuprobe.model.plans.fit import Fit, FitChoice, FitSuggestion
from gpuprobe.model.record import record
from gpuprobe.model.values import Bytes
from gpuprobe.reporters.json.documents import Document


@record(frozen=True)
class EstimatedTrial:
    """A value that was tried, and what it needs."""

    value: int
    verdict: Verdict
    peak_allocated: Bytes
    needed: Annotated[Bytes, "at most, with the context"]


@record(frozen=True)
class FailedTrial:
    """A value for which there is no estimate, and why."""

    value: int
    failed: str


def _trials(fit: Fit) -> tuple[EstimatedTrial | FailedTrial, ...]:
    return tuple(
        FailedTrial(trial.value, trial.failed)
        if trial.failed
        else EstimatedTrial(trial.value, trial.verdict, trial.peak_allocated, trial.needed)
        for trial in fit.trials
    )


def _failed(choice: FitChoice) -> str | None:
    return choice.failed or None


DOCUMENT: Final = Document(
    "gpuprobe.fit",
    (2, 4),
    Fit,
    "The largest value of a setting with which a training script fits on a GPU. Sizes are bytes. A "
    "minor version adds keys.",
    shapes={
        Fit: keys(
            "gpu capacity ranks argument applied compute",
            searched=InnerObject({"from": "least", "to": "most"}),
            largest="largest",
            trials=_trials,
            **keys("suggestions not_tried unusual interrupted out_of_time choices"),
        ),
        FitSuggestion: keys(
            "name how",
            needed_before="before",
            needed_after="after",
            **keys("saved largest"),
        ),
        FitChoice: keys(
            "gpu ranks largest total needed capacity",
            failed=_failed,
            **keys("low_ns expected_ns high_ns tokens images no_time cost"),
        ),
    },
    added={
        "2.1": "interrupted",
        "2.3": "out_of_time",
        "2.4": "FitChoice.low_ns FitChoice.expected_ns FitChoice.high_ns FitChoice.tokens "
        "FitChoice.images FitChoice.no_time FitChoice.cost",
    },
)

document = DOCUMENT.plain
write = DOCUMENT.write
