"""Matrices multiplied group by group: the same memory with values and without."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpuprobe import virtual_gpu  # noqa: E402

COMPUTE = ("real", "shapes")

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="torch before grouped_mm"
)


def trained(compute: str, dtype: Any) -> tuple[Any, ...]:
    """What a product of ten rows in three groups, and its gradients, look like."""
    with virtual_gpu("h100-80gb", compute):
        rows = torch.randn(10, 8, device="cuda", dtype=dtype, requires_grad=True)
        experts = torch.randn(3, 8, 16, device="cuda", dtype=dtype, requires_grad=True)
        ends = torch.tensor([2, 5, 10], device="cuda", dtype=torch.int32)
        product = torch.nn.functional.grouped_mm(rows, experts, offs=ends)
        product.square().sum().backward()
        found = (product, rows.grad, experts.grad)
        return (
            *((t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in found),
            torch.cuda.max_memory_allocated(),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_do_not_change_what_a_product_takes(dtype: Any) -> None:
    with_values, in_shapes = (trained(compute, dtype) for compute in COMPUTE)
    assert with_values == in_shapes


@pytest.mark.parametrize(
    ("left", "right"), [((10, 8), (8, 12)), ((3, 4, 8), (8, 12)), ((3, 4, 8), (3, 8, 12))]
)
def test_each_kind_of_operand(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    found = []
    for compute in COMPUTE:
        with virtual_gpu("h100-80gb", compute):
            ends = torch.tensor([4, 6, 8 if len(left) == 2 else 12], dtype=torch.int32).cuda()
            product = torch.nn.functional.grouped_mm(
                torch.randn(left, device="cuda"),
                torch.randn(right, device="cuda"),
                offs=None if len(left) == len(right) == 3 else ends,
            )
            found.append((product.shape, product.stride(), product.untyped_storage().nbytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("compute", COMPUTE)
def test_rows_that_do_not_begin_every_16_bytes_are_refused(compute: str) -> None:
    with virtual_gpu("h100-80gb", compute):
        ends = torch.tensor([2, 5, 10], device="cuda", dtype=torch.int32)
        rows, experts = torch.randn(10, 6, device="cuda"), torch.randn(3, 6, 10, device="cuda")
        with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
            torch.nn.functional.grouped_mm(rows, experts, offs=ends)
