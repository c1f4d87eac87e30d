"""An estimate as a JSON document."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.io.encoder import InnerObject, keys
from gpuprobe.model.plans.estimate import Estimate, EstimatedChange
from gpuprobe.model.plans.gpu_table import GpuTable
from gpuprobe.model.run.communication import Transfer
from gpuprobe.reporters.json.documents import Document


def _place(row: Transfer) -> str:
    return str(row.place)


def _range(name: str, about: str = "") -> InnerObject:
    return InnerObject({"at_least": f"{name}_low", "at_most": f"{name}_high"}, about)


DOCUMENT: Final = Document(
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
            **keys("communication link per_node communication_time by_device by_rank"),
            **keys("suggestions not_tried smallest_gpus growth growth_advice phases causes model"),
            **keys("step_time cost"),
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

document = DOCUMENT.plain
write = DOCUMENT.write
estimate_of = DOCUMENT.read
