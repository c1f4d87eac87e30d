"""Parts of torch that come to a device by another way than an operator's call."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import torch
import warm_python

import gpuprobe

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: prototypes, betas


@pytest.fixture(params=["real", "shapes"])
def compute(request: pytest.FixtureRequest) -> Iterator[str]:
    with gpuprobe.virtual_gpu("a100-80gb", request.param):
        yield request.param


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_jagged_tensors_go_through_a_layer_and_back(compute: str) -> None:
    """In a process of its own: what went wrong there ended the process."""
    program = f"""
import warnings; warnings.simplefilter("ignore")
import torch, gpuprobe
with gpuprobe.virtual_gpu("a100-80gb", {compute!r}):
    layer = torch.nn.Linear(4, 4).cuda()
    rows = [torch.ones(2, 4), torch.ones(3, 4)]
    batch = torch.nested.nested_tensor(
        rows, layout=torch.jagged, device="cuda", requires_grad=True
    )
    assert batch.is_cuda and (batch * 2).is_cuda
    layer(batch).values().sum().backward()
    assert layer.weight.grad.is_cuda
"""
    done = subprocess.run(
        [warm_python.shared().python, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_sparse_tensors_are_made_on_a_device() -> None:
    with gpuprobe.virtual_gpu("a100-80gb"):
        at, values = torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0])
        for made in (
            torch.sparse_coo_tensor(at, values, (2,), device="cuda", requires_grad=True),
            torch.sparse_coo_tensor((2, 3), device=0),
            torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), at[0], values, device="cuda"),
        ):
            assert made.is_cuda
        assert not torch.sparse_coo_tensor(at, values).is_cuda


def test_higher_order_operators(compute: str) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    query = torch.randn(1, 2, 16, 16).cuda()
    before = torch.cuda.memory_allocated()
    assert flex(query, query, query).is_cuda
    assert torch.cuda.max_memory_allocated() > before
    if compute == "real":
        truth = torch.tensor(True).cuda()
        found = torch.cond(truth, lambda x: x + 1, lambda x: x - 1, (query,))
        torch.testing.assert_close(found, query + 1)


def test_what_the_compiler_imports_is_there(compute: str) -> None:
    torch.compiler.reset()
    assert torch.cuda.current_blas_handle()
