"""The table of models that vLLM serves, by GPU: cells say what was run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import serving_table

from gpuprobe.catalogue.gpus import find
from gpuprobe.planning.models.configs import find_model


def test_models_and_gpus_are_known() -> None:
    assert len(set(serving_table.MODELS)) == 40
    assert all(find_model(name).fields["architectures"] for name in serving_table.MODELS)
    assert len({find(name).title for name in serving_table.GPUS}) == 5


def test_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_table, "RESULTS", tmp_path / "results.json")
    starts = {"started": True, "tokens": 640, "max_model_len": 8192}
    later = {**starts, "later": {"started": True, "tokens": 848}}
    cache = {"started": False, "error": "ValueError: No available memory for the cache blocks."}
    error = "OutOfMemoryError: CUDA out of memory. Tried to allocate 70.00 MiB."
    weights = {"started": False, "stage": "loading the weights", "error": error}
    other = {"started": False, "error": "E: a|b"}
    rows = {"l4": cache, "l40s": starts, "a100-80gb": later, "h100-80gb": other}
    found = {"phi-2": {"l4": weights, "l40s": {**weights, "stage": "in the profiling run"}}}
    found["qwen3-8b"] = rows
    serving_table.RESULTS.write_text(json.dumps(found))
    page = serving_table.page()
    assert page.startswith("6 of 200 starts were run")
    assert page.splitlines()[-2:] == [
        "| qwen3-8b | no room for a KV cache | 640; 8,192 | 640 (848); 8,192 | E: a/b | not run |",
        "| phi-2 | weights do not fit | no room for activations | not run | not run | not run |",
    ]


def test_cells_that_were_run_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_table, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(serving_table, "start", lambda *cell: {"seconds": 1, "cell": cell})
    serving_table.RESULTS.write_text(json.dumps({"phi-2": {"l4": {"seconds": 7}}}))
    serving_table.run("python3", jobs=2)
    found = serving_table.results()
    assert found["phi-2"]["l4"] == {"seconds": 7}
    cells = {
        (model, gpu): row["seconds"] for model, rows in found.items() for gpu, row in rows.items()
    }
    assert len(cells) == 200
    assert sum(cells.values()) == 206
