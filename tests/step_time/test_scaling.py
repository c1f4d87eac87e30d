"""One GPU against two, without any: recordings of simulated ranks, and their predicted times."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

from gpuprobe import load
from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.causes.live_memory import LiveMemory
from gpuprobe.causes.rules import losses

PROGRAM = """\
import os
import torch
import torch.distributed as dist

several = "RANK" in os.environ
if several:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
if several:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    model(torch.randn(64, 2048, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if several:
    dist.destroy_process_group()
"""

PIPELINE = """\
import os
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
device = torch.device("cuda", rank)
layers = torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048)
model = torch.nn.Sequential(*layers).to(device)
stage = PipelineStage(model, rank, 2, device)
schedule = ScheduleGPipe(stage, 3, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(12288, 2048, device=device)
for _ in range(3):
    optimizer.zero_grad()
    if rank:
        schedule.step(target=x, losses=[])
    else:
        schedule.step(x)
    optimizer.step()
dist.destroy_process_group()
"""


def gpuprobe(*words: str, folder: Path) -> str:
    done = subprocess.run(
        [warm_python.shared().python, "-m", "gpuprobe", *words],
        cwd=folder,
        env={**os.environ, **warm_python.NESTED, **warm_python.ranks()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaling")
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    run = ("run", "--compute", "shapes", "--level", "trace", "-o")
    gpuprobe(*run, "one.gpuprobe", "--gpu", "a100-40gb", "train.py", folder=folder)
    torchrun = ["torchrun", "--nproc-per-node", "2", "train.py"]
    gpuprobe(*run, "two.gpuprobe", "--gpu", "2xa100-40gb", "--", *torchrun, folder=folder)
    (folder / "stages.py").write_text(PIPELINE, encoding="utf-8")
    torchrun[-1] = "stages.py"
    gpuprobe(*run, "stages.gpuprobe", "--gpu", "2xa100-40gb", "--", *torchrun, folder=folder)
    return folder


def test_efficiency_is_predicted(folder: Path) -> None:
    found = json.loads(gpuprobe("scale", "one.gpuprobe", "two.gpuprobe", "--json", folder=folder))
    assert found["predicted"]
    one, two = found["rows"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert 0.2 < two["efficiency"] < 1
    assert two["lost_communication"] > 0
    lost = two["lost_own"] + two["lost_communication"] + two["lost_waiting"]
    assert lost == pytest.approx(two["lost"])


def test_one_estimated_rank_represents_all(folder: Path) -> None:
    estimate = ("estimate", "--compute", "shapes", "--ranks", "2", "-o")
    gpuprobe(*estimate, "pair.gpuprobe", "--gpu", "2xa100-40gb", "train.py", folder=folder)
    words = ("scale", "one.gpuprobe", "two.gpuprobe", "pair.gpuprobe")
    text = gpuprobe(*words, folder=folder)
    assert "one rank was recorded and represents all: in pair.gpuprobe of 2" in text
    _, both, one = json.loads(gpuprobe(*words, "--json", folder=folder))["rows"]
    assert (both["ranks"], both["recorded"]) == (2, 2)
    assert (one["ranks"], one["recorded"]) == (2, 1)
    assert one["efficiency"] == pytest.approx(both["efficiency"], rel=0.03)
    assert one["lost_communication"] == pytest.approx(both["lost_communication"], abs=0.03)


def test_what_one_rank_does_not_tell_is_refused(folder: Path) -> None:
    estimate = ("estimate", "--compute", "shapes", "--ranks", "4", "--network", "25", "-o")
    gpuprobe(*estimate, "four.gpuprobe", "--gpu", "2xa100-40gb", "train.py", folder=folder)
    words = ["scale", "one.gpuprobe", "four.gpuprobe"]
    with pytest.raises(AssertionError, match="AllReduce of 2 nodes: their network is not given"):
        gpuprobe(*words, folder=folder)
    gpuprobe(*words, "--network", "25", folder=folder)
    stage = folder / "stage.gpuprobe"
    shutil.copytree(folder / "stages.gpuprobe", stage)
    for path in stage.glob("*rank*1*"):
        path.unlink()
    with pytest.raises(AssertionError, match="has 1 of the 2 ranks of its job"):
        gpuprobe("scale", "one.gpuprobe", "stage.gpuprobe", folder=folder)


def test_ranks_of_a_launcher_have_the_uses_of_memory(folder: Path) -> None:
    """Their simulated GPU begins after the recording, and its handler of operators comes last."""
    report = json.loads(gpuprobe("report", "two.gpuprobe", "--json", folder=folder))
    assert report["step_time"]["expected_ns"] > 0
    assert any(row["name"] == "collective" for row in report["step_time"]["by_kind"])
    assert "rows" in report["needs"]
    assert not any(cause["rule"] == "too-early" for cause in report["causes"])  # DDP's buckets


def test_ranks_of_a_pipeline_wait_for_each_other(folder: Path) -> None:
    """Of 3 microbatches in 2 equal stages, a quarter of the pipeline's time is its bubble."""
    time = json.loads(gpuprobe("report", "stages.gpuprobe", "--json", folder=folder))["step_time"]
    assert [row["rank"] for row in time["by_rank"]] == [0, 1]
    first, last = (row["waits_ns"] / row["ns"] for row in time["by_rank"])
    assert 0.15 < last < 0.3
    assert first > last  # it computes no gradient of its input
    assert sum(row["ns"] for row in time["bounds"]) == time["expected_ns"]
    assert "waiting for other ranks" in [row["name"] for row in time["by_kind"]]
    gpuprobe("report", "stages.gpuprobe", "--perfetto", "course.json", folder=folder)
    events = json.loads((folder / "course.json").read_text(encoding="utf-8"))["traceEvents"]
    assert any(event["name"] == "Recv: waiting for other ranks" for event in events)


def test_graphs_of_a_pipeline_wait_for_other_ranks(folder: Path) -> None:
    """Those of its microbatches are no graphs of summed losses."""
    for name, sends in (("stages", True), ("two", False)):
        for rank in load(folder / f"{name}.gpuprobe").ranks:
            _, ledger, *_ = map(ledger_of, rank.traces)
            assert losses._sends(LiveMemory(Biographies(ledger), ledger.peak())) == sends


def test_the_time_of_a_job_is_checked(folder: Path) -> None:
    """The baseline keeps the command after ``--`` and its GPUs: a check repeats it."""
    program = (folder / "train.py").read_text(encoding="utf-8")
    (folder / "job.py").write_text(program, encoding="utf-8")
    python = warm_python.shared().python
    torchrun = ["torchrun", "--nproc-per-node", "2", "job.py"]
    update = ("baseline", "update", "--gpu", "2xa100-40gb", "--baseline", "job.json")
    gpuprobe(*update, "--", *torchrun, folder=folder)
    twice = program.replace("model(torch", "model(torch.zeros(64, 2048).cuda()); model(torch")
    (folder / "job.py").write_text(twice, encoding="utf-8")
    done = subprocess.run(
        [python, "-m", "gpuprobe", "check", "--baseline", "job.json", "--json"],
        cwd=folder,
        env={**os.environ, **warm_python.NESTED, **warm_python.ranks()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    metrics = json.loads(done.stdout)["metrics"]
    assert any(row["name"] == "step_time" and row["regressed"] for row in metrics)


def test_an_estimate_has_time_and_cost(folder: Path) -> None:
    words = ("estimate", "train.py", "--gpu", "a100-40gb", "--price", "1.5", "--json")
    found = json.loads(gpuprobe(*words, folder=folder))
    time, cost = found["step_time"], found["cost"]
    assert time["low_ns"] <= time["expected_ns"] <= time["high_ns"]
    assert cost["step_high"] == pytest.approx(time["high_ns"] * 1.5 / 3600e9)
    # The same work was recorded: the same figure.
    one = json.loads(gpuprobe("report", "one.gpuprobe", "--json", folder=folder))["step_time"]
    assert one["expected_ns"] == pytest.approx(time["expected_ns"], rel=0.02)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--gpus", "t4", "-o", "kept.gpuprobe"], "--output keeps the recording of one GPU"),
        (["--gpu", "t4", "--gpus", "l4"], "--gpu t4 and --gpus l4"),
        (["--gpu", "t4", "--price", "l4=2"], "a price of l4, which is not estimated"),
        (["--gpus", "t4", "--price", "l4=2"], "a price of l4, which is not estimated"),
    ],
)
def test_options_without_effect_are_refused(folder: Path, words: list[str], reason: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "estimate", "train.py", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert reason in done.stderr


def test_a_gpu_without_speeds_is_refused(folder: Path) -> None:
    words = ("estimate", "train.py", "--gpu", "rtx4060-laptop", "--json")
    found = json.loads(gpuprobe(*words, folder=folder))
    assert found["step_time"] == {
        "unavailable": "no speeds are known of rtx4060-laptop",
        "status": "error",
    }
