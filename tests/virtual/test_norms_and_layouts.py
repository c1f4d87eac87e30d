"""Normalisation as CUDA's kernels do it, and copies of what a kernel cannot read as it lies.

Sizes follow from the sources that the rows of the lowering table name.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allocation_events import events
from torch.nn import functional as F

import gpuprobe
from gpuprobe.errors import UsageError
from gpuprobe.torch_support.version import installed, simulated

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20
ROWS, WIDTH = 512, 1024
WHOLE = ROWS * WIDTH * 4
fused = pytest.mark.skipif(installed() < (2, 9), reason="torch has no fused RMS norm before 2.9")


@pytest.fixture(params=["real", "shapes"])
def compute(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def across() -> torch.Tensor:
    """A matrix that lies by columns."""
    return torch.randn(WIDTH, ROWS, device="cuda").t()


def test_operators_of_which_only_cuda_has_a_kernel_are_known() -> None:
    """Torch takes the others apart, for a CPU and for tensors without memory. This build does not
    tell, but the list that all builds are made of does.
    """
    spec = importlib.util.find_spec("torchgen")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    found = set()
    for entry in path.read_text(encoding="utf-8").split("\n- func: ")[1:]:
        lines = re.findall(r"^    ([\w, ]+): \w+", entry.partition("\n  dispatch:\n")[2], re.M)
        keys = {key.strip() for line in lines for key in line.split(",")}
        if {"CUDA", "CompositeImplicitAutograd"} <= keys and "CPU" not in keys:
            found.add(re.split(r"[.(]", entry)[0])
    known = {"_fused_rms_norm"} if installed() >= (2, 9) else set()
    assert found == known


@fused
def test_rms_norm_is_one_kernel(compute: str) -> None:
    """It saves its input and a factor for each row."""
    with gpuprobe.virtual_gpu("h100-80gb", compute):
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        weight = torch.ones(WIDTH, device="cuda", requires_grad=True)
        assert events(lambda: F.rms_norm(x, (WIDTH,), weight)) == [WHOLE, ROWS * 4]
        y = F.rms_norm(x, (WIDTH,), weight)
        grad = torch.ones_like(y)
        backward = events(lambda: torch.autograd.grad(y, [x, weight], grad, retain_graph=True))
    assert backward == [WHOLE, WIDTH * 4]


@fused
def test_rms_norm_before_it_was_one_kernel() -> None:
    with gpuprobe.virtual_gpu("h100-80gb", "shapes", torch="2.8"):
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        weight = torch.ones(WIDTH, device="cuda", requires_grad=True)
        forward = events(lambda: F.rms_norm(x, (WIDTH,), weight))
    # The squares, their mean, its root; what that is multiplied by is saved for the weight.
    squares = [WHOLE, ROWS * 4, -WHOLE, ROWS * 4, -ROWS * 4]
    assert forward == [*squares, WHOLE, WHOLE]


@fused
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rms_norm_computes_what_a_cpu_does(dtype: torch.dtype, weighted: bool) -> None:
    def values(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(3, 5, 16, generator=generator, dtype=dtype).to(device).requires_grad_()
        weight = torch.rand(16, generator=generator, dtype=dtype).to(device).requires_grad_()
        y = F.rms_norm(x, (16,), weight if weighted else None)
        leaves = [x, weight] if weighted else [x]
        factors = torch.rand(3, 5, 16, generator=generator, dtype=dtype).to(device)
        first = torch.autograd.grad((y * factors).sum(), leaves, create_graph=True)
        total = torch.stack([item.square().sum() for item in first]).sum()
        second = torch.autograd.grad(total, leaves)
        mapped = torch.vmap(lambda row: F.rms_norm(row, (16,), weight))(x)
        of_function = torch.func.grad(lambda t: F.rms_norm(t, (16,), weight).sum())(x)
        found = [y, *first, *second, mapped, of_function]
        return [item.detach().cpu() for item in found]

    expected = values("cpu")
    near = {"rtol": 0.05, "atol": 0.02} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    with gpuprobe.virtual_gpu("h100-80gb"):
        torch.testing.assert_close(values("cuda"), expected, **near)
        torch.testing.assert_close(values("cpu"), expected, rtol=0, atol=0)  # host tensors
    torch.testing.assert_close(values("cpu"), expected, rtol=0, atol=0)


def test_groups_of_channels_last_are_copied(compute: str) -> None:
    with gpuprobe.virtual_gpu("h100-80gb", compute):
        x = torch.randn(4, 32, 16, 16, device="cuda").to(memory_format=torch.channels_last)
        norm = torch.nn.GroupNorm(4, 32).cuda()
        assert events(lambda: norm(x))[:2] == [x.nbytes, x.nbytes]
        assert norm(x).is_contiguous()


Kernel = Callable[[torch.Tensor], Any]
COPIES: dict[str, tuple[Kernel, list[int]]] = {
    "layer_norm": (
        lambda x: F.layer_norm(x, (WIDTH,)),
        [WHOLE, WHOLE, ROWS * 4, ROWS * 4, -WHOLE, -ROWS * 4, -ROWS * 4],
    ),
    "softmax": (lambda x: x.softmax(-1), [WHOLE, WHOLE, -WHOLE]),
    "log_softmax": (lambda x: x.log_softmax(0), [WHOLE, WHOLE, -WHOLE]),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_a_kernel_reads_only_where_it_is_contiguous(compute: str, name: str) -> None:
    kernel, expected = COPIES[name]
    with gpuprobe.virtual_gpu("h100-80gb", compute):
        columns, rows = across(), torch.randn(ROWS, WIDTH, device="cuda")
        assert events(lambda: kernel(columns)) == expected
        assert len(events(lambda: kernel(rows))) == len(expected) - 2


@pytest.mark.parametrize("logarithm", [True, False])
def test_gradients_of_a_softmax(compute: str, logarithm: bool) -> None:
    """Without the logarithm the gradient times the output is copied, laid out like the gradient."""
    with gpuprobe.virtual_gpu("h100-80gb", compute):
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        y = x.log_softmax(-1) if logarithm else x.softmax(-1)
        grad = across()
        found = events(lambda: torch.autograd.grad(y, x, grad, retain_graph=True))
    assert found == ([WHOLE, WHOLE, -WHOLE] if logarithm else [WHOLE] * 3 + [-WHOLE] * 2)


@fused
def test_an_rms_norm_of_columns(compute: str) -> None:
    with gpuprobe.virtual_gpu("h100-80gb", compute):
        x = across()
        assert events(lambda: F.rms_norm(x, (WIDTH,))) == [
            *(WHOLE, WHOLE, ROWS * 4),
            *(-WHOLE, -ROWS * 4),
        ]


def test_gradients_of_a_layer_norm(compute: str) -> None:
    """The input is copied before its gradient is made, what came from behind after that."""
    with gpuprobe.virtual_gpu("h100-80gb", compute):
        x, grad = across().requires_grad_(), across()
        y = F.layer_norm(x, (WIDTH,))
        found = events(lambda: torch.autograd.grad(y, x, grad, retain_graph=True))
        (made,) = torch.autograd.grad(F.layer_norm(x, (WIDTH,)), x, grad)
        assert made.is_contiguous()
    assert found == [WHOLE, WHOLE, WHOLE, -WHOLE, -WHOLE]


@pytest.mark.skipif(installed() < (2, 8), reason="until 2.7 torch does not sum them in parts")
@pytest.mark.parametrize(("torch_version", "split"), [("2.7", False), ("", True)])
def test_gradients_of_many_short_rows_are_summed_in_parts(torch_version: str, split: bool) -> None:
    rows, width = 1 << 17, 64
    with gpuprobe.virtual_gpu("h100-80gb", "shapes", torch=torch_version):
        x = torch.empty(rows, width, device="cuda", requires_grad=True)
        norm = torch.nn.LayerNorm(width).cuda()
        y = norm(x)
        grad = torch.empty_like(y)
        found = events(
            lambda: torch.autograd.grad(y, [x, *norm.parameters()], grad, retain_graph=True)
        )
    results = [rows * width * 4, width * 4, width * 4]
    assert found[:3] == results
    parts = [size for size in found[3:] if size >= MIB]
    assert parts == ([rows // 32 * width * 4] * 2 if split else [])
    assert sum(found) == sum(results)


@pytest.mark.parametrize(
    ("matrix", "copied"),
    [
        (lambda: torch.randn(64, 64, device="cuda"), False),
        (lambda: torch.randn(64, 64, device="cuda").t(), False),
        (lambda: torch.randn(64, 128, device="cuda")[:, :64], False),
        (lambda: torch.randn(128, 128, device="cuda")[::2, ::2], True),
        (lambda: torch.randn(64, 1, device="cuda").expand(64, 64), True),
    ],
)
@pytest.mark.parametrize("product", ["mm", "addmm", "bmm", "baddbmm"])
def test_matrices_that_cublas_cannot_read(
    compute: str, matrix: Callable[[], torch.Tensor], copied: bool, product: str
) -> None:
    nbytes = 64 * 64 * 4
    with gpuprobe.virtual_gpu("h100-80gb", compute):
        torch.mm(torch.randn(2, 2, device="cuda"), torch.randn(2, 2, device="cuda"))  # workspace
        left, right = matrix(), torch.randn(64, 64, device="cuda")
        if product in ("bmm", "baddbmm"):
            left, right = left[None], right[None]
        added = [torch.randn_like(right)] if "add" in product else []
        call = getattr(torch, product)
        assert events(lambda: call(*added, left, right)) == [
            nbytes,
            *([nbytes, -nbytes] if copied else []),
        ]


# -- versions of torch


def test_the_version_that_is_simulated() -> None:
    assert simulated("") == installed()
    assert simulated("2.6") == simulated("2.6.1") == (2, 6)
    newest = ".".join(map(str, installed()))
    assert simulated(newest) == installed()


@pytest.mark.parametrize("text", ["2.5", "1.13.1", "99.0", "2", "two", "2.6+cu124", "2.6.0.0"])
def test_versions_that_cannot_be_simulated(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)), gpuprobe.virtual_gpu(torch=text):
        pytest.fail("it was simulated")
    assert not torch.cuda.is_available() or torch.version.cuda


@pytest.mark.skipif(installed() < (2, 7), reason="a newer torch cannot be simulated")
def test_the_workspace_of_a_version() -> None:
    """32 MiB on compute capability 10.0 since 2.12."""

    def workspace(version: str) -> int:
        with gpuprobe.virtual_gpu("b200-180gb", "shapes", torch=version):
            a = torch.empty(4, 4, device="cuda")
            return max(events(lambda: a @ a))

    assert workspace("2.7") == 8_519_680
    assert workspace("") == (32 * MIB if installed() >= (2, 12) else 8_519_680)


@pytest.mark.parametrize("gpu", ["rtx3090", "h100-80gb"])
def test_the_workspace_of_a_product_with_a_bias(gpu: str, compute: str) -> None:
    """Of cuBLASLt, until 2.6: 1 MiB on every GPU. Peaks of a bias, a product and its gradient that
    were published for a program with torch 2.6 are equal on these two (neighbourhood attention).
    """

    def of_its_own(version: str) -> list[int]:
        with gpuprobe.virtual_gpu(gpu, compute, torch=version):
            a, bias = torch.empty(4, 4, device="cuda"), torch.empty(4, device="cuda")
            torch.mm(a, a)
            return events(lambda: torch.addmm(bias, a, a))

    assert of_its_own("2.6") == [64, MIB, -MIB]
    if installed() >= (2, 7):
        assert of_its_own("2.7") == [64]


def test_an_estimate_names_the_version() -> None:
    def build() -> Any:
        layer = torch.nn.Linear(8, 8).cuda()
        return lambda: layer(torch.ones(4, 8, device="cuda")).sum().backward()

    found = gpuprobe.estimate(build, torch="2.6")
    other = installed() != (2, 6)
    assert found.simulated_torch == ("2.6" if other else "")
    assert any("simulated version of torch" in text for text in found.assumed) == other
    assert gpuprobe.estimate(build).simulated_torch == ""


@fused
def test_kernels_of_a_session_end_with_it() -> None:
    before = torch._C._dispatch_dump("aten::_fused_rms_norm")
    with gpuprobe.virtual_gpu():
        assert torch._C._dispatch_dump("aten::_fused_rms_norm") != before
    assert torch._C._dispatch_dump("aten::_fused_rms_norm") == before
