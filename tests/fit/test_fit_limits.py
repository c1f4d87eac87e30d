"""The time of a search, what it prints meanwhile, and what it does not try."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprobe.errors import UsageError
from gpuprobe.model.plans.fit import Fit
from gpuprobe.model.plans.request import EstimateRequest, ParameterSource
from gpuprobe.planning.estimates import SUFFICIENT
from gpuprobe.planning.fit import Deadline, _CaseSearch, _Runner
from gpuprobe.planning.trials import TOO_SLOW, EstimateServer
from gpuprobe.reporters.sections.parts import Line
from gpuprobe.reporters.sections.plans import fit_sections

GIB = 1 << 30


class Estimates:
    """Estimates of a run that needs 1 GiB for each unit of the value, and 30 s."""

    def __init__(self, why: str = SUFFICIENT, stop_at: int = 0) -> None:
        self.now = 0.0
        self.computed: list[str] = []
        self._why = why
        self._stop_at = stop_at

    def __call__(self, request: EstimateRequest, seconds: float) -> dict[str, Any] | None:
        if self._stop_at and request.value >= self._stop_at:
            raise KeyboardInterrupt
        self.computed.append(request.compute)
        self.now += min(30, seconds)
        if seconds < 30:
            return None
        need = request.value * GIB
        return {
            "gpu": "t4",
            "capacity": 16 * GIB,
            "verdict": "fits" if need <= 16 * GIB else "does not fit",
            "peak_allocated": need,
            "total": {"at_most": need},
            "compute_why": self._why,
            "step_time": {"unavailable": "no step", "status": "error"},
            "no_kernels": "",
        }


def searched(estimates: Estimates, seconds: float = 600) -> tuple[_CaseSearch, list[str]]:
    lines: list[str] = []
    source = ParameterSource("--batch-size", value=1)
    case = EstimateRequest("train.py", gpu="t4", parameter=source)
    deadline = Deadline(seconds, lambda: estimates.now)
    runner = _Runner(estimates, "batch_size", lines.append, "", deadline)
    search = _CaseSearch(runner, case, 1, 100)
    search.search(1)
    return search, lines


def fit_of(estimates: Estimates, seconds: float = 600) -> Fit:
    search, _ = searched(estimates, seconds)
    interrupted = search.stopped == "interrupted"
    return search.result(
        interrupted=interrupted, out_of_time=bool(search.stopped) and not interrupted
    )


def title(fit: Fit) -> str:
    return fit_sections(fit)[-1].title


def test_at_its_limit_a_search_has_what_fits_so_far() -> None:
    fit = fit_of(Estimates(), seconds=100)  # 1, 2, and 15, where their line meets the memory
    assert (fit.largest, fit.untried) == (15, (16, 100))
    search, _ = searched(Estimates(), seconds=100)
    assert search.stopped == "the limit of 100 s was reached (--max-seconds)"
    assert title(fit) == (
        "t4: the time is over; largest batch_size that fits so far: 15, not yet tried: 16 to 100"
    )


def test_between_bounds_only_the_values_between_them_are_unknown() -> None:
    fit = fit_of(Estimates(), seconds=160)  # 1, 2, 15, 30, 16
    assert (fit.largest, fit.untried) == (16, (17, 29))


def test_the_same_for_an_interrupted_search() -> None:
    fit = fit_of(Estimates(stop_at=8))
    assert title(fit) == (
        "t4: interrupted; largest batch_size that fits so far: 2, not yet tried: 3 to 100"
    )


def test_a_search_that_ends_has_tried_all_that_matters() -> None:
    fit = fit_of(Estimates())
    assert (fit.largest, fit.untried) == (16, None)
    assert title(fit) == "t4: batch_size 16 is the largest that fits"


def test_a_larger_value_that_fails_is_not_said_not_to_fit() -> None:
    fit = fit_of(Estimates())
    assert fit.beyond is not None
    failed = replace(fit, beyond=replace(fit.beyond, failed="ValueError: no more rows"))
    assert title(failed) == "t4: batch_size 16 is the largest that runs, 17 fails"


def test_a_build_without_kernels_for_the_gpu_is_said() -> None:
    fit = fit_of(Estimates())
    assert fit.proof is not None
    text = "torch 2.13.0 has no kernels for compute capability 7.0"
    section = fit_sections(replace(fit, proof=replace(fit.proof, no_kernels=text)))[0]
    assert any(isinstance(part, Line) and part.text == text for part in section.parts)


def test_without_any_estimate_the_limit_is_the_error() -> None:
    search, _ = searched(Estimates(), seconds=20)
    assert search.failed == ("no estimate was made: the limit of 20 s was reached (--max-seconds)")


def test_lines_have_the_time_that_is_left() -> None:
    _, lines = searched(Estimates())
    # Doublings to 16 GiB and the search between them: at most 9 estimates after the first.
    assert lines[0].endswith("(largest so far: 1; about 4 min left)")
    assert lines[-1].endswith("(largest so far: 16)")
    _, lines = searched(Estimates(), seconds=100)
    assert lines[0].endswith("about 70 s left)")  # the limit


@pytest.mark.parametrize(("why", "then"), [(SUFFICIENT, "shapes"), ("they take seconds", "auto")])
def test_values_are_left_out_only_after_a_run_in_which_no_line_decided_by_them(
    why: str, then: str
) -> None:
    estimates = Estimates(why)
    searched(estimates)
    assert estimates.computed[0] == "auto"
    assert set(estimates.computed[1:]) == {then}


def test_an_estimate_is_ended_at_its_limit(tmp_path: Path) -> None:
    with EstimateServer() as server:
        assert server.within(EstimateRequest(), 0.0) is None
        assert server._process is None


@pytest.mark.parametrize(
    ("change", "setup", "message"),
    [
        ("checkpoint", "checkpoint", "activation checkpointing is on already"),
        ("8bit", "AdamW8bit", "the optimizer's state has 8 bits already"),
        ("offload", "CPUOffloadOptimizer", "the optimizer is on the CPU already"),
    ],
)
def test_what_is_on_already_is_not_tried(
    change: str, setup: str, message: str, restored_torch: None
) -> None:
    import torch

    from gpuprobe.planning.changes import apply

    apply(change)

    def program() -> object:
        if change == "checkpoint":
            return torch.utils.checkpoint.checkpoint(torch.nn.Linear(1, 1), torch.ones(1))
        kind = type(setup, (torch.optim.SGD,), {})
        return kind([torch.ones(1, requires_grad=True)], lr=0.1)

    with pytest.raises(UsageError, match=message):
        program()


@pytest.fixture
def restored_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what `apply` changes in this process."""
    import torch
    from torch.utils import checkpoint

    monkeypatch.setattr(torch.optim.Optimizer, "__init__", torch.optim.Optimizer.__init__)
    monkeypatch.setattr(torch.nn.Module, "__call__", torch.nn.Module.__call__)
    monkeypatch.setattr(checkpoint, "checkpoint", checkpoint.checkpoint)
    # A class that had a `__new__` for a while takes no arguments afterwards: subclasses get it.
    for name in ("Adam", "AdamW"):
        kind = getattr(torch.optim, name)
        monkeypatch.setattr(torch.optim, name, type(name, (kind,), {}))


def test_expandable_segments_of_the_environment_are_on_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpuprobe.planning.alternatives import expandable_already

    assert not expandable_already(None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert expandable_already(None)
    assert not expandable_already("max_split_size_mb:64")


def test_no_estimate_waits_again_for_a_run_with_all_values_that_was_too_slow() -> None:
    estimates = Estimates(f"train.py:7 decides by one, see below; with all values {TOO_SLOW}")
    search, _ = searched(estimates)
    assert search.largest == 16
    assert estimates.computed[0] == "auto"
    assert set(estimates.computed[1:]) == {"shapes"}
