"""The public start-up logs of vLLM, and the page about them."""

from __future__ import annotations

import hashlib
import json

import blocks
import serving_logs

FROZEN = "01f3d60d48f49078b8d926057da909fd2cbb288d87d4786222d891837b8f24f0"
"""Of the figures and configurations, before any of them was run."""
FROZEN_OTHER = "9d40889249bf98c586a54f8ff4866f28d66b993fcea9e7b4062914cc96ca4d67"
"""Of the start-ups from other sources, likewise."""
FROZEN_NEWER = "f31f7be7b9343f01ca46ae3019c31af98ba44da7f96536ab9e8e559875276182"
"""Of the start-ups of newer versions, likewise."""


def test_figures_and_configurations_are_those_that_were_frozen() -> None:
    assert serving_logs.frozen_digest() == FROZEN


def test_start_ups_from_other_sources_are_those_that_were_frozen() -> None:
    data = json.dumps(serving_logs.other(), sort_keys=True).encode()
    assert hashlib.sha256(data).hexdigest() == FROZEN_OTHER
    known = {*serving_logs.models(), *serving_logs.other()["models"]}
    logs = serving_logs.other()["logs"]
    assert len({serving_logs.other_name(log) for log in logs}) == len(logs) >= 20
    for log in logs:
        assert log["model"] in known
        assert log["source"]
        assert all(log[figure] is not None for figure in log["compared"])


def test_start_ups_of_newer_versions_are_those_that_were_frozen() -> None:
    found = serving_logs.newer()
    data = json.dumps(found, sort_keys=True).encode()
    assert hashlib.sha256(data).hexdigest() == FROZEN_NEWER
    known = {*serving_logs.models(), *found["models"]}
    for log in found["logs"]:
        assert log["model"] in known
        assert all(log[figure] is not None for figure in log["compared"])


def test_the_page_has_the_results() -> None:
    page = (blocks.DOCS / "serving-logs.md").read_text(encoding="utf-8")
    assert serving_logs.page() in page


def test_results_belong_to_logs_and_hold_the_stated_errors() -> None:
    names = {serving_logs.name(log) for log in serving_logs.logs()}
    assert set(json.loads(serving_logs.RESULTS.read_text())) <= names
    held_out = [row for row in serving_logs.compared() if row["held_out"]]
    assert held_out
    for figure, most in (("weights", 0.25), ("activation", 1.0), ("tokens", 1.0)):
        errors = [abs(row[figure]) for row in held_out if row[figure] is not None]
        assert sum(errors) / len(errors) < most


def test_the_options_are_those_of_a_log() -> None:
    log = {
        "model": "org/m", "tp": 2, "pp": 1, "max_model_len": 8, "dtype": "float16",
        "quantization": None, "kv_cache_dtype": "fp8", "utilization": 0.95,
    }  # fmt: skip
    assert serving_logs.name(log) == (
        "org/m --max-model-len 8 --no-enable-prefix-caching --gpu-memory-utilization 0.95 "
        "--dtype float16 --kv-cache-dtype fp8 --tensor-parallel-size 2"
    )
    assert serving_logs.why_not(log)
