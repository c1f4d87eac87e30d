"""Calls of ``torch.distributed`` as the recorder counts them, in a group of four without peers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpuprobe
from gpuprobe.model.place import Place
from gpuprobe.model.run.communication import CollectiveRecord, operations
from gpuprobe.model.run.session import BlindSpot, Collective
from gpuprobe.model.values import Unavailable
from gpuprobe.sampler.hooks.collectives import DDP, CollectiveCalls, Records
from gpuprobe.sampler.hooks.waits import Waited, joined_waits

pytestmark = pytest.mark.filterwarnings("ignore")  # torch has newer names for some functions
RANKS, SIZE = 4, 64  # bytes of one tensor


@pytest.fixture
def calls() -> Iterator[CollectiveCalls]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found = CollectiveCalls(lambda spot: None)
    found.install()
    yield found
    found.remove()
    dist.destroy_process_group()


def taken(calls: CollectiveCalls) -> dict[str, Collective]:
    return {call.op: call for call in calls.take() if call.op != "wait"}


def tensor() -> torch.Tensor:
    return torch.zeros(SIZE // 4)


def test_bytes_handed_over_and_bytes_on_the_wire(calls: CollectiveCalls) -> None:
    dist.all_reduce(tensor())
    dist.all_gather_into_tensor(torch.empty(SIZE), tensor())
    dist.reduce_scatter_tensor(torch.empty(SIZE // 16), tensor())
    found = taken(calls)
    assert {op: (call.bytes, call.wire) for op, call in found.items()} == {
        "all_reduce": (SIZE, 2 * SIZE * 3 // 4),
        "all_gather_into_tensor": (SIZE, 4 * SIZE * 3 // 4),
        "reduce_scatter_tensor": (SIZE, SIZE * 3 // 4),
    }


def test_functional_collectives_count(calls: CollectiveCalls) -> None:
    from torch.distributed import _functional_collectives as functional

    functional.wait_tensor(functional.all_reduce(tensor(), "sum", dist.group.WORLD))
    functional.wait_tensor(functional.all_gather_tensor(tensor(), 0, dist.group.WORLD))
    found = taken(calls)
    assert (found["all_reduce"].count, found["all_reduce"].bytes) == (1, SIZE)
    assert (found["all_gather"].count, found["all_gather"].wire) == (1, 3 * SIZE)


def test_collectives_of_distributed_tensors_count(calls: CollectiveCalls) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (RANKS,))
    DTensor.from_local(tensor(), mesh, [Partial()]).redistribute(mesh, [Replicate()])
    assert taken(calls)["all_reduce"].bytes == SIZE


def test_calls_that_move_tensors_are_measured_and_no_others(calls: CollectiveCalls) -> None:
    assert calls.copies.take() == {}
    tensor().to(torch.float64)
    tensor().to(dtype=torch.float64)
    thread = threading.Thread(target=lambda: tensor().to("cpu"))  # it delays no step
    thread.start()
    thread.join()
    assert calls.copies.take() == {}
    for move in (
        lambda: tensor().to("cpu"),
        lambda: tensor().to(device=torch.device("cpu")),
        lambda: tensor().to(tensor()),
        lambda: nn.Linear(1, 1).to("cpu"),
    ):
        move()
        (spent,) = calls.copies.take().values()
        assert spent > 0
    compiled = torch.compile(lambda x: x.to("cpu") + 1, backend="eager", fullgraph=True)
    assert compiled(tensor()).sum() == SIZE // 4


def test_nothing_is_measured_after_the_end() -> None:
    before = vars(torch.Tensor).get("to")
    found = CollectiveCalls(lambda spot: None)
    found.install()
    assert vars(torch.Tensor).get("to") is before  # without a process group
    found._functional()
    assert vars(torch.Tensor).get("to") is not before
    found.remove()
    assert vars(torch.Tensor).get("to") is before


def fail(error: Exception) -> None:
    raise error


def test_recording_an_operation_keeps_no_tensor_of_its_callers() -> None:
    """What a function has deleted is gone, also if it called a collective before."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def caller() -> tuple[Any, CollectiveRecord]:
        large = tensor()
        gone = weakref.ref(large)
        dist.all_reduce(tensor())
        del large
        return gone(), records.take()[0]

    records = Records(lambda: 0, fail)
    found = CollectiveCalls(lambda spot: None, records=records)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        found.install()
        kept, one = caller()
    finally:
        found.remove()
        dist.destroy_process_group()
    assert kept is None
    assert (one.op, one.payload, one.members, one.dtype) == ("all_reduce", SIZE, "0-3", "float32")
    assert isinstance(one.place, Place)
    assert one.place.file == __file__


def hooked(state: Any, bucket: Any) -> Any:
    dist.all_reduce(bucket.buffer().to(torch.float16))
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


