"""Several GPUs: in one process, in forked and other processes, and those that a program selects."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_python
from torch import nn

import gpuprobe
from gpuprobe.errors import UsageError
from gpuprobe.torch_support.process_gpus import NAME, visible

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_setting_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)


# -- CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, "abcd"),
        ("1", "b"),
        ("3, 0", "da"),
        ("0,7,1", "a"),  # up to the first one that is not there
        ("-1", ""),
        ("", ""),
        ("0,0", ""),
        ("0,x", "a"),
    ],
)
def test_what_a_setting_selects(setting: str | None, expected: str) -> None:
    assert visible(setting, "abcd") == list(expected)


def test_the_setting_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "1")
    with gpuprobe.virtual_gpu("h100-80gb,t4"):
        assert (torch.cuda.device_count(), torch.cuda.get_device_name()) == (1, "Tesla T4")
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(1)
    monkeypatch.setenv(NAME, "3")  # one of this machine's GPUs, surely
    with gpuprobe.virtual_gpu("h100-80gb,t4"):
        assert torch.cuda.device_count() == 2


def test_what_the_program_sets_before_it_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuprobe.virtual_gpu("h100-80gb,t4"):
        assert torch.cuda.device_count() == 2
        monkeypatch.setenv(NAME, "1")
        assert torch.ones(1, device="cuda").device == torch.device("cuda:0")
        assert torch.cuda.get_device_name(0) == "Tesla T4"
        monkeypatch.setenv(NAME, "0")  # too late, as for CUDA
        assert torch.cuda.get_device_name(0) == "Tesla T4"


def test_a_program_that_hides_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        monkeypatch.setenv(NAME, "")
        assert not torch.cuda.is_available()

    with pytest.raises(UsageError, match="hides all GPUs"):
        gpuprobe.estimate(step, "t4", steps=1)


# -- a fork


def in_a_fork(program: Any) -> str:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            program()
            text = "done"
        except BaseException as error:  # noqa: BLE001 - the parent compares it
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        found = stream.read()
    os.waitpid(child, 0)
    return found


def test_cuda_after_a_fork_is_refused_as_cuda_does() -> None:
    with gpuprobe.virtual_gpu("t4"):
        held = torch.ones(8, device="cuda")
        for program in (
            lambda: torch.ones(1, device="cuda"),
            lambda: torch.cuda.set_device(0),
            lambda: torch.cuda.init(),
            lambda: torch.cuda.get_device_properties(0),
        ):
            assert in_a_fork(program) == (
                "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
                "multiprocessing, you must use the 'spawn' start method"
            )
        assert in_a_fork(lambda: torch.manual_seed(0)) == "done"  # of the host only
        assert held.sum().item() == 8


def test_a_fork_before_cuda_is_used_has_it() -> None:
    with gpuprobe.virtual_gpu("t4"):
        assert in_a_fork(lambda: torch.ones(1, device="cuda")) == "done"


# -- one process


def test_the_parts_of_data_parallel() -> None:
    from torch.nn.parallel import gather, parallel_apply, replicate, scatter

    with gpuprobe.virtual_gpu("2xt4"):
        torch.manual_seed(0)
        net = nn.Linear(8, 4).cuda()
        batch = torch.randn(6, 8, device="cuda")
        expected = net(batch)
        parts = scatter(batch, [0, 1])
        replicas = replicate(net, [0, 1])
        outputs = parallel_apply(replicas, [(part,) for part in parts])
        assert [output.device.index for output in outputs] == [0, 1]
        found = gather(outputs, 0)
        assert torch.allclose(found, expected)
        found.sum().backward()
        assert net.weight.grad is not None
        assert net.weight.grad.device.index == 0


def test_a_model_divided_by_hand() -> None:
    with gpuprobe.virtual_gpu("h100-80gb,t4"):
        first, second = nn.Linear(1024, 1024).to("cuda:0"), nn.Linear(1024, 256).to("cuda:1")
        hidden = torch.relu(first(torch.randn(4, 1024, device="cuda:0")))
        second(hidden.to("cuda:1")).sum().backward()
        for index, layer in enumerate((first, second)):
            assert layer.weight.grad is not None
            assert layer.weight.grad.device.index == index
            assert torch.cuda.memory_allocated(index) > 2 * layer.weight.nbytes
        with pytest.raises(RuntimeError, match="same device"):
            second(hidden)


def test_collectives_of_one_process() -> None:
    from torch.cuda import nccl

    with gpuprobe.virtual_gpu("3xh100-80gb,t4"):
        tensors = [torch.full((8,), index + 1.0, device=f"cuda:{index}") for index in range(4)]
        assert nccl.is_available(tensors)
        assert not nccl.is_available([*tensors, tensors[0]])
        before = [torch.cuda.memory_allocated(index) for index in range(4)]
        total = torch.empty(8, device="cuda:3")
        nccl.reduce(tensors, total, root=3)
        assert total.tolist() == 8 * [10]
        parts = [torch.empty(2, device=f"cuda:{index}") for index in range(4)]
        nccl.reduce_scatter(tensors, parts, op=2)  # the largest
        assert [part.tolist() for part in parts] == 4 * [[4, 4]]
        whole = [torch.empty(8, device=f"cuda:{index}") for index in range(4)]
        nccl.all_gather(parts, whole)
        assert [tensor.tolist() for tensor in whole] == 4 * [8 * [4]]
        nccl.all_reduce(tensors, op=4)  # the mean
        assert [tensor.tolist() for tensor in tensors] == 4 * [8 * [2.5]]
        tensors[1].fill_(7)
        nccl.broadcast(tensors, root=1)
        assert [tensor.tolist() for tensor in tensors] == 4 * [8 * [7]]
        del total, parts, whole
        assert [torch.cuda.memory_allocated(index) for index in range(4)] == before


class SumOfRanks(torch.autograd.Function):
    """A collective of the program's own, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def test_a_collective_of_the_programs_own() -> None:
    def step() -> None:
        dist.init_process_group("nccl")
        tensor = torch.ones(1 << 20, device="cuda", requires_grad=True)
        SumOfRanks.apply(tensor).sum().backward()
        assert tensor.grad is not None

    found = gpuprobe.estimate(step, "t4", ranks=4, steps=1)
    assert [(row.op, row.payload) for row in found.communication] == 2 * [("all_reduce", 4 << 20)]


# -- two nodes on one host, with different GPUs

NODES = """\
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("nccl")
net = nn.parallel.DistributedDataParallel(nn.Linear(512, 512).cuda())
optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.ones(4, 512, device="cuda")).sum().backward()
    optimizer.step()
state = sum(len(s) for s in optimizer.optim.state.values())
mean = net.module.weight.mean().item()
found = [torch.cuda.get_device_name(), dist.get_rank(), state, mean]
open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w").write(json.dumps(found))
"""


def test_two_nodes_on_one_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NODES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank, gpu in enumerate(("h100-80gb", "t4")):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        words = ["-m", "gpuprobe", "run", "--gpu", gpu, "-o", "run.gpuprobe", "train.py", "."]
        ranks.append(
            subprocess.Popen(
                [warm_python.shared().python, *words],
                cwd=tmp_path,
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [process.communicate()[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [(name, rank) for name, rank, *_ in found] == [
        ("NVIDIA H100 80GB HBM3", 0),
        ("Tesla T4", 1),
    ]
    assert all(state for *_, state, _ in found)  # each has a part of the optimizer's
    assert found[0][-1] == found[1][-1]
    recorded = gpuprobe.load(tmp_path / "run.gpuprobe")
    assert [rank.session.rank for rank in recorded.ranks] == [0, 1]
