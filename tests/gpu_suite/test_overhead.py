"""The overhead benchmark runs every tool it can without a GPU, and names what it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import overhead
import pytest


def test_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(overhead.STEPS, "GPT-2 small")
    monkeypatch.delitem(overhead.WATCHERS, "torch.profiler memory+stack")
    out = tmp_path / "overhead.json"
    arguments = ["--device", "cpu", "--tiny", "--blocks", "2", "--count", "1", "--out", str(out)]
    code = overhead.main(arguments)
    results = json.loads(out.read_text())["results"]["2,000 ops"]
    assert len(results["gpuprobe counters"]["ratios"]) == 2
    assert results["gpuprobe trace"]["plain"] > 0
    assert "torch sanitizer" not in results
    problems = [found["problem"] for found in results.values() if "problem" in found]
    assert code == bool(problems)
    assert all("detect_hazards" in problem for problem in problems)
    assert capsys.readouterr().out.count("2,000 ops") == len(results)


def test_a_line_for_each_outcome() -> None:
    assert "1.100" in overhead.line("a", "b", {"plain": 0.1, "ratios": [1.1, 1.1, 1.1]})
    assert overhead.line("a", "b", {"problem": "broke"}).endswith("broke")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert overhead.main([]) == 3
    assert "no CUDA device" in capsys.readouterr().err
