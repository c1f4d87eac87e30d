"""The corpus of `benchmarks/foreign_programs.py`: its list, and what its table concludes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's package, as the script imports it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield lambda name: importlib.import_module(f"foreign.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "foreign"]:
        del sys.modules[name]


def outcomes(**of: Any) -> dict[str, dict[str, Any]]:
    """Results of one program that runs everywhere, changed by mode: ``real={...}``."""
    result = {"name": "x/y", "status": "ran", "losses": [1.0], "allocated": 1024, "reserved": 2048}
    return {
        mode: {**result, "mode": mode, **of.get(mode, {})} for mode in ("cpu", "real", "shapes")
    }


def row(foreign: Any, **of: Any) -> Any:
    found = {("x/y", mode): result for mode, result in outcomes(**of).items()}
    return foreign("table").row_of("x/y", found)


def test_every_name_of_the_corpus_is_one_program(foreign: Any) -> None:
    programs = foreign("programs")
    names = programs.names()
    assert len(names) == len(set(names)) >= 200
    # Those whose names are data need their library to be loaded.
    own = [name for name in names if not name.startswith(("transformers/", "timm/"))]
    for name in own:
        assert programs.load(name).name == name
    assert sorted(own) == sorted(programs.REGISTERED), "a program is registered, and not listed"


def test_losses_are_compared_with_those_on_the_cpu(foreign: Any) -> None:
    assert row(foreign).losses == "equal"
    assert row(foreign, real={"losses": [1.0005]}).losses == "equal"
    assert row(foreign, real={"losses": [1.01]}).losses == "differ"
    assert row(foreign, real={"losses": [1.0, 1.0]}).losses == "differ"
    assert row(foreign, real={"losses": [1.01], "drawn": True}).losses == "draws on the device"
    assert row(foreign, real={"losses": [float("nan")]}).losses == "differ"


def test_peaks_are_equal_only_where_both_are(foreign: Any) -> None:
    assert row(foreign).peaks == "equal"
    assert row(foreign, shapes={"allocated": 512}).peaks == "differ"
    assert row(foreign, shapes={"reserved": 512}).peaks == "differ"


def test_a_bound_is_no_peak_that_differs_unless_it_is_less(foreign: Any) -> None:
    assumed = ["train.py:3: no element is zero, which is the most that can be"]
    assert row(foreign, shapes={"allocated": 1536, "assumed": assumed}).peaks == "a bound"
    assert row(foreign, shapes={"allocated": 512, "assumed": assumed}).peaks == "differ"
    assert row(foreign, shapes={"allocated": 1536, "assumed": ["else"]}).peaks == "differ"
    assert row(foreign, shapes={"assumed": assumed}).peaks == "equal"


def test_what_fails_on_the_cpu_is_not_tried(foreign: Any) -> None:
    table = foreign("table")
    found = {("x/y", m): r for m, r in outcomes(cpu={"status": "failed", "error": "no"}).items()}
    counts = table.summary(found, ["x/y"]).counts
    assert (counts["programs"], counts["tried"]) == (1, 0)


def test_a_failure_is_counted_and_named_unless_it_is_clear(foreign: Any) -> None:
    table = foreign("table")
    failed = {"status": "failed", "error": "boom", "clear": False}
    found = {("x/y", mode): result for mode, result in outcomes(shapes=failed).items()}
    summary = table.summary(found, ["x/y"])
    assert (summary.counts["run_real"], summary.counts["run_shapes"]) == (1, 0)
    assert (summary.counts["failures"], summary.counts["failures_clear"]) == (1, 0)
    assert summary.unclear == ["x/y (shapes)"]
    assert "boom" in summary.rows[0].note


def test_the_published_results_are_those_of_the_corpus(foreign: Any) -> None:
    programs, table = foreign("programs"), foreign("table")
    published = json.loads(table.PUBLISHED.read_text(encoding="utf-8"))
    assert [row["name"] for row in published["rows"]] == programs.names()
    rows = [table.Row(**row) for row in published["rows"]]
    tried = [row for row in rows if row.real != "-" and "not run" not in (row.real, row.shapes)]
    successful = sum(row.shapes == "ran" for row in tried)
    assert published["counts"]["run_shapes"] == successful
    assert [list(pair) for pair in table.sentences(published["counts"])] == published["figures"]
