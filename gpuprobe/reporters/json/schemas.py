"""The schemas of the JSON documents, made from the types that encode them. Wheels have the files.

python -m gpuprobe.reporters.json.schemas FOLDER    # writes them from a checkout
"""

from __future__ import annotations

import json
import sys
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
from gpuprobe.reporters.json.json_schema import Schema, schema_of

SCHEMAS: Final[dict[str, tuple[Document[Any], ...]]] = {
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
"""The documents of each schema, by its name: of two, a file has one or the other."""


def schema(name: str) -> Schema:
    """A JSON Schema (draft 2020-12): ``diff-2``, ``info-2``, … Raises KeyError for another name."""
    return schema_of(*SCHEMAS[name])


def write_schemas(folder: Path) -> None:
    """Write all to files in a folder, which is created. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEMAS:
        text = json.dumps(schema(name), indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
