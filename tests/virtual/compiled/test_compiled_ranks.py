"""Data parallel and sharded modules that are compiled, and custom operators in compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gpuprobe
from gpuprobe.errors import ValueNeeded

pytest.importorskip("triton", reason="Inductor writes CUDA code with Triton: gpuprobe[compile]")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, as it runs its compiler


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(nn.functional.gelu(self.wide(x)))


def blocks() -> nn.Sequential:
    return nn.Sequential(Block())


def parallel(compiled: bool) -> Any:
    model = nn.parallel.DistributedDataParallel(blocks().cuda(), device_ids=[0])
    return torch.compile(model) if compiled else model


def sharded(compiled: bool) -> Any:
    model = blocks().cuda()
    for block in model:
        if compiled:
            block.compile()
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.parametrize("make", [parallel, sharded])
def test_losses_are_those_of_eager_code_and_peaks_the_same_with_and_without_values(
    make: Any, tmp_path: Path
) -> None:
    losses, peaks = [], []
    for number, (compiled, compute) in enumerate(
        [(False, "real"), (True, "real"), (True, "shapes")]
    ):
        torch._dynamo.reset()
        with gpuprobe.virtual_gpu("a100-40gb", compute) as session:
            store = f"file://{tmp_path}/{number}"
            dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
            try:
                torch.manual_seed(0)
                model = make(compiled)
                optimizer = torch.optim.AdamW(model.parameters())
                found = []
                for _ in range(2):
                    loss = model(torch.ones(16, 32, device="cuda")).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(loss.detach())
                if compute == "real":
                    losses.append([float(loss) for loss in found])
                peaks.append(torch.cuda.max_memory_allocated())
            finally:
                dist.destroy_process_group()
            notes = list(session.machine.compiler_notes)
            assert not [text for text in session.machine.assumed if "eagerly" in text]
            # Functions of gpuprobe's that run meanwhile are not the program's.
            assert not [text for text in notes if "gpuprobe" in text]
            assert any("backward graph" in text for text in notes) == compiled, notes
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert peaks[1] == peaks[2]


def test_an_operator_of_a_library_in_compiled_code() -> None:
    @torch.library.custom_op("gp_compiled::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]).narrow(0, 0, x.shape[0]) * 2  # its code needs twice the memory

    doubled.register_fake(torch.empty_like)
    peaks = []
    for compute in ("real", "shapes"):
        torch._dynamo.reset()
        with gpuprobe.virtual_gpu("a100-40gb", compute):
            x = torch.ones(1 << 20, device="cuda")
            found = torch.compile(lambda x: doubled(x.sin()).cos(), fullgraph=True)(x)
            if compute == "real":
                assert torch.allclose(found.cpu(), (torch.ones(1).sin() * 2).cos())
            peaks.append(torch.cuda.max_memory_allocated() >> 20)
    assert peaks[0] == peaks[1] == 20  # x, its sine, twice that, and the result


def test_what_compiled_code_writes_to_is_unknown() -> None:
    @torch.compile
    def count(counter: torch.Tensor) -> None:
        counter.add_(1)

    with gpuprobe.virtual_gpu("a100-40gb", "shapes"):
        counter = torch.zeros(4, dtype=torch.int64, device="cuda")
        assert counter.tolist() == [0] * 4
        count(counter)
        with pytest.raises(ValueNeeded):
            counter.tolist()


def test_torchs_functions_are_traced_after_a_process_group_is_made(tmp_path: Path) -> None:
    """``init_process_group`` has Dynamo make its tables of torch's functions again."""

    @torch.compile(fullgraph=True)
    def numbered(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[0], device=x.device)

    torch._dynamo.reset()
    with gpuprobe.virtual_gpu("a100-40gb"):
        assert numbered(torch.ones(2, device="cuda")).tolist() == [1, 2]
        dist.init_process_group("nccl", f"file://{tmp_path}/meeting", rank=0, world_size=1)
        try:
            assert numbered(torch.ones(3, device="cuda")).tolist() == [1, 2, 3]
        finally:
            dist.destroy_process_group()
