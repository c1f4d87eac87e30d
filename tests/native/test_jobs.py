"""Jobs of several ranks on the native engine: one rank in one process, and real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm_python
from native_commands import gpuprobe, python

pytestmark = pytest.mark.slow

BLOCKS = """\
import os, torch, torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)
    def forward(self, x):
        return x + self.b(torch.nn.functional.gelu(self.a(x)))
model = torch.nn.Sequential(*[Block() for _ in range(3)])
"""
STEPS = """\
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.randn(64, 512, device=device)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
DDP = (
    BLOCKS
    + """
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(model.to(device))
"""
    + STEPS
)
FSDP1 = (
    BLOCKS
    + """
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group()
model = FullyShardedDataParallel(
    model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, sync_module_states=True
)
"""
    + STEPS
)
FSDP2 = (
    BLOCKS
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl", device_id=device)
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
model.to(device)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
"""
    + STEPS
)
TENSOR_PARALLEL = (
    BLOCKS
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
model.to(device)
for block in model:
    parallelize_module(block, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
"""
    + STEPS
)
PIPELINE = """\
import os, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
wide = 512 * (rank + 1)
layer = torch.nn.Sequential(torch.nn.Linear(512, wide), torch.nn.GELU(), torch.nn.Linear(wide, 512))
stage = PipelineStage(layer.to(device), rank, ranks, device)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean())
optimizer = torch.optim.AdamW(layer.parameters())
for step in range(4):
    if rank == 0:
        schedule.step(torch.randn(64, 512, device=device))
    elif rank == ranks - 1:
        schedule.step(target=torch.randn(64, 512, device=device), losses=[])
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
"""
COLLECTIVES = """\
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
ranks, rank = dist.get_world_size(), dist.get_rank()
host = dist.new_group(backend="gloo")
assert dist.get_backend(host) == "gloo" and dist.get_world_size(host) == ranks
for device, group in (("cuda", None), ("cpu", None), ("cpu", host)):
    kinds = (torch.int32, torch.int64, torch.float32, torch.float64, torch.half, torch.bfloat16)
    for dtype in kinds:
        values = torch.full((3,), 2, device=device, dtype=dtype)
        dist.all_reduce(values, group=group)
        assert values.tolist() == [2 * ranks] * 3, (device, values)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        assert values.tolist() == [2 * ranks] * 3
    one = torch.full((2,), rank, device=device)
    many = [torch.empty_like(one) for _ in range(ranks)]
    dist.all_gather(many, one, group=group)
    assert [part.tolist() for part in many] == [[rank, rank]] * ranks
    whole = torch.arange(2 * ranks, device=device)
    part = torch.empty(2, device=device, dtype=whole.dtype)
    dist.reduce_scatter(part, list(whole.chunk(ranks)), group=group)
    assert part.tolist() == [2 * rank * ranks, (2 * rank + 1) * ranks]
    found = [None] * ranks
    dist.all_gather_object(found, {"rank": rank}, group=group)
    assert found == [{"rank": rank}] * ranks
    objects = [rank * 10 + 7]
    dist.broadcast_object_list(objects, src=0, group=group)
    assert objects == [7], objects
    got = torch.empty(ranks, device=device)
    if device == "cuda":
        dist.all_to_all_single(got, torch.full((ranks,), 5.0, device=device), group=group)
        assert got.tolist() == [5.0] * ranks
    dist.barrier(group=group)
pair = dist.new_group([rank, (rank + 1) % ranks] if rank + 1 < ranks else [0, rank])
values = torch.ones(1, device="cuda")
dist.all_reduce(values, group=pair)
assert values.tolist() == [2.0]
dist.monitored_barrier(host)
model = torch.nn.Linear(8, 8).cuda()
torch.optim.SGD(model.parameters()).step()
print("all collectives")
"""


