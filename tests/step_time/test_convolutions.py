"""Layouts and biases of convolutions, and reductions that have a library's name."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.step_time.price import Price
from gpuprobe.step_time.prices import Prices, prices
from gpuprobe.torch_support.operator_work import OperatorWork

aten = torch.ops.aten


def work_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Work:
    args = (x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    work = OperatorWork().of(aten.convolution.default, args, {}, aten.convolution.default(*args))
    assert work is not None
    return work


def seconds(work: Work) -> float:
    known = prices("a100-40gb")
    assert isinstance(known, Prices)
    price = known.of(work, 1)
    assert isinstance(price, Price)
    return price.expected


@pytest.fixture
def fake():  # type: ignore[no-untyped-def]
    with FakeTensorMode():
        yield


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.empty(32, 64, 56, 56, device="cuda", dtype=dtype)
    weight = torch.empty(64, 64, 3, 3, device="cuda", dtype=dtype)
    return x, weight, torch.empty(64, device="cuda", dtype=dtype)


@pytest.mark.usefixtures("fake")
def test_half_precision_is_transposed_if_channels_are_not_last() -> None:
    x, weight, _ = tensors(torch.float16)
    last = x.contiguous(memory_format=torch.channels_last)
    plain, faster = work_of(x, weight, None), work_of(last, weight, None)
    assert (plain.variant, faster.variant) == ("", "channels last")
    more = seconds(plain) - seconds(faster)
    moved = 2 * (plain.read + plain.written)
    assert moved / 1555e9 < more < 2 * moved / 1555e9


@pytest.mark.usefixtures("fake")
def test_a_bias_is_added_to_the_result() -> None:
    for dtype in (torch.float16, torch.float32):
        x, weight, bias = tensors(dtype)
        without, with_bias = work_of(x, weight, None), work_of(x, weight, bias)
        assert with_bias.variant == "bias"
        more = seconds(with_bias) - seconds(without)
        assert more > 2 * with_bias.written / 1555e9


@pytest.mark.usefixtures("fake")
def test_the_norm_of_a_vector_is_a_reduction() -> None:
    x = torch.empty(1 << 20, device="cuda")
    op = aten.linalg_vector_norm.default
    work = OperatorWork().of(op, (x, 2), {}, op(x, 2))
    assert work is not None
    assert (work.kind, work.read) == (WorkKind.ELEMENTS, 4 << 20)
