"""Operators that CUDA has and the CPU lacks, or has otherwise: results of the nearest dtype, and
the same memory with values and without. ``benchmarks/operator_coverage.py`` asks the same of all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpuprobe
import gpuprobe.errors
from gpuprobe.torch_support.version import installed

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

HALF, BFLOAT = torch.float16, torch.bfloat16


def _numbers(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _classes(x: Any) -> Any:
    return torch.tensor([1, 0, 3], device=x.device)


# What is called, the dtype on the device, and the one that the host computes in.
CASES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "histc": (lambda x: torch.histc(x, 4, 0, 4), torch.int32, torch.float32),
    "abs": (lambda x: x.abs(), torch.bool, torch.uint8),
    "avg_pool3d": (lambda x: F.avg_pool3d(x[None, None, None], (1, 1, 2)), HALF, torch.float32),
    "multi_margin": (lambda x: F.multi_margin_loss(x, _classes(x)), BFLOAT, torch.float32),
    "antialias": (
        lambda x: F.interpolate(x[None, None], (2, 3), mode="bilinear", antialias=True),
        BFLOAT,
        torch.float32,
    ),
    "exp": (lambda x: torch.exp(x), torch.complex32, torch.complex64),
    "in place": (lambda x: (x * 1).tanh_(), torch.complex32, torch.complex64),
    "out": (
        lambda x: torch.sin(x, out=torch.empty(0, dtype=x.dtype, device=x.device)),
        torch.complex32,
        torch.complex64,
    ),
    "nansum": (
        lambda x: torch.nansum(torch.where(x.real > 0, x, float("nan")), 0),
        torch.complex64,
        None,
    ),
    "fft": (lambda x: torch.fft.fft(x, norm="ortho"), HALF, torch.float32),
    "rfft2": (lambda x: torch.fft.rfft2(x, (2, 8)), HALF, torch.float32),
    "ihfftn": (lambda x: torch.fft.ihfftn(x, norm="forward"), HALF, torch.float32),
    "irfft": (lambda x: torch.fft.irfft(x, 6), torch.complex32, torch.complex64),
    "mm": (lambda x: torch.mm(x, x.T.contiguous(), out_dtype=torch.float32), HALF, None),
}


def _given(dtype: Any) -> Any:
    made = _numbers(3, 8).mul(2)
    if dtype.is_complex:
        return torch.complex(made, made.flip(0)).to(dtype)
    return made.abs().to(dtype) if not dtype.is_floating_point else made.to(dtype)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_nearest_dtype(name: str) -> None:
    if name == "mm" and not hasattr(torch.ops.aten.mm, "dtype"):
        pytest.skip("mm of this torch (2.6) has no out_dtype")
    function, dtype, nearest = CASES[name]
    given = _given(dtype)
    if name == "nansum":
        wanted = torch.where(given.real > 0, given, 0).sum(0)
    elif name == "mm":
        wanted = given.float() @ given.float().T
    else:
        wanted = function(given.to(nearest))
    seen = []
    for compute in ("real", "shapes"):
        with gpuprobe.virtual_gpu("h100-80gb", compute=compute):
            there = given.cuda()
            if dtype.is_floating_point and name != "mm":
                there.requires_grad_()
            result = function(there)
            if there.requires_grad:
                (there_grad,) = torch.autograd.grad(result.abs().float().sum(), there)
                assert (there_grad.dtype, there_grad.device) == (dtype, there.device)
            seen.append((result.dtype, result.shape, result.stride(), result.device,
                         torch.cuda.max_memory_allocated()))  # fmt: skip
            if compute == "real":
                fine = max(1e-6, 8 * torch.finfo(result.dtype).eps if result.dtype.is_floating_point
                           or result.dtype.is_complex else 0)  # fmt: skip
                torch.testing.assert_close(
                    result.detach().cpu().to(wanted.dtype), wanted, rtol=fine, atol=fine * 8,
                    equal_nan=True,
                )  # fmt: skip
    assert len(set(seen)) == 1


def test_the_host_still_lacks_them() -> None:
    with (
        gpuprobe.virtual_gpu("h100-80gb"),
        pytest.raises(
            NotImplementedError if installed() >= (2, 7) else RuntimeError, match="histogram_cpu"
        ),
    ):
        torch.histc(torch.tensor([1, 2]), 2)


def test_what_cuda_lacks_too_is_refused() -> None:
    with gpuprobe.virtual_gpu("h100-80gb"), pytest.raises(RuntimeError, match="Half"):
        torch.linalg.inv(torch.eye(2, device="cuda", dtype=HALF))


MODULES: dict[str, Callable[[], Any]] = {
    "layer norm": lambda: nn.LayerNorm(8),
    "batch norm": lambda: nn.BatchNorm2d(64),
    "batch norm at rest": lambda: nn.BatchNorm2d(64).eval(),
    "mish": nn.Mish,
    "unfold": lambda: nn.Unfold(2),
}


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT])
@pytest.mark.parametrize("name", MODULES)
def test_what_is_kept_is_as_large_with_values_as_without(name: str, dtype: Any) -> None:
    seen = []
    for compute in ("real", "shapes"):
        with gpuprobe.virtual_gpu("h100-80gb", compute=compute):
            module = MODULES[name]().cuda().to(dtype)
            given = torch.randn(2, 64, 32, 8, device="cuda", dtype=dtype, requires_grad=True)
            result = module(given)
            kept = torch.cuda.memory_allocated()
            result.sum().backward()
            seen.append((kept, torch.cuda.max_memory_allocated()))
    assert seen[0] == seen[1]


def test_functions_of_the_programs_own() -> None:
    create = torch.cuda.jiterator._create_jit_fn
    with gpuprobe.virtual_gpu("h100-80gb"):
        x, y = _numbers(4).cuda(), _numbers(2, 4).cuda()
        code = """template <typename T> T f(T x, T y, T scale) {
            T z = x > y && x > 0 ? scale * x : -y;  // a comment
            return std::exp(z) / 2 + fabs(x) * 1e-1f;
        }"""
        chosen = torch.where((x > y) & (x > 0), 3 * x, -y)
        wanted = torch.exp(chosen) / 2 + x.abs() * 0.1
        torch.testing.assert_close(create(code, scale=2)(x, y, scale=3.0), wanted)
        whole = create("template <typename T> T g(T a, T b) { return (a - 7) / b; }")
        numbers = torch.tensor([1, 9], device="cuda")
        assert whole(numbers, numbers * 0 + 4).tolist() == [-1, 0]  # as C++ divides
        loop = create(
            "template <typename T> T h(T a) { for (int i = 0; i < 3; ++i) a *= 2; return a; }"
        )
        with pytest.raises(gpuprobe.errors.NotModelled, match="the jiterator function h"):
            loop(x)
    with gpuprobe.virtual_gpu("h100-80gb", compute="shapes"):
        made = create(code, scale=2)(torch.ones(4).cuda(), torch.ones(2, 4).cuda().half())
        assert (made.shape, made.dtype) == ((2, 4), torch.float32)


def test_kernels_made_of_conjugate_views() -> None:
    """Under a dispatch mode, torch leaves them unresolved within a kernel."""
    given = torch.complex(_numbers(4, 3), _numbers(3, 4).T).to(torch.complex128)
    wanted = torch.linalg.pinv(given)
    with gpuprobe.virtual_gpu("h100-80gb"):
        assert torch.equal(torch.linalg.pinv(given.cuda()).cpu(), wanted)
        assert torch.equal(torch.linalg.pinv(given), wanted)


@pytest.mark.parametrize("rows", [5, 3])
def test_least_squares_and_eigenvectors_are_laid_out_alike(rows: int) -> None:
    seen = []
    for compute in ("real", "shapes"):
        with gpuprobe.virtual_gpu("h100-80gb", compute=compute):
            given, square = _numbers(2, rows, 3).cuda(), _numbers(3, 3).cuda()
            results = [
                *torch.linalg.lstsq(given, given[..., :2]),
                *torch.linalg.eig(square),
                *torch.geqrf(given),
            ]
            seen.append([(item.dtype, item.shape, item.stride()) for item in results])
            with pytest.raises(RuntimeError, match="not supported on CUDA"):
                torch.linalg.lstsq(given, given, driver="gelsd")
    assert seen[0] == seen[1]


def _transposed(dtype: Any) -> Any:
    return torch.ones(2, 3, dtype=dtype, device="cuda").t()


LAID_OUT: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    # A kernel looks at the arguments as they are, and not at copies of another type.
    "half": (
        lambda: torch.ones(1, 1, device="cuda").half().expand(3, 2) * _transposed(HALF),
        (1, 3),
    ),
    "two": (lambda: torch.logaddexp(_transposed(BFLOAT), _transposed(BFLOAT)), (1, 3)),
    "contiguous": (lambda: _transposed(HALF).masked_fill(_transposed(torch.bool), 1), (2, 1)),
    "copied": (lambda: _transposed(HALF).clone(memory_format=torch.contiguous_format), (2, 1)),
    # cuSOLVER's V lies by rows of Vh, and positions by dimensions.
    "svd": (lambda: torch.linalg.svd(torch.ones(2, 3, 3, device="cuda"))[2], (9, 3, 1)),
    "nonzero": (lambda: torch.ones(2, 3, device="cuda").nonzero(), (1, 6)),
    "nonzero_static": (lambda: torch.ones(2, 3, device="cuda").nonzero_static(size=5), (1, 5)),
}


@pytest.mark.parametrize("compute", ["real", "shapes"])
@pytest.mark.parametrize("name", LAID_OUT)
def test_results_are_laid_out_as_by_cudas_kernels(name: str, compute: str) -> None:
    if (name, compute) == ("nonzero_static", "shapes") and installed() < (2, 7):
        pytest.skip("torch 2.6 has rows by its rule for shapes")
    make, strides = LAID_OUT[name]
    with gpuprobe.virtual_gpu("a100-80gb", compute):
        assert make().stride() == strides


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_attention_that_kept_nothing_has_no_backward_pass(compute: str) -> None:
    forward = torch.ops.aten._efficient_attention_forward
    with gpuprobe.virtual_gpu("a100-80gb", compute):
        query = torch.randn(1, 8, 2, 16, device="cuda", requires_grad=True)
        out = forward(query, query, query, None, None, None, None, None, 0.0, 0, False)[0]
        with pytest.raises(RuntimeError, match="has not kept logsumexp"):
            out.sum().backward()


def test_what_torch_imports_keeps_no_tensors() -> None:
    """The first call in the nearest dtype, in a process of its own: its result is freed at once."""
    code = """
import gc, torch, gpuprobe
with gpuprobe.virtual_gpu("a100-80gb"):
    gc.disable()
    torch.nn.functional.softsign(torch.zeros(8, device="cuda", dtype=torch.bool))
    print(torch.cuda.memory_allocated())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
