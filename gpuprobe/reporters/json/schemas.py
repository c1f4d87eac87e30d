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
    hazards,
    info,
    jobs,
    outcomes,
    plans,
    replay,
    report,
)
from gpuprobe.reporters.json.documents import Document
from gpuprobe.reporters.json.json_schema import Schema, schema_of

_DOCUMENTS: Final[tuple[Document[Any], ...]] = (
    check.DOCUMENT,
    outcomes.CUDA_TORCH,
    diff.DOCUMENT,
    doctor.MACHINE,
    outcomes.ERROR,
    plans.ESTIMATE,
    report.EXPLANATION,
    plans.FIT,
    plans.GPUS,
    hazards.DOCUMENT,
    info.DOCUMENT,
    replay.DOCUMENT,
    report.DOCUMENT,
    outcomes.RUN,
    outcomes.RUNS,
    jobs.SCALING,
    plans.SERVING,
    plans.SERVING_FIT,
    outcomes.WRITTEN,
)

SCHEMAS: Final[dict[str, tuple[Document[Any], ...]]] = {
    f"{one.name.removeprefix('gpuprobe.')}-{one.version[0]}": (
        (one, doctor.RANKS) if one is doctor.MACHINE else (one,)
    )
    for one in _DOCUMENTS
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
