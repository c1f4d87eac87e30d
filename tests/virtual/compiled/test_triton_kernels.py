"""Triton kernels of the program's own, on the virtual GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gpuprobe
from gpuprobe.errors import NotModelled, ValueNeeded

triton = pytest.importorskip("triton", reason="the kernels are Triton's: gpuprobe[compile]")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@triton.jit
def half(x):
    return x * 0.5


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + half(tl.load(y + at, at < n)), at < n)


@triton.jit
def product(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * tl.load(y + at, at < n), at < n)


def tuned() -> Any:
    """The same, autotuned: Triton asks for the device where that is said, at least up to 3.2."""
    configs = [triton.Config({"BLOCK": size}) for size in (32, 64)]
    return triton.autotune(configs, key=["n"])(product)


@triton.jit
def assembly(x):
    tl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [tl.load(x)], tl.int32, True, 1)


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out


def test_with_values_the_interpreter_computes_them() -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute="real"):
        x = torch.arange(100.0, device="cuda")
        assert torch.equal(added(x, x).cpu(), torch.arange(100.0) * 1.5)
        out = torch.empty_like(x)
        tuned()[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, x, out, 100)
        assert torch.equal(out.cpu(), torch.arange(100.0) ** 2)


def test_what_the_interpreter_cannot_do_is_said() -> None:
    with (
        gpuprobe.virtual_gpu("a100-40gb", compute="real"),
        pytest.raises(NotModelled, match="the Triton kernel assembly with values"),
    ):
        assembly[(1,)](torch.ones(1, dtype=torch.int32, device="cuda"))


def test_without_values_a_launch_allocates_nothing() -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        x = torch.empty(1 << 20, device="cuda")
        before = torch.cuda.memory_allocated()
        found = added(x, x)
        assert torch.cuda.max_memory_allocated() == before + found.nbytes


@pytest.mark.parametrize("compute", ["shapes", "real"])
def test_a_launch_reads_and_writes_what_its_code_does(compute: str) -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute=compute):
        x, y = torch.ones(2, 200, device="cuda").unbind()
        torch.cuda.synchronize()
        with gpuprobe.detect_hazards() as watch:
            out = added(x, y)
            with torch.cuda.stream(torch.cuda.Stream()):
                added(x, y)  # reads what the first reads: no race
        assert watch.findings == []
        with gpuprobe.detect_hazards() as watch:
            out = added(x, y)
            with torch.cuda.stream(torch.cuda.Stream()):
                added(x, out)
        assert [finding.kind for finding in watch.findings] == ["read-after-write"]


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_flex_attention(compute: str) -> None:
    """Its values are those of causal attention; it keeps its result and a float32 for each row."""
    from torch.nn.attention import flex_attention as flex

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    with gpuprobe.virtual_gpu("a100-40gb", compute=compute) as session:
        mask = flex.create_block_mask(causal, None, None, 256, 256, device="cuda")
        given = [torch.randn(2, 4, 256, 64, device="cuda") for _ in range(3)]
        for tensor in given:
            tensor.requires_grad_()
        before = torch.cuda.memory_allocated()
        found = torch.compile(flex.flex_attention)(*given, block_mask=mask)
        assert torch.cuda.memory_allocated() - before == (2 * 4 * 256) * (64 + 1) * 4
        found.sum().backward()
        assert not session.machine.assumed
        if compute == "real":
            expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
            assert float((found - expected).abs().max()) < 1e-5
    torch._dynamo.reset()


# -- whole numbers without values


@triton.jit
def starts(counts, out, n, BLOCK: tl.constexpr):
    """Where the rows of each group begin, in tiles of two."""
    at = tl.arange(0, BLOCK)
    tiles = (tl.load(counts + at, at < n, 0) + 1) // 2
    tl.store(out + at, tl.cumsum(tiles) - tiles, at < n)
    tl.store(out + n, tl.sum(tiles))


def _launch_starts(counts: Any) -> Any:
    out = torch.empty(counts.numel() + 1, dtype=torch.int32, device="cuda")
    starts[(1,)](counts, out, counts.numel(), BLOCK=8)
    return out


def test_whole_numbers_that_kernels_write_are_known_where_all_that_they_read_is() -> None:
    with gpuprobe.virtual_gpu("t4", compute="shapes") as session:
        counts = torch.tensor([1, 4, 3, 0], device="cuda", dtype=torch.int32)
        out = _launch_starts(counts)
        tiles = torch.empty(int(out[-1].item()), device="cuda")
        assert tiles.numel() == 5
        assert out.tolist() == [0, 1, 3, 5, 5]
        assert _launch_starts(counts).tolist() == [0, 1, 3, 5, 5]  # its accesses are known again
        assert "reads and writes all its tensors" not in " ".join(session.machine.assumed)


def test_they_are_computed_of_what_the_kernel_was_given() -> None:
    with gpuprobe.virtual_gpu("t4", compute="shapes"):
        counts = torch.tensor([1, 4, 3, 0], device="cuda", dtype=torch.int32)
        out, overwritten = _launch_starts(counts), _launch_starts(counts)
        counts.zero_()
        overwritten.fill_(7)
        assert out.tolist() == [0, 1, 3, 5, 5]
        assert overwritten.tolist() == 5 * [7]


def test_a_launch_that_waits_for_its_values_to_be_asked_for_keeps_no_memory() -> None:
    with gpuprobe.virtual_gpu("t4", compute="shapes"):
        counts = torch.tensor([1, 4, 3, 0], device="cuda", dtype=torch.int32)
        before = torch.cuda.memory_allocated()
        kept = _launch_starts(counts)
        del counts
        assert torch.cuda.memory_allocated() == before
        assert kept[-1].item() == 5
        del kept
        assert torch.cuda.memory_allocated() == 0


def test_they_are_unknown_where_something_that_the_kernel_reads_is() -> None:
    with gpuprobe.virtual_gpu("t4", compute="shapes"):
        unknown = torch.randn(1 << 20, device="cuda").topk(4).indices.int()
        out = _launch_starts(unknown)
        with pytest.raises(ValueNeeded, match="a number"):
            out[-1].item()
