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
            **keys("communication by_device by_rank"),
            **keys("suggestions not_tried smallest_gpus growth growth_advice phases causes model"),
            **keys("step_time cost"),
        },
        EstimatedChange: keys("name how verdict needed"),
        Transfer: keys("op axis ranks dtype count payload wire module", place=_place),
    },
)
"""History:
* 1.0: first version.
* 2.0: with all documents; nothing changed in this one. ``schemas/estimate-2.json``.
* 2.1: ``compute`` and ``compute_why``.
* 2.2: ``compiled``.
* 2.3: ``communication``, ``rank`` and ``by_rank``.
* 2.4: ``alike`` of each rank; ``nccl``, which ``total`` includes; ``verdict_why``, and a
  verdict for runs that have to release cached memory; ``by_device``.
* 2.5: ``torch``; ``allocated``, a range.
* 2.6: ``simulated_torch``; ``processes``, which ``total`` includes.
* 2.7: ``engine``.
* 2.8: ``suggestions``, ``not_tried`` and ``smallest_gpus``.
* 2.9: ``growth``.
* 2.10: ``growth_advice``; ``model``.
* 3.0: ``engine``, ``simulated_torch`` and times of communication are gone: torch's own CUDA code
  runs, as installed. ``schemas/estimate-3.json``.
* 3.1: ``phases``; ``causes``.
* 3.2: ``step_time``; ``cost``.
* 3.3: ``step_time.by_rank``, which is empty.
"""

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
