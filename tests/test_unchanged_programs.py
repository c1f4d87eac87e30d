"""Nothing that gpuprobe does changes a program: a sample of ``benchmarks/unchanged_programs.py``,
which runs as many random programs as wanted.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import FrameType

import program_sources
import pytest
import torch
import unchanged_programs
from unchanged_programs import BULK, WATCHERS, Run, judge

SEEDS = list(range(100, 107))


def test_programs_are_the_same_with_each_watcher() -> None:
    found = judge(SEEDS, "cpu", BULK["cpu"])
    assert not {name: rows for name, rows in found.items() if rows}


def test_every_part_is_a_program() -> None:
    """All parts with all their choices are valid, and drawn."""
    drawn = " ".join(program_sources.source(seed, streams=True) for seed in range(400))
    compile(
        "\n".join(program_sources.source(seed, streams=True) for seed in range(400)), "", "exec"
    )
    for text in program_sources.PARTS.values():
        fixed = [piece.strip() for piece in re.split(r"\{\w+\}|\{\{|\}\}|\n", text)]
        assert max(fixed, key=len) in drawn


def keeps_a_tensor(run: Run, folder: Path) -> None:
    original, kept = torch.Tensor.backward, []

    def backward(tensor: torch.Tensor, *args: object, **options: object) -> None:
        kept.append(tensor)
        original(tensor, *args, **options)  # type: ignore[no-untyped-call]

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        run()
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


def draws_a_number(run: Run, folder: Path) -> None:
    random.random()
    run()


def prints(run: Run, folder: Path) -> None:
    run()
    print("done")


def allocates(run: Run, folder: Path) -> None:
    original = torch.Tensor.backward

    def backward(tensor: torch.Tensor, *args: object, **options: object) -> None:
        torch.empty(100, device=tensor.device)
        original(tensor, *args, **options)  # type: ignore[no-untyped-call]

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        run()
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


@pytest.fixture
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are for programs with threads, which do not always do the same."""
    monkeypatch.setattr(unchanged_programs, "TRIES", 6)


@pytest.mark.simulated
@pytest.mark.usefixtures("few_tries")
@pytest.mark.parametrize("watcher", [keeps_a_tensor, draws_a_number, prints, allocates])
def test_a_watcher_that_changes_programs_is_found(
    watcher: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WATCHERS, "this", watcher)
    assert judge(SEEDS[:4], "native", ["this"])["this"]


def keeps_variables(run: Run, folder: Path) -> None:
    """What ``f_locals`` did before Python 3.13, by other means: it holds for every version."""
    from gpuprobe.hazard_watch import names

    original, kept = names.variables, []

    def variables(frame: FrameType) -> dict[str, object]:
        found = original(frame)
        kept.append(found)
        return found

    names.variables = variables
    try:
        WATCHERS["hazards"](run, folder)
    finally:
        names.variables = original


@pytest.mark.simulated
@pytest.mark.usefixtures("few_tries")
def test_a_frame_that_keeps_its_variables_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WATCHERS, "this", keeps_variables)
    assert judge([0, 6], "native", ["this"])["this"]  # programs with findings, which have names
