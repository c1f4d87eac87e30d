"""The front end for real CUDA, on reports that a virtual GPU makes as torch would.

A virtual device stands for the real one. It fires torch's own callback registries, as the C++
code does; the front end gets nothing else of it than what torch tells on CUDA: reports, operators,
addresses. Both front ends must give the same verdicts.
"""

from __future__ import annotations

import linecache
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hazard_case import Case
from hazard_corpus import CASES
from torch import nn
from torch.cuda import _gpu_trace

import gpuprobe
from gpuprobe.hazard_watch.cuda import CudaSource, _Watch
from gpuprobe.hazard_watch.results import fill
from gpuprobe.hazards.findings.results import Hazards
from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import PINNED

pytestmark = pytest.mark.filterwarnings("ignore")


class Reports:
    """The virtual machine's observer: everything is told through torch's registries."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.feed: Any = None

    def _fire(self, registry: str, *args: int, device: int = 0) -> None:
        local = self.machine.local
        before, local.device = local.device, device  # as a device guard does
        try:
            getattr(_gpu_trace, registry).fire_callbacks(*args)
        finally:
            local.device = before

    def allocated(self, tag: Any) -> None:
        if tag.place >= 0 and tag.block is not None:
            self._fire("MemoryAllocationCallbacks", tag.block.address)

    def freed(self, tag: Any) -> None:
        if tag.place >= 0 and tag.block is not None:
            self._fire("MemoryDeallocationCallbacks", tag.block.address)

    def resized(self, tag: Any, old: Any) -> None:
        if old is not None:
            self._fire("MemoryDeallocationCallbacks", old.address)
        self.allocated(tag)

    def event_record(self, event: int, index: int, number: int) -> None:
        self._fire("EventRecordCallbacks", event, number, device=index)

    def event_wait(self, event: int, index: int, number: int) -> None:
        self._fire("EventWaitCallbacks", event, number, device=index)

    def event_synchronize(self, event: int) -> None:
        self._fire("EventSynchronizationCallbacks", event)

    def event_destroyed(self, event: int) -> None:
        self._fire("EventDeletionCallbacks", event)

    def stream_synchronize(self, index: int, number: int) -> None:
        self._fire("StreamSynchronizationCallbacks", number, device=index)

    def device_synchronize(self, index: int) -> None:
        self._fire("DeviceSynchronizationCallbacks", device=index)

    def aliased(self, tensor: Any, array: Any) -> Any:
        return array

    def __getattr__(self, name: str) -> Any:
        """What no registry of torch's reports."""
        return lambda *args, **kwargs: None


class OnVirtual(CudaSource):
    def __init__(self, machine: Any) -> None:
        super().__init__()
        self.virtual = machine
        place_of = machine.place_of
        self.machine.is_pinned = lambda tensor: place_of(tensor) == PINNED  # type: ignore[attr-defined]

    def _threads(self, patches: Patches) -> None:
        """Within the virtual machine's own modes, which stand for CUDA's kernels."""
        original = threading.Thread.run
        feed = self

        def run(thread: threading.Thread) -> None:
            work: Any = thread._target  # type: ignore[attr-defined]

            def watched(*args: Any, **kwargs: Any) -> None:
                with _Watch(feed):
                    work(*args, **kwargs)

            thread._target = watched  # type: ignore[attr-defined]
            original(thread)

        patches.set(threading.Thread, "run", run)

    def _device_address(self, tensor: Any) -> int | None:
        if tensor.layout is not torch.strided:  # no storage: torch raises, the feed gives None
            return None
        tag = self.virtual.tag_of(tensor)
        return None if tag is None or tag.block is None else tag.block.address


def judge(case: Case) -> Hazards:
    name = f"<corpus {case.name}>.py"
    linecache.cache[name] = (len(case.text), None, case.text.splitlines(keepends=True), name)
    code = compile(case.text, name, "exec")
    found = Hazards()
    with gpuprobe.virtual_gpu("h100-80gb") as session:
        machine = session.machine
        place = {"torch": torch, "cuda": torch.cuda, "nn": nn, "F": F, "s": torch.cuda.Stream()}
        machine.observer = Reports(machine)
        feed, patches = OnVirtual(machine), Patches()
        machine.observer.feed = feed
        feed.install(patches)
        try:
            exec(code, place)
        finally:
            patches.undo()
            machine.observer = None
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        feed.guarded(feed.drain)
        assert not feed.broken, feed.broken
        fill(found, feed)
    return found


# The autograd engine of CUDA makes its streams wait for each other, and reports it; there is
# none here to do so. Two devices have streams of the same handles here.
HERE = [case for case in CASES if case.gpus == 1 and "backward(" not in case.text]
HERE = [case for case in HERE if "autograd.grad" not in case.text]
# A virtual GPU does the work of these kernels out of the dispatcher's sight; CUDA does not.
FUSED = ("F.dropout", "F.scaled_dot_product_attention", "nn.LSTM")
HERE = [case for case in HERE if not any(name in case.text for name in FUSED)]


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_same_verdict(case: Case) -> None:
    kinds = {finding.kind for finding in judge(case).races}
    assert kinds == set(case.kinds)


def test_nothing_is_left_behind() -> None:
    names = [name for name in vars(_gpu_trace) if name.endswith("Callbacks")]
    before = {name: list(getattr(_gpu_trace, name).callback_list) for name in names}
    methods = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__repr__, threading.Thread.run)
    judge(CASES[0])
    assert {name: list(getattr(_gpu_trace, name).callback_list) for name in names} == before
    now = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__repr__, threading.Thread.run)
    assert now == methods


def test_a_failure_of_ours_ends_the_watch_only() -> None:
    with gpuprobe.virtual_gpu("h100-80gb") as session:
        machine = session.machine
        machine.observer = Reports(machine)
        feed, patches = OnVirtual(machine), Patches()
        machine.observer.feed = feed
        feed.install(patches)

        def broken(*args: Any) -> None:
            raise RuntimeError("planted")

        feed.device_op = broken  # type: ignore[method-assign]
        x = torch.ones(4, device="cuda")
        assert (x + 1).sum().item() == 8.0
        patches.undo()
        machine.observer = None
    assert feed.broken == "RuntimeError: planted"


def test_synchronisations_are_timed() -> None:
    text = 'x = torch.ones(64, device="cuda")\nfor _ in range(3):\n    x.sum().item()\n'
    found = judge(Case("timed", "", (), text))
    (row,) = [row for row in found.syncs if row.reason == "item"]
    assert row.count == 3
    assert row.seconds is not None
    assert row.seconds > 0
