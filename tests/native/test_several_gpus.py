"""Several GPUs: in one process, in forked and other processes, and those that a program selects."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpuprobe
from gpuprobe.errors import DataError
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


@pytest.mark.simulated
def test_the_setting_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "1")
    with gpuprobe.virtual_gpu("h100-80gb,t4"):
        assert (torch.cuda.device_count(), torch.cuda.get_device_name()) == (1, "Tesla T4")
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(1)


@pytest.mark.simulated
def test_what_the_program_sets_before_it_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuprobe.virtual_gpu("h100-80gb,t4"):
        assert torch.cuda.device_count() == 2
        monkeypatch.setenv(NAME, "1")
        assert torch.ones(1, device="cuda").device == torch.device("cuda:0")
        assert torch.cuda.get_device_name(0) == "Tesla T4"
        monkeypatch.setenv(NAME, "0")  # too late, as for CUDA
        assert torch.cuda.get_device_name(0) == "Tesla T4"


@pytest.mark.simulated
def test_a_program_that_hides_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        monkeypatch.setenv(NAME, "")
        assert not torch.cuda.is_available()

    with pytest.raises(DataError, match="hides all GPUs"):
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


@pytest.mark.simulated
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


@pytest.mark.simulated
def test_a_fork_before_cuda_is_used_has_it() -> None:
    with gpuprobe.virtual_gpu("t4"):
        assert in_a_fork(lambda: torch.ones(1, device="cuda")) == "done"


# -- one process


@pytest.mark.simulated
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


@pytest.mark.simulated
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


@pytest.mark.simulated
def test_a_collective_of_the_programs_own() -> None:
    def step() -> None:
        dist.init_process_group("nccl")
        tensor = torch.ones(1 << 20, device="cuda", requires_grad=True)
        SumOfRanks.apply(tensor).sum().backward()
        assert tensor.grad is not None

    found = gpuprobe.estimate(step, "t4", ranks=4, steps=1)
    assert [(row.op, row.payload) for row in found.communication] == 2 * [("all_reduce", 4 << 20)]


@pytest.mark.simulated
def test_collectives_without_a_wait_hold_their_tensors() -> None:
    """A GPU is behind its host: torch sees that they are done when the host has waited."""
    with gpuprobe.virtual_gpu("t4"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:

            def held(count: int) -> list[int]:
                found = []
                for _ in range(count):
                    tensor = torch.ones(1 << 20, device="cuda")
                    dist.all_reduce(tensor, async_op=True)
                    del tensor
                    found.append(torch.cuda.memory_allocated() >> 20)
                return found

            assert held(3) == [4, 8, 12]
            torch.cuda.synchronize()
            # The next one lets go of them, or torch's own thread before.
            assert held(3)[-1] <= 16
        finally:
            dist.destroy_process_group()
