"""Documents against their schemas."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuprobe.analysis.baseline.model import CheckResult, MetricResult
from gpuprobe.analysis.compare.diff import BY, Diff, DiffRow, PeakDiff
from gpuprobe.model.plans.estimate import (
    FITS,
    Estimate,
    EstimatedChange,
    EstimateShare,
    RoomyGpu,
)
from gpuprobe.model.plans.fit import Fit, FitSuggestion, Trial
from gpuprobe.model.plans.gpu_table import GpuRow, GpuTable
from gpuprobe.model.plans.step_time import TrainingCost
from gpuprobe.model.run.jobs import ScaleRow, Scaling
from gpuprobe.model.values import Bytes, Peak
from gpuprobe.reporters.json import check as check_json
from gpuprobe.reporters.json import diff as diff_json
from gpuprobe.reporters.json.jobs import SCALING
from gpuprobe.reporters.json.plans import ESTIMATE, FIT, GPUS
from gpuprobe.reporters.json.schemas import SCHEMAS, schema, write_schemas

ROOT = Path(__file__).resolve().parents[2]


def valid(name: str, document: dict[str, Any], version: int = 2) -> None:
    rules = schema(f"{name}-{version}")
    validator = jsonschema.Draft202012Validator(rules)
    validator.validate(json.loads(json.dumps(document)))
    assert set(document) == set(rules["properties"])
    for key in rules["required"]:
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({name: value for name, value in document.items() if name != key})


def test_files_of_schemas(tmp_path: Path) -> None:
    write_schemas(tmp_path / "schemas")
    written = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("schemas/*.json")}
    assert written == {name: schema(name) for name in SCHEMAS}
    for rules in written.values():
        jsonschema.Draft202012Validator.check_schema(rules)


@pytest.mark.parametrize("name", SCHEMAS)
def test_objects_may_get_further_keys(name: str) -> None:
    """A minor version adds keys: readers with an older schema accept its documents."""
    found = [schema(name)]
    for rule in found:
        if isinstance(rule, dict):
            assert rule.get("additionalProperties", True) is not False, rule
            found += rule.values()
        elif isinstance(rule, list):
            found += rule
    assert len(found) > 10


def test_estimate() -> None:
    size = Bytes(1 << 20)
    shares = (EstimateShare("activation", size),)
    found = Estimate(
        "h100-80gb", 1, 3, size, size, size, size, size, size, size, FITS, size, shares, shares,
        shares, ("x",), ("y",),
    )  # fmt: skip
    valid("estimate", ESTIMATE.plain(found), 3)
    advised = replace(
        found,
        suggestions=(EstimatedChange("bf16", "autocast", FITS, size),),
        not_tried=("8-bit optimizer: not installed",),
        smallest_gpus=(RoomyGpu("t4", size, size, True),),
    )
    valid("estimate", ESTIMATE.plain(advised), 3)
    assert ESTIMATE.read(ESTIMATE.plain(advised)) == advised


def test_fit() -> None:
    trial = Trial(8, FITS, Bytes(1), Bytes(2), Bytes(3))
    failed = Trial(16, "", Bytes(0), Bytes(0), Bytes(0), "it failed")
    for largest in (8, None):
        found = Fit(
            "t4", Bytes(3), "batch_size", "as the option --batch-size", "shapes", 1, 64, largest,
            trial, failed, (trial, failed),
            (FitSuggestion("bf16", "how", Bytes(2), Bytes(1), 12),), ("x",), (3,),
        )  # fmt: skip
        valid("fit", FIT.plain(found))


def test_check() -> None:
    metric = MetricResult("peak_allocated", "bytes", 10, 20, 11)
    row = DiffRow("train.py:3", 1, 2, 1, 1, "changed")
    for rows in (None, {"line": (row,), "category": ()}):
        found = CheckResult((metric,), (metric,), rows, "cause", (), ())
        valid("check", check_json.document(found))


@pytest.mark.parametrize(("kind", "path"), [("check", ("rows",)), ("diff", ("peaks", 0, "rows"))])
def test_minor_versions_may_add_tables_of_rows(kind: str, path: tuple[str | int, ...]) -> None:
    metric = MetricResult("peak_allocated", "bytes", 10, 20, 11)
    peak = PeakDiff(0, "cuda:0", Peak(1, 1), Peak(2, 2), "", "", dict.fromkeys(BY, ()))
    document = {
        "check": check_json.document(CheckResult((metric,), (), {}, "cause", (), ())),
        "diff": diff_json.document(Diff("a", "b", (peak,), ())),
    }[kind]
    tables: Any = document
    for key in path:
        tables = tables[key]
    validator = jsonschema.Draft202012Validator(schema(f"{kind}-2"))
    tables["dtype"] = []
    validator.validate(json.loads(json.dumps(document)))
    tables["dtype"] = 1
    assert not validator.is_valid(json.loads(json.dumps(document)))


def test_gpus() -> None:
    cost = TrainingCost(2.5, 1, 0.1, 0.2, 3.0, 4.0)
    rows = (
        GpuRow("t4", "fits", 1, 2, Bytes(3), 4, 5, 6, 7, cost=cost),
        GpuRow("l4", failed="no kernel"),
    )
    valid("gpus", GPUS.plain(GpuTable(rows)), 1)


def test_scale() -> None:
    row = ScaleRow("r", 4, 9, 10, 7, 2, 1, 1.0, 2.7, 0.675, 0.325, 0.1, 0.2, 0.025)
    unsplit = ScaleRow("r", 4, 9, 10, None, None, None, 1.0, 2.7, 0.675, 0.325, None, None, None)
    valid("scale", SCALING.plain(Scaling("run", (row, unsplit))), 1)
    assert schema("scale-1")["title"] == "gpuprobe scale, version 1"


def test_wheels_have_the_files(tmp_path: Path) -> None:
    hook = runpy.run_path(str(ROOT / "gpuprobe/native/runtime/hatch_build.py"))["WheelHook"]
    build_data: dict[str, Any] = {"force_include": {}}
    hook._add_schemas(None, tmp_path, build_data)
    assert build_data["force_include"] == {str(tmp_path): "gpuprobe/reporters/json/schemas"}
    assert {file.stem for file in tmp_path.iterdir()} == set(SCHEMAS)
