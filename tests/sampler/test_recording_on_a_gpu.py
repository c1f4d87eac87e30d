"""The sampler, the report and the replay, on a simulated GPU as on a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gpuprobe
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text.draw import lines
from gpuprobe.torch_support.version import installed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.simulated]
MIB = 1 << 20


def _train(steps: int, width: int = 64) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.ReLU()).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(32, width, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["counters", "trace"])
def test_a_recording_reads_as_on_a_gpu(level: str, tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("a100-40gb"):
        with gpuprobe.record(tmp_path / "run.gpuprobe", level=level):
            _train(4)
        peak = torch.cuda.max_memory_allocated()
    report = gpuprobe.report(gpuprobe.load(tmp_path / "run.gpuprobe"))
    assert report["peak"]["device"] == "cuda:0"
    assert report["peak"]["allocated"] == {"at_least": peak, "at_most": peak, "exact": True}
    assert [finding["message"] for finding in report["findings"]] == []
    if level == "trace":
        total = sum(row["bytes"] for row in report["categories"]["rows"])
        assert total == report["categories"]["total"] == peak
        keys = {row["key"] for row in report["categories"]["rows"]}
        assert {"parameter", "optimizer_state"} <= keys
        lines = [row["file"] for row in report["top_lines"]["rows"] if row["file"]]
        assert lines
        assert all(Path(name).name == Path(__file__).name for name in lines)


def test_its_traces_replay_exactly(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("a100-40gb"), gpuprobe.record(tmp_path / "run", level="trace"):
        _train(3)
    result = gpuprobe.replay(tmp_path / "run")
    assert result.exact
    assert result.events > 0


def test_a_gpu_of_which_a_snapshot_was_taken_has_no_trace(tmp_path: Path) -> None:
    """Snapshots are of all GPUs. torch 2.15 takes one as a process group begins."""
    run = tmp_path / "run.gpuprobe"
    with gpuprobe.virtual_gpu("2xa100-40gb"), gpuprobe.record(run, level="trace"):
        torch.ones(1, device="cuda")
        torch.cuda.memory._snapshot()
        _train(3)
    (rank,) = gpuprobe.load(run).ranks
    assert {trace.device for trace in rank.traces} == {"cuda:0"}


def test_a_dumped_snapshot_is_torchs(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    path = tmp_path / "snapshot.pickle"
    with gpuprobe.virtual_gpu("a100-40gb"):
        torch.cuda.memory._record_memory_history()
        _train(2)
        torch.cuda.memory._dump_snapshot(str(path))
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        allocated = torch.cuda.memory_allocated()
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == allocated
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert _memory_viz.segsum(snapshot)
    assert gpuprobe.replay(path).exact


def test_running_out_of_memory_says_what_would_have_fitted(tmp_path: Path) -> None:
    def fragment() -> None:
        kept = []
        for _ in range(700):  # 20 MiB segments with 2 MiB to spare
            kept.append(torch.empty(9 * MIB, dtype=torch.uint8, device="cuda"))
            dropped = torch.empty(9 * MIB, dtype=torch.uint8, device="cuda")
            del dropped
        torch.empty(8 * 1024 * MIB, dtype=torch.uint8, device="cuda")

    def run() -> None:
        with gpuprobe.record(tmp_path / "run", level="trace") as recorder, recorder.step():
            fragment()

    wanted = pytest.raises(torch.OutOfMemoryError, match="Tried to allocate")
    with gpuprobe.virtual_gpu("t4", "shapes"), wanted:
        run()
    report: dict[str, Any] = gpuprobe.report(gpuprobe.load(tmp_path / "run"))
    failure = report["out_of_memory"][-1]
    assert failure["asked"] == 8 * 1024 * MIB
    assert any("expandable_segments" in change for change in failure["fits_with"])
    verdict, fits, *_ = failure["sentences"]
    assert verdict.startswith("Out of memory, but the GPU is not full: the 8.0 GiB requested at")
    assert fits.startswith("Replayed with ")
    assert fits.endswith("; whether the rest of the run fits is unknown.")


def test_settings_are_not_the_fix_of_a_gpu_that_is_nearly_full(tmp_path: Path) -> None:
    """With them the next request would fail."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(500 * MIB // 4, device="cuda"))

        def forward(self) -> torch.Tensor:
            large, small = self.weight, self.weight[: 9 * MIB // 4]
            for _ in range(19):
                large = large.tanh()
            for _ in range(476):  # 20 MiB segments with 2 MiB to spare
                small = small.tanh()
            return large[: 300 * MIB // 4].tanh()

    def run() -> None:
        with gpuprobe.record(tmp_path / "run", level="trace") as recorder, recorder.step():
            Model()()

    wanted = pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 300")
    with gpuprobe.virtual_gpu("t4", "shapes"), wanted:
        run()
    report = gpuprobe.report(tmp_path / "run")
    (failure,) = report["out_of_memory"]
    assert any("expandable_segments" in change for change in failure["fits_with"])
    assert failure["sentences"][0].startswith("Out of memory: the GPU is nearly full. With 13.9")
    head = next(part for part in report_sections(report.summary) if part.name == "head")
    words = " ".join("\n".join(lines([head], Style())).split())
    assert " fix Use activation checkpointing " in words, words
    assert "PYTORCH_CUDA_ALLOC_CONF" not in words


def test_what_grows_says_when_it_was_searched(tmp_path: Path) -> None:
    """After 4, 8, … steps; at the end of the program the list is gone."""

    def train(recorder: Any) -> None:
        history = []
        model = torch.nn.Linear(64, 1).cuda()
        for _ in range(10):
            loss = model(torch.randn(1 << 18, 64, device="cuda")).mean()
            loss.backward()
            model.zero_grad()
            with recorder.step():
                history.append(loss)

    run = gpuprobe.record(tmp_path / "run", level="trace", trace_steps="all")
    with gpuprobe.virtual_gpu("t4"), run as recorder:
        train(recorder)
    report = gpuprobe.report(gpuprobe.load(tmp_path / "run"))
    (cause,) = report["causes"]
    assert cause["sentence"].startswith(
        "history (a list of 8 in train) grows with the steps (last searched after step 7, of 10 "
        "steps), and nothing uses what it keeps: "
    )


@pytest.mark.parametrize("steps", ["all", "1"])
def test_gradients_that_a_step_frees_before_its_backward_are_gradients(
    steps: str, tmp_path: Path
) -> None:
    with (
        gpuprobe.virtual_gpu("t4", "shapes"),
        gpuprobe.record(tmp_path / "run", level="trace", trace_steps=steps),
    ):
        layers = [torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 8)]
        model = torch.nn.Sequential(*layers).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            loss = model(torch.randn(32, 512, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report = gpuprobe.report(gpuprobe.load(tmp_path / "run"))
    rows = {row["key"]: row["bytes"] for row in report["categories"]["rows"]}
    # The first bias has its gradient last: after the peak, which since torch 2.15 is that of the
    # workspace of the product before it.
    late = 0 if installed() < (2, 15) else 4 * 2048
    assert rows["gradient"] == rows["parameter"] - late > 4 * MIB
    before = [r for r in report["top_lines"]["rows"] if r["key"] == "(before the trace)"]
    if steps == "all":  # then the trace of the step before says where they were made
        assert before == []


def test_the_peak_has_the_modules_and_inputs(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).relu())

    path = tmp_path / "run"
    with gpuprobe.virtual_gpu("t4", "shapes"), gpuprobe.record(path, level="trace"):
        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            loss = model(torch.randn(256, 512).cuda()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report = gpuprobe.report(gpuprobe.load(path))
    rows = {
        row["key"]: row["bytes"]
        for table in ("categories", "top_modules")
        for row in report[table]["rows"]
    }
    assert rows["parameter"] == 4 * (2 * 512 * 2048 + 2048 + 512)
    assert rows["input"] == 4 * 256 * 512
    assert {"Net.one", "Net.two"} <= rows.keys()
    assert not {"(unknown)", "(before the trace)"} & rows.keys()
    assert any("backward passes on CUDA" in spot["what"] for spot in report["blind_spots"])
