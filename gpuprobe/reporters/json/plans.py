"""Plans as JSON documents: estimates, tables of GPUs, searches, and vLLM servers."""

from __future__ import annotations

from typing import Annotated, Final

from gpuprobe.model.io.encoder import InnerObject, keys
from gpuprobe.model.plans.estimate import Estimate, EstimatedChange, Verdict
from gpuprobe.model.plans.fit import Fit, FitChoice, FitSuggestion
from gpuprobe.model.plans.gpu_table import GpuTable
from gpuprobe.model.plans.serving import (
    ServingEstimate,
    ServingFit,
)
from gpuprobe.model.record import record
from gpuprobe.model.run.communication import Transfer
from gpuprobe.model.values import Bytes
from gpuprobe.reporters.json.documents import Document


def _place(row: Transfer) -> str:
    return str(row.place)


def _range(name: str, about: str = "") -> InnerObject:
    return InnerObject({"at_least": f"{name}_low", "at_most": f"{name}_high"}, about)


ESTIMATE: Final = Document(
    "gpuprobe.estimate",
    (3, 3),
    Estimate,
    "What a training script would need on a GPU. Sizes are bytes. A minor version adds keys.",
    shapes={
        Estimate: {
            **keys("gpu devices ranks rank steps settings compute compute_why"),
            **keys("torch"),
            **keys("verdict verdict_why fits capacity peak_allocated peak_reserved"),
            "allocated": _range("allocated", "the peak, over both orders of addresses"),
            "reserved": _range("reserved", "over both orders of addresses"),
            "context": _range("context", "of the CUDA context and its libraries"),
            "nccl": _range("nccl", "of NCCL's buffers, included in total"),
            "processes": InnerObject(
                {
                    "count": "processes",
                    "at_least": "processes_low",
                    "at_most": "processes_high",
                },
                "Processes that the program starts and that use the GPU: how many at one time, and "
                "what they need then, with their contexts.",
            ),
            "total": _range("total"),
            **keys("attributed by_category by_module by_line assumed not_modelled compiled"),
            **keys("communication by_device by_rank"),
            **keys("suggestions not_tried smallest_gpus growth growth_advice phases causes model"),
            **keys("step_time no_kernels cost"),
        },
        EstimatedChange: keys("name how verdict needed"),
        Transfer: keys("op axis ranks dtype count payload wire module", place=_place),
    },
)

GPUS: Final = Document(
    "gpuprobe.gpus",
    (1, 0),
    GpuTable,
    "A training run on several GPUs: which hold it, how long a step takes there, and what it "
    "costs. Sizes are bytes, times nanoseconds.",
)
"""History: 1.0: first version."""


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


FIT: Final = Document(
    "gpuprobe.fit",
    (2, 5),
    Fit,
    "The largest value of a setting with which a training script fits on a GPU. Sizes are bytes. A "
    "minor version adds keys.",
    shapes={
        Fit: keys(
            "gpu capacity ranks argument applied compute",
            searched=InnerObject({"from": "least", "to": "most"}),
            largest="largest",
            trials=_trials,
            **keys("suggestions not_tried unusual interrupted out_of_time choices without_effect"),
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
            **keys("low_ns expected_ns high_ns tokens images samples measured no_time no_kernels"),
            **keys("cost"),
        ),
    },
    added={
        "2.1": "interrupted",
        "2.3": "out_of_time",
        "2.4": "FitChoice.low_ns FitChoice.expected_ns FitChoice.high_ns FitChoice.tokens "
        "FitChoice.images FitChoice.samples FitChoice.measured FitChoice.no_time "
        "FitChoice.no_kernels FitChoice.cost",
        "2.5": "without_effect",
    },
)


SERVING: Final = Document(
    "gpuprobe.serving",
    (1, 3),
    ServingEstimate,
    "A vLLM that was started without a GPU. Sizes are bytes; null: vLLM failed before.",
    title="gpuprobe estimate of a vLLM server",
    added={
        "1.1": "graph_nodes ranks unquantized",
        "1.2": "compiling later",
        "1.3": "graphs_reserved",
    },
)

SERVING_FIT: Final = Document(
    "gpuprobe.serving-fit",
    (1, 0),
    ServingFit,
    "How far a vLLM deployment goes, by starts without a GPU. Sizes are bytes; null: it failed.",
    title="gpuprobe fit of a vLLM server",
)
