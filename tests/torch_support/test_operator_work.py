"""Which calls of an operator are the same work."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpuprobe.model.run.work import Work, WorkKind
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


def test_a_library_has_no_price_but_the_least_of_its_work() -> None:
    """Or a step would be priced of which a recurrent network is the largest part."""
    with FakeTensorMode():
        x = torch.empty(16, 64, 128, device="cuda")
        weights = [torch.empty(512, 128, device="cuda") for _ in range(2)]
        weights += [torch.empty(512, device="cuda") for _ in range(2)]
        state = torch.empty(1, 16, 128, device="cuda")
        sizes = (2, 128, 0, 1, True, 0.0, True, False, [], None)
        args = (x, weights, 4, None, state, state, *sizes)
        rnn = torch.ops.aten._cudnn_rnn.default
        results = rnn(*args)
        work = OperatorWork().of(rnn, args, {}, results)
        least = x.nbytes + 2 * state.nbytes + sum(weight.nbytes for weight in weights)
        written = sum(result.nbytes for result in results if result is not None)
    assert work is not None
    assert (work.kind, work.read, work.written) == (WorkKind.OTHER, least, written)
    assert work.flops == 2 * (16 * 64) * (2 * 512 * 128)
