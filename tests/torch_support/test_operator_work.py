"""Which calls of an operator are the same work."""

from __future__ import annotations

import torch

from gpuprobe.model.run.work import Work
from gpuprobe.torch_support.operator_work import OperatorWork

ADD = torch.ops.aten._foreach_add.Scalar


def test_lists_with_other_sizes_or_types_are_other_work() -> None:
    known = OperatorWork()

    def work(*tensors: torch.Tensor) -> Work | None:
        return known.of(ADD, (list(tensors), 1.0), {}, ADD(list(tensors), 1.0))

    large, small = torch.zeros(1 << 17), torch.zeros(1 << 15)
    first = work(large, small)
    assert first is not None
    assert first.read == 2 * (large.nbytes + small.nbytes)
    assert work(torch.ones(1 << 17), small) is first
    assert work(large, large) != first
    assert work(large, small, small) != first
    strided = work(torch.zeros(1 << 18)[::2], small)
    assert strided == first  # the same elements, found by their strides
    assert strided is not first
    assert work(large, torch.zeros(1 << 16, dtype=torch.float16)) is not first


def test_an_operator_without_a_kernel_has_none() -> None:
    x = torch.zeros(1 << 17)
    assert OperatorWork().of(torch.ops.aten.view.default, (x, [2, -1]), {}, x.view(2, -1)) is None