hooked.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def test_buckets_count_where_the_reducer_exchanges_them(calls: CollectiveCalls) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    calls.take()
    model(torch.zeros(2, 16))
    calls.forward_done(model)
    (call,) = taken(calls).values()
    gradients = 4 * (16 * 16 + 16)
    assert (call.op, call.bytes, call.wire) == (DDP, gradients, gradients * 2 * 3 // 4)


def test_a_hook_that_exchanges_them_is_counted_once(calls: CollectiveCalls) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    model.register_comm_hook(None, hooked)
    calls.take()
    loss = model(torch.zeros(2, 16)).sum()
    calls.forward_done(model)
    loss.backward()
    (call,) = taken(calls).values()
    assert (call.op, call.bytes) == ("all_reduce", 2 * (16 * 16 + 16))


def test_a_blind_spot_is_only_told_where_the_reducer_works() -> None:
    spots: list[BlindSpot] = []
    calls = CollectiveCalls(spots.append)
    calls.forward_done(nn.Linear(1, 1))
    assert not spots


def register(model: nn.parallel.DistributedDataParallel, hook: Any) -> None:
    """The group does not exchange anything. torch checks the types that annotations name."""
    future = torch.futures.Future[torch.Tensor]
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": future}
    model.register_comm_hook(None, hook)


def test_the_end_of_a_backward_pass_is_waiting(
    calls: CollectiveCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DistributedDataParallel waits for its buckets after this rank's gradients are computed: here
    until that moment was noted, and for ever if it were not noted before it waits.
    """
    noted, read = [], threading.Event()
    times = iter((7, 12))

    def clock() -> int:
        read.set()
        return next(times)

    def exchange(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        gradients = bucket.buffer()

        def complete() -> None:
            noted.append(read.wait(10))
            future.set_result(gradients)

        threading.Thread(target=complete).start()
        return future

    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    register(model, exchange)
    calls.waits.take()
    monkeypatch.setattr("gpuprobe.sampler.hooks.waits.perf_counter_ns", clock)
    loss = model(torch.ones(2, 4)).sum()
    calls.forward_done(model)
    loss.backward()
    calls.waits.backward_done()
    assert noted == [True]
    assert calls.waits.take() == {"backward": 5}


def test_a_backward_pass_of_unknown_end_is_unknown(calls: CollectiveCalls) -> None:
    class Hidden:  # an output whose tensors nobody finds
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> Hidden:  # type: ignore[override]
            return Hidden(super().forward(x))

    def exchange(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = nn.parallel.DistributedDataParallel(Net(4, 4))
    register(model, exchange)
    calls.waits.take()
    loss = model(torch.ones(2, 4)).tensor.sum()
    calls.forward_done(model)
    loss.backward()
    calls.waits.backward_done()
    assert isinstance(calls.waits.take()["backward"], Unavailable)


def test_calls_wait_in_the_phase_that_is_on(calls: CollectiveCalls) -> None:
    calls.waits._phase = lambda: "data/augment"
    dist.barrier()
    calls.waits._phase = lambda: "optimizer"
    dist.all_reduce(tensor())
    assert list(calls.waits.take()) == ["data", "optimizer"]
    assert calls.waits.take() == {"backward": 0}  # known: there was none
    one: Waited = {"data": 1, "backward": Unavailable("why")}
    assert joined_waits(one, {"data": 2, "forward": 3, "backward": 4}) == {
        "data": 3,
        "forward": 3,
        "backward": Unavailable("why"),
    }


def test_operations_beyond_the_bound_are_a_blind_spot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their totals are recorded, and the step can be read."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for module in ("collectives", "per_step"):
        monkeypatch.setattr(f"gpuprobe.sampler.hooks.{module}.MOST_OPERATIONS", 3)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with gpuprobe.record(tmp_path / "a.gpuprobe") as recorder:
            for _ in range(2):
                with recorder.step():
                    for _ in range(5):
                        dist.all_reduce(tensor())
    finally:
        dist.destroy_process_group()
    (rank,) = gpuprobe.load(tmp_path / "a.gpuprobe").ranks
    assert [operations(step.exchanges) for step in rank.steps] == [3, 3]
    assert [call.count for step in rank.steps for call in step.collectives] == [5, 5]
    left_out = [spot.what for spot in rank.blind_spots if "operations with other" in spot.what]
    assert len(left_out) == 1


@pytest.mark.parametrize(("device", "known"), [("cpu", True), ("meta", False)])
def test_a_call_that_returns_has_not_ended_an_operation_on_a_device(
    calls: CollectiveCalls, device: str, known: bool
) -> None:
    """Of a list of tensors, too: the kernels are enqueued only."""
    faults: list[Exception] = []
    records = Records(lambda: 0, faults.append)
    given = [torch.empty(4, device=device)]
    records.called("all_gather", 16, None, given, None, (1, 2), blocks=True)
    (found,) = records.take()
    assert (isinstance(found.completion_ns, int), found.dtype, faults) == (known, "float32", [])
