"""Names of ``torch.cuda`` that few programs use: the runtime, events and streams of other
libraries, storages, sparse gradients, classes that are like tensors.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gpuprobe

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

MIB = 1 << 20


@pytest.fixture(params=["real", "shapes"], autouse=True)
def compute(request: Any) -> Iterator[str]:
    with gpuprobe.virtual_gpu("h100-80gb", compute=request.param):
        yield request.param


def test_the_cuda_runtime() -> None:
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaProfilerStart())
    torch.cuda.check_error(runtime.cudaProfilerStop())
    keep = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert runtime.cudaMemGetInfo(0) == torch.cuda.mem_get_info(0)
    assert keep.is_cuda
    handle = ctypes.c_void_p()
    torch.cuda.check_error(runtime.cudaStreamCreate(ctypes.addressof(handle)))
    assert handle.value
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        torch.ones(2, device="cuda")
    assert runtime.cudaStreamDestroy(handle.value) == runtime.cudaError.success
    with pytest.raises(torch.cuda.CudaError, match="invalid resource handle"):
        torch.cuda.check_error(runtime.cudaStreamDestroy(handle.value))
    host = torch.ones(4)
    statistics = getattr(torch.cuda, "host_memory_stats", Counter)  # not in torch 2.6
    before = statistics()["allocated_bytes.current"]
    assert int(runtime.cudaHostRegister(host.data_ptr(), 16, 0)) == 0
    assert host.is_pinned()
    assert host[2:].is_pinned()
    assert not torch.ones(4).is_pinned()
    assert statistics()["allocated_bytes.current"] == before
    with pytest.raises(torch.cuda.CudaError, match="already mapped"):
        torch.cuda.check_error(runtime.cudaHostRegister(host[3:].data_ptr(), 4, 0))
    assert int(runtime.cudaHostUnregister(host.data_ptr())) == 0
    assert not host.is_pinned()
    with pytest.raises(torch.cuda.CudaError, match="registered memory region"):
        torch.cuda.check_error(runtime.cudaHostUnregister(host.data_ptr()))


def test_events_and_streams() -> None:
    event = torch.Event("cuda", enable_timing=True)
    later = torch.Event(device="cuda", enable_timing=True)
    event.record()
    later.record()
    assert event.elapsed_time(later) >= 0
    assert isinstance(torch.cuda.Event(enable_timing=True), torch.Event)
    assert not torch.cuda.Event().enable_timing
    stream = torch.cuda.Stream()
    assert stream.__cuda_stream__() == (0, stream.cuda_stream)
    assert stream._cdata


def test_memory_of_storages() -> None:
    before = torch.cuda.memory_allocated()
    storage = torch.UntypedStorage(MIB, device="cuda")
    assert (storage.device, storage.nbytes()) == (torch.device("cuda", 0), MIB)
    assert torch.cuda.memory_allocated() - before == MIB
    view = torch.empty(0, device="cuda").set_(storage)
    assert view.is_cuda
    del view, storage
    assert torch.cuda.memory_allocated() == before
    assert torch.UntypedStorage(4).device.type == "cpu"
    assert torch.UntypedStorage(4, device="meta").device.type == "meta"


def test_sizes_of_the_old_constructors() -> None:
    assert torch.cuda.FloatTensor(torch.Size([4])).shape == (4,)
    assert torch.cuda.HalfTensor(2, 3).shape == (2, 3)


def test_sparse_adam(compute: str) -> None:
    def trained(device: str) -> Any:
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, sparse=True).to(device)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 1], device=device)).sum().backward()
            optimizer.step()
        return table.weight.detach()

    found = trained("cuda")
    assert found.is_cuda
    if compute == "real":
        assert torch.equal(found.cpu(), trained("cpu"))


def test_a_class_that_is_like_a_tensor() -> None:
    known: dict[Any, Any] = {}

    class Box:
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return known[func](*args, **(kwargs or {})) if func in known else NotImplemented

    known[torch.zeros_like] = lambda box: "registered with what is there now"
    assert torch.zeros_like(Box()) == "registered with what is there now"
    with pytest.raises(TypeError):
        torch.ones_like(Box())


def test_sync_batch_norm_alone() -> None:
    layer = nn.SyncBatchNorm(4).cuda()
    result = layer(torch.randn(3, 4, 5, device="cuda"))
    result.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_cuda
