"""The constants of serving estimates against the public logs that they are from, by halves."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import serving_logs

from gpuprobe.catalogue.gpus import find
from gpuprobe.planning.serving.figures import GRAPH, GRAPH_CUDA_13, graph_bytes, overheads

FILE = Path(__file__).resolve().parents[1] / "recorded" / "vllm" / "public_logs.json"
GIB = 1 << 30


def _halves(several: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Logs of one GPU or of several: those that the constants were made from, and the others."""
    logs = [
        log
        for log in json.loads(FILE.read_text())["logs"]
        if (log["tp"] * log["pp"] > 1) == several
    ]
    even: list[dict[str, Any]] = []
    odd: list[dict[str, Any]] = []
    for log in logs:
        first = hashlib.sha256(log["model"].lower().encode()).digest()[0]
        (odd if first % 2 else even).append(log)
    return even, odd


def test_constants() -> None:
    fitted, others = _halves(several=False)
    assert (len(fitted), len(others)) == (29, 14)
    found = overheads(find("h100-80gb"))
    assert round(found.start / GIB, 2) == median(log["initial"] for log in fitted)
    assert round(found.first_use / GIB, 2) == median(log["non_torch"] for log in fitted)
    sums = [(log["initial"] + log["non_torch"]) * GIB for log in others]
    assert mean(abs(total - found.start - found.first_use) for total in sums) < 0.025 * GIB
    # Printed with two digits, so that each is off by up to 0.01 GiB in sum.
    rounding = 0.01 * GIB
    assert all(found.low - rounding <= total <= found.high + rounding for total in sums)


def test_constants_of_tensor_parallelism() -> None:
    """On several GPUs: the sum of both constants, and of the experts' communicator if there is
    one.
    """
    experts = ("Kimi-VL", "Mixtral", "Scout", "gpt-oss")
    fitted, others = _halves(several=True)
    assert (len(fitted), len(others)) == (10, 8)
    found = {ranks: overheads(find("h100-80gb"), ranks) for ranks in (2, 4)}
    for ranks in (2, 4):
        dense = [
            log
            for log in fitted
            if log["tp"] == ranks and not any(name in log["model"] for name in experts)
        ]
        assert abs(found[ranks].start / GIB - median(log["initial"] for log in dense)) < 0.006
        assert abs(found[ranks].first_use / GIB - median(log["non_torch"] for log in dense)) < 0.006
    errors = []
    for log in others:
        ours = found[log["tp"]]
        more = ours.experts if any(name in log["model"] for name in experts) else 0
        errors.append(
            (log["initial"] + log["non_torch"]) - (ours.start + ours.first_use + more) / GIB
        )
    assert mean(map(abs, errors)) < 0.04
    assert max(map(abs, errors)) < 0.09


def test_the_driver_s_part_of_cuda_graphs() -> None:
    """Least squares over the text models of one half, on one GPU, and the errors of the others: the
    other half, and multimodal models, none of which had been run when the constants were fitted.
    """
    rows = [
        (row["found"]["graphs_captured"], row["found"]["graph_nodes"], _driver(row), row)
        for row in serving_logs.compared()
        if row["log"].get("graphs")
        and "graph_nodes" in row["found"]
        and row["log"]["tp"] * row["log"]["pp"] == 1
    ]
    text = serving_logs.text_models()
    by_model: dict[str, list[tuple[float, float, float]]] = {}
    others = []
    for *measured, row in rows:
        if row["held_out"] or row["log"]["model"] not in text:
            others.append((*measured, row))
        else:
            by_model.setdefault(row["log"]["model"].lower(), []).append(tuple(measured))
    fitted = [tuple(map(mean, zip(*starts, strict=True))) for starts in by_model.values()]
    assert len(fitted) >= 3
    assert len(others) >= 3
    gg, gn, nn, gd, nd = (
        sum(first(row) * second(row) for row in fitted)
        for first, second in (
            (_graphs, _graphs), (_graphs, _nodes), (_nodes, _nodes),
            (_graphs, _taken), (_nodes, _taken),
        )
    )  # fmt: skip
    determinant = gg * nn - gn * gn
    assert abs((gd * nn - nd * gn) / determinant / GRAPH[0] - 1) < 0.01
    assert abs((gg * nd - gn * gd) / determinant / GRAPH[1] - 1) < 0.01
    errors = [abs(GRAPH[0] * row[0] + GRAPH[1] * row[1] - row[2]) / GIB for row in others]
    assert mean(errors) < 0.05


def test_cuda_graphs_with_cuda_13() -> None:
    """What vLLM sets aside for CUDA graphs, of which logs have the sum with the activation peak.
    Both starts were run with constants of CUDA 12, which were 0.08 to 0.1 GiB too many.
    """
    then = (129_309, 10_974)
    rows = [
        row
        for row in serving_logs.compared_newer()
        if "activation" in row["log"]["compared"] and "cuda" not in row["found"]
    ]
    assert len(rows) == 2
    for row in rows:
        found = row["found"]
        printed = row["log"]["activation"] * GIB - found["activation"]
        assert 0.07 < (found["graphs_reserved"] - printed) / GIB < 0.1
        less = (then[0] - GRAPH_CUDA_13[0]) * found["graphs_captured"]
        less += (then[1] - GRAPH_CUDA_13[1]) * found["graph_nodes"]
        assert abs(found["graphs_reserved"] - less - printed) / GIB < 0.006
    assert (graph_bytes(12), graph_bytes(13)) == (GRAPH, GRAPH_CUDA_13)


def _driver(row: dict[str, Any]) -> float:
    """What a log has for CUDA graphs beyond what torch's allocator took here, in bytes."""
    return float(row["log"]["graphs"] * GIB - row["found"]["graph_pool"])


def _graphs(row: tuple[Any, ...]) -> float:
    return float(row[0])


def _nodes(row: tuple[Any, ...]) -> float:
    return float(row[1])


def _taken(row: tuple[Any, ...]) -> float:
    return float(row[2])