def estimate(text: str, cwd: Path, *options: object) -> dict[str, Any]:
    (cwd / "train.py").write_text(text, encoding="utf-8")
    done = gpuprobe(
        *("estimate", "--gpu", "h100-80gb", "--compute", "shapes", "--json"),
        *options,
        "train.py",
        cwd=cwd,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{\n") :])
    return found


@pytest.mark.parametrize(
    ("text", "allocated", "reserved"),
    [
        pytest.param(DDP, 218_288_128, 247_463_936, id="DDP"),
        pytest.param(FSDP1, 113_680_384, 157_286_400, id="FSDP1"),
        pytest.param(FSDP2, 123_799_552, 178_257_920, id="FSDP2"),
        pytest.param(TENSOR_PARALLEL, 82_883_584, 127_926_272, id="tensor parallel"),
    ],
)
def test_one_rank_needs_what_torchs_code_allocates(
    text: str, allocated: int, reserved: int, tmp_path: Path
) -> None:
    """The figures are those of torch 2.13."""
    options = ("--ranks", 8, "--rank", 1, "--per-node", 8)
    found = estimate(text, tmp_path, *options)
    assert found["communication"]
    if found["torch"].startswith("2.13."):
        assert found["peak_allocated"] == allocated
        assert found["peak_reserved"] == reserved


def test_stages_of_a_pipeline_are_told_apart(tmp_path: Path) -> None:
    found = estimate(PIPELINE, tmp_path, "--ranks", 3, "--rank", "distinct")
    peaks = {row["alike"]: row["peak_allocated"] for row in found["by_rank"]}
    assert list(peaks) == ["0", "1", "2"]
    assert peaks["0"] < peaks["1"] < peaks["2"]


@pytest.mark.parametrize("rank", [0, 3])
def test_other_ranks_hold_the_same(rank: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COLLECTIVES, encoding="utf-8")
    done = gpuprobe(*("estimate", "--ranks", 4, "--rank", rank, "train.py"), cwd=tmp_path)
    assert "all collectives" in done.stderr  # what a program prints while it is estimated


BROADCASTS = """\
import ctypes
import gpuprobe

with gpuprobe.virtual_gpu("t4", "real"):
    import torch

    class Id(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_char * 128)]

    (path,) = {line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line}
    nccl = ctypes.CDLL(path)
    communicator = ctypes.c_void_p()
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), 4, Id(), 1) == 0
    for sizes in ((2, 2, 2, 2), (2, 2, 2), (2, 1, 2, 2)):
        parts = [torch.full((size,), rank, device="cuda") for rank, size in enumerate(sizes)]
        nccl.ncclGroupStart()
        for rank, part in enumerate(parts):
            at = ctypes.c_void_p(part.data_ptr())
            nccl.ncclBroadcast(at, at, ctypes.c_size_t(part.numel()), 4, rank, communicator, None)
        nccl.ncclGroupEnd()
        print([part.tolist() for part in parts])
"""


def test_a_broadcast_from_each_rank_gathers(tmp_path: Path) -> None:
    """Those of one group of calls: so torch 2.15 gathers to a list of tensors."""
    (tmp_path / "program.py").write_text(BROADCASTS, encoding="utf-8")
    done = python("program.py", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "[[1, 1], [1, 1], [1, 1], [1, 1]]",
        "[[0, 0], [1, 1], [2, 2]]",
        "[[0, 0], [1], [2, 2], [3, 3]]",
    ], done.stderr


def test_a_function_is_one_rank_too(tmp_path: Path) -> None:
    text = """\
import gpuprobe

def build():
    import torch, torch.distributed as dist
    dist.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda())
    optimizer = torch.optim.SGD(model.parameters())
    def step():
        model(torch.randn(8, 512, device="cuda")).sum().backward()
        optimizer.step()
    return step

for rank in (0, 5):
    found = gpuprobe.estimate(build, ranks=8, rank=rank)
    print(found.ranks, found.rank, found.peak_allocated > 0)
"""
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    done = python("program.py", cwd=tmp_path)
    assert done.stdout == "8 0 True\n8 5 True\n", done.stderr


KEEPS_OUTPUTS = """\
import torch
from torch.utils.data import DataLoader
import torch.distributed as dist
from torch import nn

def main():
    dist.init_process_group("nccl")
    up, deep, down = nn.Linear(1024, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 10)
    model = nn.Sequential(up, nn.ReLU(), deep, nn.ReLU(), down).cuda()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    labels = torch.zeros(8, dtype=torch.long, device="cuda")
    history = []
    loader = DataLoader(torch.randn(64, 1024), batch_size=8)
    for _ in range(2):
        for x in loader:
            logits = model(x.cuda())
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            history.append(logits)
main()
"""


def test_buckets_are_no_memory_that_something_unknown_keeps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KEEPS_OUTPUTS, encoding="utf-8")
    words = ("estimate", "--gpu", "t4", "--ranks", "2", "--compute", "shapes", "--json")
    done = gpuprobe(*words, "train.py", cwd=tmp_path, cold=True)
    assert [cause["rule"] for cause in json.loads(done.stdout)["causes"]] == ["ddp-buckets"]


def test_torchrun_is_recorded_as_the_ranks_of_one_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP, encoding="utf-8")
    done = gpuprobe(
        *("run", "--gpu", "2xh100-80gb", "-o", "r.gpuprobe"),
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "train.py"),
        cwd=tmp_path,
        **warm_python.ranks(),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(gpuprobe("report", "--json", "r.gpuprobe", cwd=tmp_path).stdout)
    assert report["session"]["world_size"] == 2
    assert report["session"]["argv"] == ["train.py"]
    assert {row["rank"] for row in report["ranks"]} == {0, 1}


