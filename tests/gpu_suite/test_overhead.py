"""The overhead benchmark runs every tool it can without a GPU, and names what it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import overhead
import pytest
import warm_python


@pytest.fixture(autouse=True)
def quick_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's processes are forked from one that has imported torch."""
    monkeypatch.setattr(overhead.sys, "executable", warm_python.shared().python)


def test_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(overhead.STEPS, "GPT-2 small")
    for watcher in ("torch.profiler memory+stack", "gpuprobe hazards"):
        monkeypatch.delitem(overhead.WATCHERS, watcher)
    out = tmp_path / "overhead.json"
    arguments = ["--device", "cpu", "--tiny", "--blocks", "2", "--count", "1", "--out", str(out)]
    assert overhead.main(arguments) == 0
    results = json.loads(out.read_text())["results"]["2,000 ops"]
    assert len(results["gpuprobe counters"]["ratios"]) == 2
    assert results["gpuprobe trace"]["plain"] > 0
    assert "torch sanitizer" not in results
    assert capsys.readouterr().out.count("2,000 ops") == len(results)


def test_a_tool_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's memory history needs CUDA, which the child process has not."""
    monkeypatch.delitem(overhead.STEPS, "GPT-2 small")
    for watcher in list(overhead.WATCHERS):
        if watcher != "torch memory history":
            monkeypatch.delitem(overhead.WATCHERS, watcher)
    monkeypatch.setattr(overhead, "NEED_CUDA", ())
    arguments = ["--device", "cpu", "--tiny", "--blocks", "2", "--count", "1"]
    assert overhead.main([*arguments, "--out", str(tmp_path / "o.json")]) == 1
    assert "Error" in capsys.readouterr().out


def test_a_line_for_each_outcome() -> None:
    assert "1.100" in overhead.line("a", "b", {"plain": 0.1, "ratios": [1.1, 1.1, 1.1]})
    assert overhead.line("a", "b", {"problem": "broke"}).endswith("broke")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert overhead.main([]) == 3
    assert "no CUDA device" in capsys.readouterr().err
