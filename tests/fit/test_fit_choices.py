"""The largest value on one of several GPUs, and on several numbers of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import warm_python

from gpuprobe.errors import ProgramFailed, UsageError
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.plans.estimate import FITS
from gpuprobe.model.plans.fit import Fit, FitChoice, Trial
from gpuprobe.model.plans.request import EstimateRequest, ParameterSource, PriceList
from gpuprobe.model.plans.step_time import StepTime, TrainingCost
from gpuprobe.model.values import Bytes, Nanoseconds, Unavailable
from gpuprobe.planning.fit import fit_of
from gpuprobe.planning.program import program_of
from gpuprobe.reporters.json.plans import FIT
from gpuprobe.reporters.sections.parts import Line, Table
from gpuprobe.reporters.sections.plans import fit_sections

SHARDED = """\
import torch
import torch.distributed as dist

ROWS = 1
dist.init_process_group("nccl")
ranks = dist.get_world_size()
assert ranks != 3, "three ranks are not supported"
shard = torch.empty(8 * 2**30 // ranks, dtype=torch.uint8, device="cuda")
rows = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(ROWS)]
"""
LOADED = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

ROWS = 2
model = torch.nn.Linear(4096, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in DataLoader(TensorDataset(torch.rand(24, 4096), torch.rand(24, 64)), ROWS):
    optimizer.zero_grad()
    (model(x.cuda()) - y.cuda()).square().mean().backward()
    optimizer.step()
"""
GIB = 2**30


def test_gpus_and_numbers_of_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    words = ["fit", str(script), "--arg", "ROWS", "--gpu", "l4,t4", "--ranks", "4,3"]
    done = warm_python.gpuprobe(*words, "--min", "8", "--max", "32", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {(row["gpu"], row["ranks"]): row for row in found["choices"]}
    assert len(rows) == 4
    for (gpu, ranks), row in rows.items():
        if ranks == 3:
            assert "three ranks are not supported" in row["failed"]
            continue
        room = row["capacity"] - row["needed"]
        assert row["largest"] * GIB + 8 * GIB // ranks < row["needed"] < row["capacity"]
        assert room < 2 * GIB, (gpu, ranks)  # a row, and the margin
    assert rows["l4", 4]["largest"] > rows["t4", 4]["largest"]
    best = rows["l4", 4]
    assert (found["gpu"], found["ranks"], found["largest"]) == ("l4", 4, best["largest"])
    assert best["total"] == 4 * best["largest"] == max(row["total"] for row in rows.values())
    assert "t4, 4 ranks: ROWS" in done.stderr


def choice(gpu: str, ranks: int, largest: int | None, failed: str = "") -> FitChoice:
    return FitChoice(gpu, ranks, largest, Bytes(10 * GIB), Bytes(15 * GIB), failed)


def test_the_table_of_choices() -> None:
    trial = Trial(8, "fits", Bytes(GIB), Bytes(10 * GIB), Bytes(15 * GIB))
    choices = (
        choice("t4", 2, 8),
        choice("l4", 4, 6),
        choice("t4", 1, None),
        choice("x", 1, None, "no"),
    )
    fit = Fit(
        "l4", Bytes(15 * GIB), "rows", "as", "shapes", 1, 64, 6, trial, None, (trial,), (), (), (),
        ranks=4, choices=choices,
    )  # fmt: skip
    sections = fit_sections(fit)
    assert sections[0].title == "l4: rows 6 is the largest that fits on each of 4 ranks"
    (table,) = sections[1].parts
    assert isinstance(table, Table)
    cells = [tuple(map(str, row.cells[:4])) for row in table.rows]
    assert cells[:2] == [("l4", "4", "6", "24"), ("t4", "2", "8", "16")]
    assert [row.cells[-1] for row in table.rows] == ["", "", "not even 1 fits", "no"]


def test_the_table_of_choices_has_speed_and_cost() -> None:
    trial = Trial(8, "fits", Bytes(GIB), Bytes(10 * GIB), Bytes(15 * GIB))
    timed = replace(
        choice("l4", 4, 6),
        low_ns=Nanoseconds(80_000_000),
        expected_ns=Nanoseconds(100_000_000),
        high_ns=Nanoseconds(150_000_000),
        images=6,
        cost=TrainingCost(1.0, 4, 0.1, 0.2, images_low=3.0, images_high=4.0),
    )
    without = replace(
        choice("t4", 2, 8), no_time="no speeds are known of t4", no_kernels="no kernels"
    )
    fit = Fit(
        "l4", Bytes(15 * GIB), "rows", "as", "shapes", 1, 64, 6, trial, None, (trial,), (), (), (),
        ranks=4, choices=(timed, without),
    )  # fmt: skip
    table, cost, _ = fit_sections(fit)[1].parts
    assert isinstance(table, Table)
    assert isinstance(cost, Line)
    assert cost.text.startswith("cost: for a million images")
    rows = [tuple(getattr(cell, "text", cell) for cell in row.cells[6:]) for row in table.rows]
    assert rows == [
        ("100 ms (80 to 150)", "160 to 300", "3.00 to 4.00", ""),  # 6 images of each of 4 ranks
        ("-", "-", "-", "no speeds are known of t4; no kernels"),
    ]


def test_prices_and_data_that_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADED)
    words = ["fit", str(script), "--arg", "ROWS", "--gpu", "t4,l4", "--price", "t4=0.5,l4=1"]
    done = warm_python.gpuprobe(*words)
    assert done.returncode == 0, done.stderr
    assert "ROWS 32 fits; larger values have no effect" in done.stdout
    assert "a step gets as much data and needs as much memory" in done.stdout
    costs = done.stdout.partition("cost\n")[2].splitlines()
    assert [line.split()[0] for line in costs[:2]] == ["t4", "l4"], done.stdout
    fitting = [line for line in done.stderr.splitlines() if line.startswith("gpuprobe: l4")]
    assert len(fitting) == 1, fitting


