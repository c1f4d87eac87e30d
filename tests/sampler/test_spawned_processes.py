"""Processes that a program spawns have its simulated GPUs; in an estimate one of them is run."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import warm_python
from waiting import read_fifo

import gpuprobe
from gpuprobe.api import watch

pytestmark = pytest.mark.filterwarnings("ignore")


def worker(rank: int, folder: str, queue: Any = None) -> None:
    torch.cuda.set_device(rank)
    held = torch.ones(1 << 20, device="cuda")
    found = [torch.cuda.get_device_name(), torch.cuda.memory_allocated(), held.device.index]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    if queue is not None:
        queue.put(held * 2)
        read_fifo(Path(folder) / "taken")  # it owns the memory


@pytest.mark.simulated
def test_spawned_processes_have_the_same_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two kinds, too, and tensors of theirs arrive on its device."""
    # Whatever ran as the main module in this process before, the child is not to run it.
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with gpuprobe.virtual_gpu("h100-80gb,t4"):
        context = mp.get_context("spawn")
        queue = context.Queue()
        os.mkfifo(tmp_path / "taken")
        process = context.Process(target=worker, args=(1, str(tmp_path), queue))
        process.start()
        tensor = queue.get(timeout=120)
        (tmp_path / "taken").write_text("taken")
        process.join()
        assert process.exitcode == 0
        assert (str(tensor.device), tensor.numel()) == ("cuda:1", 1 << 20)
    name, allocated, index = json.loads((tmp_path / "1.json").read_text())
    assert ("T4" in name, allocated, index) == (True, 4 << 20, 1)


WITH_A_DEVICE = """\
import multiprocessing, os, sys
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def work(queue):
    queue.put(torch.ones(3, device=DEVICE).device.type)


def train(rank, ranks):
    assert "RANK" not in os.environ
    torch.cuda.set_device(rank)
    weight = torch.ones(1 << 18, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2 + rank):
        weight.sum().backward()
        optimizer.step()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print("in the child:", queue.get(timeout=120))
    process.join()
    torch.multiprocessing.spawn(train, args=(2,), nprocs=2)
"""


def test_what_a_program_spawns_finds_them_and_is_recorded(tmp_path: Path) -> None:
    """At the top level of its module, too; processes of one spawn are the ranks of a recording."""
    (tmp_path / "script.py").write_text(WITH_A_DEVICE)
    done = subprocess.run(
        [warm_python.shared().python, "-m", "gpuprobe", "run", "--gpu", "2xt4", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "in the child: cuda\n"
    assert "recording: script.gpuprobe" in done.stderr
    assert "recording of the spawned processes: script.spawned.gpuprobe" in done.stderr
    found = gpuprobe.load(tmp_path / "script.spawned.gpuprobe")
    assert [(rank.session.rank, len(rank.steps)) for rank in found.ranks] == [(0, 2), (1, 3)]
    names = [{window.device for window in rank.steps[1].windows} for rank in found.ranks]
    assert names == [{"cuda:0"}, {"cuda:1"}]
    (rank,) = gpuprobe.load(tmp_path / "script.gpuprobe").ranks
    assert not [spot for spot in rank.blind_spots if "started" in spot.what]
    (child,) = gpuprobe.load(tmp_path / "script.gpuprobe").load_children()
    assert (child.session.pid != rank.session.pid, child.peaks[0].device) == (True, "cuda:0")


def spawned() -> None:
    mp.spawn(as_rank, args=(os.getpid(),), nprocs=torch.cuda.device_count())


def as_rank(rank: int, parent: int) -> None:
    assert os.getpid() == parent
    if not dist.is_initialized():
        dist.init_process_group("nccl", rank=rank, world_size=2)
    assert (rank, dist.get_rank(), dist.get_world_size()) == (1, 3, 4)
    torch.ones(1 << 20, device=f"cuda:{rank}")


@pytest.mark.simulated
def test_in_a_pretended_job_the_rank_runs_here() -> None:
    found = gpuprobe.estimate(spawned, "2xt4", ranks=4, rank=3)
    assert found.peak_allocated == 4 << 20


def fails(*args: object, **more: object) -> Any:
    raise OSError(28, "No space left on device")


def prints() -> None:
    import torch.cuda

    torch.cuda.init()
    torch.cuda.memory_stats = fails
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    print("exit code of the child:", process.exitcode)


@pytest.mark.simulated
@pytest.mark.parametrize("broken", ["no temporary directory", "a child's GPU"])
def test_a_program_goes_on_without_the_count_of_its_processes(
    broken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if broken == "no temporary directory":
        monkeypatch.setattr("tempfile.mkdtemp", fails)
    monkeypatch.setattr(torch.cuda, "memory_stats", torch.cuda.memory_stats)
    (tmp_path / "script.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import torch\nfrom {Path(__file__).stem} import prints\nprints()\n"
    )
    program = watch.program(str(tmp_path / "script.py"), [], False)
    result = watch.run(program, tmp_path / "a.gpuprobe", gpu="t4")
    assert (result.exit_code, result.error) == (0, None)
    assert "exit code of the child: 0" in capfd.readouterr().out
    (rank,) = gpuprobe.load(tmp_path / "a.gpuprobe").ranks
    told = [spot.what for spot in rank.blind_spots if "No space left" in spot.what]
    assert len(told) == (broken == "no temporary directory")
