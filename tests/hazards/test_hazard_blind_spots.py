"""What a watch could not see is said, and never taken for order."""

from __future__ import annotations

import io
import struct
import sys
from typing import Any

import numpy
import pytest
import torch

import gpuprobe
from gpuprobe.hazards.findings.results import Hazards
from gpuprobe.reporters.sections.hazards import hazard_sections
from gpuprobe.reporters.text import draw

pytestmark = [pytest.mark.simulated, pytest.mark.filterwarnings("ignore")]


def text_of(found: Hazards) -> str:
    stream = io.StringIO()
    draw.write(hazard_sections(found), stream)
    return " ".join(stream.getvalue().split())


def says(found: Hazards, words: str) -> bool:
    assert any(words in line for line in found.coverage) == (words in text_of(found))
    return any(words in line for line in found.coverage)


def test_no_hazards_is_never_said_alone() -> None:
    with gpuprobe.detect_hazards() as found:
        torch.ones(3, device="cuda").add_(1)
    text = text_of(found)
    assert "No stream hazards among" in text
    assert "see the blind spots below" in text
    assert "declare_access" in text


def test_nothing_on_a_gpu_is_nothing_judged() -> None:
    with gpuprobe.detect_hazards() as found:
        torch.ones(3).add_(1)
    assert found.operations == 0
    assert "Nothing to check" in text_of(found)
    assert "No stream hazards" not in text_of(found)


def test_inputs_and_results_of_compiled_graphs_are_checked() -> None:
    """And the memory within them is a blind spot."""

    def function(x: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        counted.add_(1)
        return x + 1

    for waits in (False, True):
        with gpuprobe.detect_hazards() as found:
            compiled, side = torch.compile(function), torch.cuda.Stream()
            x, counted = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.default_stream())
                kept = counted * 2
            if waits:
                torch.cuda.current_stream().wait_stream(side)
            value = compiled(x, counted)
            with torch.cuda.stream(side):
                if waits:
                    side.wait_stream(torch.cuda.default_stream())
                kept += value
        kinds = [] if waits else ["read-after-write", "write-after-read"]
        assert sorted(race.kind for race in found.races) == kinds
        assert says(found, "memory within compiled graphs, in 1 calls")


def test_events_and_work_from_before() -> None:
    with gpuprobe.virtual_gpu("h100-80gb"):
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        value = torch.ones(8, device="cuda")
        event.record()
        with gpuprobe.detect_hazards() as found:
            side.wait_event(event)
            with torch.cuda.stream(side):
                value.sum()
        assert found.races == []
        assert says(found, "1 waits for events recorded outside the check")
        assert says(found, "races with work queued before the check started")


def test_graphs_from_before() -> None:
    with gpuprobe.virtual_gpu("h100-80gb"):
        value, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value.mul_(2)
        with gpuprobe.detect_hazards() as found:
            graph.replay()
            graph.replay()
        assert says(found, "2 replays of CUDA graphs captured before")


@pytest.mark.parametrize("declared", [True, False])
def test_a_kernel_of_ones_own_is_seen_if_it_is_declared(declared: bool) -> None:
    def launch(x: Any, out: Any, stream: Any) -> None:
        """Stands for a Triton kernel: torch's dispatcher does not see it."""
        if declared:
            gpuprobe.declare_access(reads=[x], writes=[out], stream=stream)

    with gpuprobe.detect_hazards() as found:
        side = torch.cuda.Stream()
        x, out = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        launch(x, out, side)
        out.sum()
    assert bool(found.races) is declared
    assert says(found, "kernels outside torch's dispatcher")


def test_it_is_switched_off_without_a_trace() -> None:
    import multiprocessing.connection as connection

    names = (
        (torch.Tensor, "__repr__"),
        (torch.Tensor, "__reduce_ex__"),
        (torch.UntypedStorage, "_share_cuda_"),
        (connection._ConnectionBase, "send"),
        (torch.autograd.graph, "_engine_run_backward"),
    )
    before = [getattr(owner, name) for owner, name in names]
    with gpuprobe.detect_hazards():
        assert [getattr(owner, name) for owner, name in names] != before
    assert [getattr(owner, name) for owner, name in names] == before


def test_what_c_code_does_with_an_array_is_not_seen() -> None:
    with gpuprobe.detect_hazards() as found:
        buffer = torch.zeros(64, dtype=torch.uint8).pin_memory()
        buffer.cuda(non_blocking=True)
    assert not says(found, "NumPy arrays over pinned memory")
    with gpuprobe.detect_hazards() as found:
        io.BytesIO(bytes(64)).readinto(torch.zeros(64, dtype=torch.uint8).pin_memory().numpy())
    assert says(found, "NumPy arrays over pinned memory")


@pytest.mark.parametrize("declared", [True, False])
def test_c_code_of_the_host_is_seen_if_it_is_declared(declared: bool) -> None:
    with gpuprobe.detect_hazards() as found:
        buffer = torch.zeros(64, dtype=torch.float64).pin_memory()
        on_gpu = buffer.cuda(non_blocking=True)
        numpy.random.default_rng(0).random(out=buffer.numpy())
        if declared:
            gpuprobe.declare_access(reads=on_gpu, writes=[buffer], host=True)
    assert [race.rule for race in found.races] == ["GP206"] * declared
    assert all(race.location and race.location.file == __file__ for race in found.races)


_C_CODE = {
    "readinto": lambda array: io.BytesIO(bytes(64)).readinto(array),
    "struct": lambda array: struct.pack_into("<I", array, 0, 7),
}


@pytest.mark.parametrize("name", list(_C_CODE))
def test_who_asks_for_the_memory_of_an_array_is_seen_since_python_3_12(name: str) -> None:
    with gpuprobe.detect_hazards() as found:
        buffer = torch.zeros(64, dtype=torch.uint8).pin_memory()
        buffer.cuda(non_blocking=True)
        _C_CODE[name](buffer.numpy())
    seen = sys.version_info >= (3, 12)
    assert [race.rule for race in found.races] == ["GP207"] * seen
    assert says(found, name) is not seen
    assert says(found, "memoryview")  # what is written through one is not asked for


def test_the_elements_of_an_array_are_seen_by_position() -> None:
    def assign(array: Any) -> None:
        array.flat[3] = 1

    for use in (assign, lambda array: numpy.frombuffer(array, dtype=numpy.uint8).sum()):
        with gpuprobe.detect_hazards() as found:
            buffer = torch.zeros(64, dtype=torch.uint8).pin_memory()
            buffer.copy_(torch.ones(64, dtype=torch.uint8, device="cuda"), non_blocking=True)
            use(buffer.numpy())
        assert {race.kind for race in found.races} == {"host-race"}
