"""What CUDA does and the CPU does not: autocast's lists, workspaces, kernels of attention."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpuprobe.virtual.lowering import attention, rows, table
from gpuprobe.virtual.torch_patches.autocast import BANNED, LOWER, PROMOTE, SET_DTYPE
from torch import nn

import gpuprobe
from gpuprobe.torch_support.version import installed

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20
WORKSPACE = 8_519_680


@pytest.fixture(params=["real", "shapes"])
def device(request: pytest.FixtureRequest) -> Any:
    with gpuprobe.virtual_gpu("a100-40gb", request.param) as session:
        yield session.machine.devices[0]


# -- autocast


def test_the_lists_name_operators_of_this_torch() -> None:
    with gpuprobe.virtual_gpu("t4"):
        for name in LOWER | SET_DTYPE | PROMOTE | BANNED:
            assert hasattr(torch.ops.aten, name), name


def test_dtypes(device: Any) -> None:
    a = torch.randn(4, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        low = a @ a
        assert low.dtype is torch.bfloat16
        assert F.linear(a, a).dtype is torch.bfloat16
        assert torch.einsum("ij,jk->ik", a, a).dtype is torch.bfloat16
        assert torch.baddbmm(a[None], a[None], a[None]).dtype is torch.bfloat16
        for result in (low.exp(), low.log(), low.rsqrt(), low.pow(2), low.sum(), low.norm()):
            assert result.dtype is torch.float32
        assert F.softmax(low, -1).dtype is torch.float32
        assert F.layer_norm(low, [4]).dtype is torch.float32
        assert low.sum(dtype=torch.bfloat16).dtype is torch.bfloat16
        assert torch.addcmul(low, low, a).dtype is torch.float32
        assert torch.dot(low[0], low[1]).dtype is torch.bfloat16
        assert (low + a).dtype is torch.float32  # not in any list: ordinary promotion
        assert (a.double() @ a.double()).dtype is torch.float64
        host = torch.ones(2, 2)
        assert (host @ host).dtype is torch.float32  # the CPU is not cast
        with torch.autocast("cuda", enabled=False):
            assert (a @ a).dtype is torch.float32
        assert (a @ a).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(torch.sigmoid(a), torch.ones_like(a))
    assert (a @ a).dtype is torch.float32


def test_a_weight_is_cast_once_and_dropped_at_the_end(device: Any) -> None:
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    batch = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    batch @ weight.detach().bfloat16()  # the workspace
    gc.collect()
    before = torch.cuda.memory_allocated()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        batch @ weight
        assert torch.cuda.memory_allocated() - before == 2 * MIB
        batch @ weight
        assert torch.cuda.memory_allocated() - before == 2 * MIB
    assert torch.cuda.memory_allocated() == before
    with (
        torch.no_grad(),
        torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False),
    ):
        batch @ weight
        assert torch.cuda.memory_allocated() == before


def test_gradients_have_the_weights_dtype(device: Any) -> None:
    layer = nn.Linear(8, 8).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = layer(torch.randn(4, 8, device="cuda")).sum()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


# -- the lowering table


def test_every_row_has_a_path_and_a_source() -> None:
    assert len(rows()) == len(table())
    later = {"_fused_rms_norm", "_fused_rms_norm_backward"} if installed() < (2, 9) else set()
    for row in table():
        assert row.path
        assert row.source
        assert row.after or row.before or row.reuse
        name = row.op.partition(".")[0]
        assert hasattr(torch.ops.aten, name) or name in later


def test_a_workspace_for_each_thread(device: Any) -> None:
    a = torch.randn(16, 16, device="cuda", requires_grad=True)
    before = device.sim.allocated
    b = a @ a
    assert device.sim.allocated - before == WORKSPACE + 1024
    (a @ a)
    assert device.sim.allocated - before == WORKSPACE + 1024
    b.sum().backward()
    assert len(device.workspaces) == 2
    torch._C._cuda_clearCublasWorkspaces()
    assert device.workspaces == {}


def test_another_stream_has_a_workspace_of_its_own(device: Any) -> None:
    a = torch.randn(16, 16, device="cuda")
    a @ a
    with torch.cuda.stream(torch.cuda.Stream()):
        a @ a
    assert len(device.workspaces) == 2


def test_dropout_saves_a_mask_of_bytes(device: Any) -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    y = F.dropout(x, 0.5)
    assert torch.cuda.memory_allocated() - before == 4 * MIB + MIB
    del y
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    ("capability", "dtype", "mask", "dim", "expected"),
    [
        ((8, 0), torch.bfloat16, False, 64, attention.FLASH),
        ((8, 0), torch.float16, False, 256, attention.FLASH),
        ((9, 0), torch.float16, False, 256, attention.CUDNN),
        ((9, 0), torch.bfloat16, True, 64, attention.CUDNN),
        ((9, 0), torch.float32, False, 64, attention.EFFICIENT),
        ((10, 0), torch.bfloat16, False, 256, attention.FLASH),
        ((10, 3), torch.bfloat16, False, 128, attention.CUDNN),
        ((12, 0), torch.bfloat16, False, 128, attention.FLASH),
        ((8, 0), torch.float16, False, 512, attention.EFFICIENT),
        ((8, 0), torch.bfloat16, True, 64, attention.EFFICIENT),
        ((8, 0), torch.float32, False, 64, attention.EFFICIENT),
        ((7, 5), torch.float16, False, 64, attention.EFFICIENT),
        ((7, 5), torch.bfloat16, False, 64, attention.MATH),
        ((8, 0), torch.float32, False, 6, attention.MATH),
        ((8, 0), torch.float64, False, 64, attention.MATH),
    ],
)
def test_which_attention(
    capability: tuple[int, int], dtype: torch.dtype, mask: bool, dim: int, expected: str
) -> None:
    q = torch.empty(2, 4, 16, dim, dtype=dtype, device="meta")
    bias = torch.empty(16, 16, dtype=dtype, device="meta") if mask else None
    call = attention.Attention(q, q, q, bias, 0.0, False, scale=None, enable_gqa=False)
    assert attention.pick(capability, call, (2, 13)) == expected


@pytest.mark.parametrize(
    ("length", "keys", "dropout"),
    [(16, 1, 0.0), (1, 16, 0.5), (16, 16, 0.1)],
    ids=["one key", "one query with dropout", "dropout that is no multiple of 1/16"],
)
def test_attention_that_cudnn_does_not_have(length: int, keys: int, dropout: float) -> None:
    q = torch.empty(2, 4, length, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 4, keys, 64, dtype=torch.bfloat16, device="meta")
    call = attention.Attention(q, k, k, None, dropout, False, scale=None, enable_gqa=False)
    assert attention.pick((9, 0), call, (2, 13)) == attention.FLASH


def test_earlier_torch_prefers_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    call = attention.Attention(q, q, q, None, 0.0, False, scale=None, enable_gqa=False)
    assert attention.pick((9, 0), call, (2, 10)) == attention.FLASH
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert attention.pick((9, 0), call, (2, 13)) == attention.FLASH


def test_fused_attention_keeps_no_square_matrix(device: Any) -> None:
    shape = (2, 4, 1024, 64)
    q = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    kept = torch.cuda.memory_allocated() - before
    sums = 2 * 4 * 1024 * 4
    assert MIB + sums <= kept <= MIB + sums + 4096
    assert torch.cuda.max_memory_allocated() - before < 2 * 4 * 1024 * 1024 * 2
    out.sum().backward()
    assert q.grad is not None


def test_gradients_that_meet_are_added_in_place(device: Any) -> None:
    x = torch.randn(MIB, device="cuda", requires_grad=True)
    y = (x * 2.0) + (x * 3.0) + (x * 4.0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y.backward(torch.ones_like(y))
    # The incoming gradient, one product at a time, and the sum in the memory of the first.
    assert torch.cuda.max_memory_allocated() - before <= 3 * 4 * MIB


def test_norms_of_many_tensors(device: Any) -> None:
    tensors = [torch.randn(65536 * 4, device="cuda") for _ in range(2)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch._foreach_norm(tensors)
    assert torch.cuda.max_memory_allocated() - before == 3 * 512  # results, and partial norms
