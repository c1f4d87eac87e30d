"""Write the JSON Schemas that are shipped, from the types that encode the documents.

    python docs/schemas.py

A test checks that they are current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from gpuprobe.reporters.json import (
    check,
    diff,
    doctor,
    estimate,
    explain,
    fit,
    hang,
    hazards,
    info,
    outcomes,
    replay,
    report,
    scale,
    serving,
)
from gpuprobe.reporters.json.documents import Document
from gpuprobe.reporters.json.json_schema import schema_of

FOLDER: Final = Path(scale.__file__).parent / "schemas"

FILES: Final[dict[str, tuple[Document[Any], ...]]] = {
    "check-2": (check.DOCUMENT,),
    "cuda-torch-1": (outcomes.CUDA_TORCH,),
    "diff-2": (diff.DOCUMENT,),
    "doctor-2": (doctor.MACHINE, doctor.RANKS),
    "error-1": (outcomes.ERROR,),
    "estimate-3": (estimate.DOCUMENT,),
    "explain-1": (explain.DOCUMENT,),
    "fit-2": (fit.DOCUMENT,),
    "gpus-1": (estimate.GPUS,),
    "hang-1": (hang.DOCUMENT,),
    "hazards-2": (hazards.DOCUMENT,),
    "info-2": (info.DOCUMENT,),
    "replay-2": (replay.DOCUMENT,),
    "report-2": (report.DOCUMENT,),
    "run-1": (outcomes.RUN,),
    "runs-1": (outcomes.RUNS,),
    "scale-1": (scale.DOCUMENT,),
    "serving-1": (serving.DOCUMENT,),
    "serving-fit-1": (serving.FIT,),
    "written-1": (outcomes.WRITTEN,),
}


def text(name: str) -> str:
    """The content of a schema's file."""
    return json.dumps(schema_of(*FILES[name]), indent=2) + "\n"


if __name__ == "__main__":
    for name in FILES:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")
