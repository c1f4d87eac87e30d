"""The analysis on recordings of real training on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

import gpuprobe
from gpuprobe.analysis.leaks import Leaks, leaks_over_steps
from gpuprobe.analysis.peak.peaks import by_category, by_line, by_module, high_water
from gpuprobe.model.memory import Category
from gpuprobe.model.place import Place
from gpuprobe.model.values import Unavailable

torch = pytest.importorskip("torch")


def train(path: Path, *, width: int = 64, steps: int = 6, leak: bool = False) -> None:
    gc.collect()  # an earlier test's model may be kept by a cycle, and would be counted
    model = torch.nn.Sequential(
        torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    with gpuprobe.record(path, model=model, optimizer=optimizer, level="trace") as recorder:
        for _ in range(steps):
            with recorder.step():
                loss = model(torch.randn(16, 32)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if leak:
                    kept.append(torch.ones(1000))  # the line that leaks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("recordings")

    def make(name: str, **given: int | bool) -> Path:
        path = folder / f"{name}.gpuprobe"
        if not path.exists():
            train(path, **given)  # type: ignore[arg-type]
        return path

    return make


def test_a_leak_in_real_training_is_found_with_its_steps(recorded: Callable[..., Path]) -> None:
    (rank,) = gpuprobe.load(recorded("leak", leak=True)).ranks
    found = leaks_over_steps(rank.traces)
    assert isinstance(found, Leaks)
    (leak,) = found.leaking
    assert isinstance(leak.line, Place)
    assert (leak.line.file, leak.line.function) == (__file__, "train")
    assert leak.per_step == 4000
    assert leak.steps == (0, 1, 2, 3)
    # Optimizer state and parameters outlive steps too, and do not grow.
    assert len(found.lines) > 1


def test_the_peak_of_every_step_adds_up(recorded: Callable[..., Path]) -> None:
    (rank,) = gpuprobe.load(recorded("plain")).ranks
    traces = list(rank.traces)
    assert traces
    for trace in traces:
        mark = high_water(trace)
        for by in (by_category, by_line, by_module):
            assert sum(share.bytes for share in by(mark)) == mark.allocated > 0
    shares = {share.key: share.bytes for share in by_category(high_water(traces[-1]))}
    parameters = 4 * (32 * 64 + 64 + 64 * 8 + 8)
    assert shares[Category.PARAMETER.value] == parameters
    # Two moments per parameter; AdamW's step counters are four bytes per tensor more.
    assert shares[Category.OPTIMIZER_STATE.value] == 2 * parameters + 4 * 4


def test_a_wider_model_is_explained_row_by_row(recorded: Callable[..., Path]) -> None:
    before, after = recorded("plain"), recorded("wide", width=128)
    found = gpuprobe.diff(before, after)
    assert found.cautions == ()
    (peak,) = found.peaks
    assert not isinstance(peak.delta, Unavailable)
    assert peak.delta > 0
    assert isinstance(peak.rows["need"], Unavailable)  # on the CPU, uses are not traced
    for by in ("category", "module", "line"):
        rows = peak.rows[by]
        assert not isinstance(rows, Unavailable)
        assert sum(row.delta for row in rows) == peak.delta
    categories = {row.key: row.delta for row in peak.rows["category"]}  # type: ignore[union-attr]
    grown = 4 * (32 * 64 + 64 + 64 * 8)
    assert categories["parameter"] == grown
    assert categories["optimizer_state"] == 2 * grown
