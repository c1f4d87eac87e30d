"""Collectives in a step's work: their payload, and all-to-alls that are made of sends."""

from dataclasses import replace

import pytest
import torch

from gpuprobe.model.run.work import Action, Work, WorkKind
from gpuprobe.sampler.tracing.work import _moved
from gpuprobe.step_time.price import Price
from gpuprobe.step_time.priced import with_exchanges
from gpuprobe.step_time.prices import Prices, prices
from gpuprobe.step_time.replay import Task
from gpuprobe.torch_support.engine_reports import GpuCall
from gpuprobe.torch_support.operator_work import OperatorWork


def task(name: str, size: int, *, operator: int = 1, ranks: int = 4) -> Task:
    work = Work("collective", WorkKind.COLLECTIVE, sizes=(ranks,), variant=name, read=size)
    return Task(Action.COLLECTIVE, 0, operator, work)


@pytest.mark.parametrize(
    ("name", "payload"),
    [("AllReduce", 100), ("AllGather", 400), ("ReduceScatter", 400), ("AlltoAll", 100)],
)
def test_the_payload_is_all_that_is_gathered_or_scattered(name: str, payload: int) -> None:
    """NCCL is called with the bytes of one rank for these; prices are by the whole."""
    work = _moved(GpuCall(Action.COLLECTIVE, 0, 1, 0, 100, name, 1, (4,)))
    assert work.read == payload


@pytest.mark.parametrize("name", ["AlltoAll", "AllGather", "ReduceScatter", "Gather", "Scatter"])
def test_collectives_have_a_price_by_the_names_of_nccl(name: str) -> None:
    known = prices("h100-80gb")
    assert isinstance(known, Prices)
    work = Work("collective", WorkKind.COLLECTIVE, sizes=(8, 1), variant=name, read=1 << 28)
    assert isinstance(known.of(work, 1), Price)


def test_a_send_to_each_rank_and_a_receipt_from_each_are_one_exchange() -> None:
    kernel = Task(Action.KERNEL, 0, 1, None)
    pairs = [task("Send", 10), task("Recv", 10)] * 4
    joined = with_exchanges([kernel, *pairs, kernel])
    assert [each.action for each in joined] == [Action.KERNEL, Action.COLLECTIVE, Action.KERNEL]
    exchange = joined[1].work
    assert exchange is not None
    assert (exchange.variant, exchange.read) == ("AlltoAll", 40)


def test_other_sends_stay_sends() -> None:
    lone = [task("Send", 10), task("Recv", 10)]
    calls = [task("Send", 10, operator=n // 2) for n in range(8)]
    one_way = [task("Send", 10)] * 4
    for tasks in (lone, calls, one_way, [*lone, replace(lone[0], stream=1)]):
        assert with_exchanges(tasks) == tasks


def test_uninitialized_parameters_have_no_work() -> None:
    parameter = torch.nn.UninitializedParameter()
    op = torch.ops.aten._to_copy.default
    assert OperatorWork().of(op, (parameter,), {}, parameter) is None