def test_the_summary_of_a_job_names_the_command_that_explains_it(tmp_path: Path) -> None:
    """Each of its ranks has a GPU, though one is named."""
    (tmp_path / "train.py").write_text(DDP, encoding="utf-8")
    job = ("torchrun", "--standalone", "--nproc-per-node", "2", "train.py")
    done = gpuprobe("run", "--gpu", "t4", "--", *job, cwd=tmp_path, **warm_python.ranks())
    assert done.returncode == 0, done.stderr
    command = f"gpuprobe:   gpuprobe explain --gpu 2xt4 -- {' '.join(job)}"
    assert command in done.stderr.splitlines()
    assert "gpuprobe: simulating 2xt4, a GPU for each rank" in done.stderr.splitlines()


def test_a_program_that_is_ended_from_outside_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, 'child.py'], stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline())\n"
        "child.terminate()\n"
        "print(child.wait())\n",
        encoding="utf-8",
    )
    (tmp_path / "child.py").write_text(
        "import signal, torch\n"
        "torch.zeros(8, device='cuda')\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n",
        encoding="utf-8",
    )
    done = gpuprobe("run", "--gpu", "l4", "-o", "r.gpuprobe", "train.py", cwd=tmp_path)
    assert done.stdout == f"b'ready\\n'\n{-signal.SIGTERM}\n", done.stderr


def test_processes_of_an_estimate_end_after_its_steps_and_report_their_peaks(
    tmp_path: Path,
) -> None:
    text = """\
import torch
import torch.multiprocessing as mp

def train():
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    children = [mp.get_context("spawn").Process(target=train) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
"""
    found = estimate(text, tmp_path)
    assert found["processes"]["count"] == 2
    assert found["processes"]["at_least"] > 2 * 2**22


def test_a_process_is_there_before_it_imports_torch() -> None:
    program = (
        "import time; began = time.monotonic()\n"
        "from gpuprobe.planning.processes import _started\n"
        "print(_started(), began)"
    )
    words = [sys.executable, "-c", program]
    before = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    started, began = map(float, done.stdout.split())
    assert before <= started <= began + 1 / os.sysconf("SC_CLK_TCK")
