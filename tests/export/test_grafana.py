"""The dashboard in docs/grafana: all that it asks for is exported, under these labels and units."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpuprobe.reporters.metrics.exporter import SELF_METRICS
from gpuprobe.reporters.metrics.gpu import GPU_METRICS
from gpuprobe.reporters.metrics.metrics import Metric
from gpuprobe.reporters.metrics.run import RUN_METRICS

PATH = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "gpuprobe.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
METRICS = {metric.name: metric for metric in (*GPU_METRICS, *RUN_METRICS, *SELF_METRICS)}
SCRAPED = {"instance", "job"}  # labels that Prometheus adds

# Prometheus' unit -> Grafana's, for values and for their rates.
UNITS = {
    "bytes": {"bytes", "Bps", "percentunit"},
    "bytes_per_second": {"Bps"},
    "seconds": {"s"},
    "ratio": {"percentunit"},
    "celsius": {"celsius"},
    "watts": {"watt"},
    "hertz": {"hertz"},
    "": {"short"},
}


def asked(expression: str) -> list[tuple[Metric, str]]:
    """The metrics of an expression, each with its selector."""
    found = re.findall(r"\b(gpuprobe_\w+)(?:\{([^}]*)\})?", expression)
    return [(METRICS[name], selector) for name, selector in found]


def expressions() -> list[tuple[str, str, str]]:
    """(panel, expression, legend)"""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in GRAPHS
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(("title", "expression", "legend"), expressions())
def test_what_a_panel_asks_for_is_exported(title: str, expression: str, legend: str) -> None:
    metrics = asked(expression)
    assert metrics, title
    kept: set[str] = set()
    for metric, selector in metrics:
        labels = {*metric.labels, *SCRAPED}
        kept |= labels
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= labels
        for label, values in re.findall(r'(\w+)(?:=|!=|=~|!~)"([^"$]*)"', selector):
            assert values_known(metric, label, values), f"{metric.name}: {label}={values}"
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", grouped)) <= kept
    by = re.match(r"\w+ by \(([^)]*)\)", expression)
    if by:
        kept = set(re.split(r",\s*", by[1]))
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept


def values_known(metric: Metric, label: str, values: str) -> bool:
    """Whether the metric really has the label with these values, on a fleet where all is there."""
    from gpuprobe.api.devices import inventory
    from gpuprobe.reporters.metrics.gpu import GpuNames, gpu_families
    from gpuprobe.reporters.metrics.run import STATES

    if metric in RUN_METRICS:
        return label == "state" and values in STATES
    if not FAMILIES:
        FAMILIES.extend(gpu_families(inventory(("nvml",), "8xh100"), GpuNames(), xids={}))
    (one,) = [family for family in FAMILIES if family.metric is metric]
    there = {sample.labels[metric.labels.index(label)] for sample in one.samples}
    return set(values.split("|")) <= there


FAMILIES: list[Any] = []


@pytest.mark.parametrize("panel", GRAPHS, ids=lambda panel: panel["title"])
def test_units_are_those_of_the_metrics(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        for metric, _ in asked(target["expr"]):
            if panel["type"] != "table" and metric.name != "gpuprobe_run_state":
                assert unit in UNITS[metric.unit] or (unit == "s" and metric.unit == ""), target


def test_counters_are_shown_as_rates() -> None:
    for title, expression, _ in expressions():
        for metric, _ in asked(expression):
            if metric.kind == "counter" and title != "Hazards and synchronisations":
                assert re.search(rf"(rate|increase)\({metric.name}\b", expression), title


def test_variables_and_datasource() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == names
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"${datasource}", "gpuprobe"}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.findall(r"\b(gpuprobe_\w+).*, (\w+)\)", variable["definition"])[0]
            assert label in (*METRICS[name].labels, *SCRAPED)
            assert variable["query"]["query"] == variable["definition"]


def test_panels_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_page_names_the_file() -> None:
    page = (PATH.parents[1] / "how-to" / "export-metrics.md").read_text("utf-8")
    assert "(../grafana/gpuprobe.json)" in page


def test_the_page_names_no_other_metrics() -> None:
    page = (PATH.parents[1] / "how-to" / "export-metrics.md").read_text("utf-8")
    for line in page.splitlines():
        assert set(re.findall(r"\bgpuprobe_\w+\w", line)) <= {*METRICS, "gpuprobe_run_"}, line