def test_values_without_effect_in_json() -> None:
    spent = (Nanoseconds(1),) * 4
    time = StepTime("t4", 0, *spent, 0.0, (), (), (), (), (), samples=24)
    for times, largest, alike in (
        (time, 24, (32,)),
        (replace(time, samples=Unavailable("no tensors")), 32, ()),
    ):
        tried = {
            value: Trial(value, FITS, Bytes(8), Bytes(9), Bytes(GIB), time=times)
            for value in (24, 32)
        }
        found = fit_of(
            tried, gpu="t4", capacity=Bytes(GIB), argument="rows", applied="as rows",
            compute="shapes", least=1, most=64, suggestions=(), not_tried=(),
        )  # fmt: skip
        assert (found.largest, found.without_effect) == (largest, alike)
        assert FIT.plain(found)["without_effect"] == [*alike]


def test_the_cost_on_one_gpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADED)
    done = warm_python.gpuprobe(
        "fit", str(script), "--arg", "ROWS", "--max", "4", "--gpu", "t4", "--price", "0.5"
    )
    assert "ROWS 4 is the largest that fits" in done.stdout, done.stderr
    assert "cost: for a million samples" in done.stdout
    done = warm_python.gpuprobe("fit", str(script), "--gpu", "t4", "--price", "0.5")
    assert "--arg is missing" in done.stderr


def test_a_price_of_another_gpu_is_refused(tmp_path: Path) -> None:
    from gpuprobe.planning.fit import fit_program

    script = tmp_path / "train.py"
    script.write_text("ROWS = 1\n")
    request = EstimateRequest(str(script), gpu="t4,l4", prices=PriceList({"a10g": 1.0}))
    with pytest.raises(UsageError, match="a price of a10g, which is not estimated"):
        fit_program(request, "ROWS")


def test_other_processes_run_the_program_with_the_value(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("ROWS = 1\n")
    request = EstimateRequest(
        str(script), parameter=ParameterSource(constant="ROWS", value=1), value=7
    )
    received = from_plain(EstimateRequest, json.loads(json.dumps(to_plain(request))))
    assert received == request
    namespace: dict[str, int] = {}
    exec(program_of(received).code, namespace)
    assert namespace["ROWS"] == 7


def test_no_choice_has_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuprobe.planning.fit import fit_program

    monkeypatch.setattr("sys.executable", warm_python.shared().python)
    script = tmp_path / "train.py"
    script.write_text("ROWS = 1\nraise SystemExit(3)\n")
    with pytest.raises(ProgramFailed, match="with ROWS 1: the program ended with exit code 3"):
        fit_program(EstimateRequest(str(script), gpu="t4,l4"), "ROWS")
