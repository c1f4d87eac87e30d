"""The exact account on the CPU: every storage once, from birth to death."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Mlp, seeded, train
from sinks import KeepingSink

from examples import examples
from gpuprobe.model.memory import Category, TraceAction
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Peak
from gpuprobe.sampler.hooks.discover import live_tensors
from gpuprobe.sampler.recorder import Recorder
from gpuprobe.sampler.tracing import traces
from gpuprobe.sampler.tracing.cpu import CpuTrace
from gpuprobe.torch_support.tensors import ADDRESS_SPACE


def unexpected(error: Exception) -> None:
    raise AssertionError(f"a fault while tracing: {error!r}")


def truth(tensors: list[torch.Tensor]) -> int:
    """The bytes of the storages behind these tensors, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def replay(trace: MemoryTrace) -> tuple[int, int]:
    """(peak, final) bytes, from the chunk alone."""
    live: dict[int, int] = {}
    for row in trace.baseline.rows():
        assert row.address not in live
        live[row.address] = row.size
    total = peak = sum(live.values())
    for row in trace.events.rows():
        if row.action is TraceAction.ALLOC:
            assert row.address not in live
            live[row.address] = row.size
            total += row.size
            peak = max(peak, total)
        else:
            assert row.action is TraceAction.FREE_COMPLETED
            assert live.pop(row.address) == row.size
            total -= row.size
    return peak, total


operations = st.lists(
    st.tuples(
        st.sampled_from(["new", "view", "add", "inplace", "drop", "resize", "detach", "cat"]),
        st.integers(0, 1_000),
    ),
    max_size=40,
)


@settings(max_examples=examples(60), deadline=None)
@given(operations)
def test_any_program_is_accounted_to_the_byte(program: list[tuple[str, int]]) -> None:
    tensors: list[torch.Tensor] = [torch.zeros(3)]
    tracer = CpuTrace(lambda: "forward", unexpected)
    before = live_tensors()
    tracer.start(before)
    others = truth(before) - truth(tensors)
    del before
    try:
        for name, number in program:
            if not tensors:
                tensors.append(torch.ones(2))
            chosen = tensors[number % len(tensors)]
            if name == "new":
                tensors.append(torch.empty(number))
            elif name == "view":
                tensors.append(chosen.view(-1)[number % 3 :])
            elif name == "add":
                tensors.append(chosen + 1)
            elif name == "inplace":
                chosen.add_(1)
            elif name == "drop":
                del tensors[number % len(tensors)]
            elif name == "resize":
                fresh = torch.empty(2)
                fresh.resize_(number)
                tensors.append(fresh)
            elif name == "detach":
                tensors.append(chosen.detach())
            else:
                tensors.append(torch.cat([chosen.reshape(-1), chosen.reshape(-1)]))
            chosen = fresh = torch.empty(0)
            (mark,) = tracer.read()
            assert mark.counts.allocated == truth(tensors) + others
            assert mark.exact_peak is not None
            assert mark.exact_peak >= mark.counts.allocated
        expected = tracer.read()[0].counts.allocated
        peak, final = replay(tracer.collect(0))
        assert final == expected
        assert peak >= final
    finally:
        tracer.stop()


def test_chunks_agree_with_the_step_records() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, level="trace"):
        train(model, torch.optim.AdamW(model.parameters()), 3)
    assert [len(step.traces) for step in sink.steps] == [1, 1, 1]
    for step in sink.steps:
        trace = sink.traces[step.traces[0]]
        (window,) = step.windows
        peak, final = replay(trace)
        assert window.peak_allocated == Peak.exactly(peak)
        assert window.end.allocated == final
        assert window.start.allocated == sum(trace.baseline.size)
        assert trace.step == step.index
        phase_peaks = [p.windows[0].peak_allocated for p in step.phases if "/" not in p.path]
        assert max(p.at_least for p in phase_peaks) == peak  # type: ignore[union-attr]


def test_categories_at_the_end_are_the_known_tensors() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, level="trace"):
        train(model, torch.optim.AdamW(model.parameters()), 2)
    step = sink.steps[1]
    trace = sink.traces[step.traces[0]]
    live: dict[int, tuple[int, int]] = {}
    for row in [*trace.baseline.rows(), *trace.events.rows()]:
        if row.action is TraceAction.ALLOC:
            live[row.address] = (row.category, row.size)
        else:
            del live[row.address]
    sums: dict[Category, int] = {}
    for code, size in live.values():
        category = Category.from_code(code)
        sums[category] = sums.get(category, 0) + size
    (tensors,) = step.tensors
    for category, expected in tensors.by_category.items():
        assert sums.pop(category) == expected
    assert sum(sums.values()) == tensors.rest


def test_forward_memory_is_told_apart_by_how_long_it_lives() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, level="trace"):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    trace = sink.traces[sink.steps[1].traces[0]]
    strings = trace.stacks.strings
    allocs = [row for row in trace.events.rows() if row.action is TraceAction.ALLOC]
    hidden = [row for row in allocs if row.size == 8 * 32 * 4]  # the hidden layer's output
    kinds = {(strings[row.phase], Category.from_code(row.category)) for row in hidden}
    assert ("forward", Category.ACTIVATION) in kinds
    assert ("backward", Category.AUTOGRAD_DETAIL) in kinds
    inputs = [row for row in allocs if Category.from_code(row.category) is Category.INPUT]
    assert [row.size for row in inputs] == [8 * 16 * 4]


def test_backward_memory_is_blamed_on_the_forward_line_and_module() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, level="trace"):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    trace = sink.traces[sink.steps[1].traces[0]]
    strings = trace.stacks.strings
    backward = [
        row
        for row in trace.events.rows()
        if strings[row.phase] == "backward" and row.action is TraceAction.ALLOC
    ]
    assert {strings[row.module] for row in backward} >= {"Mlp.first", "Mlp.last", "Mlp.norm"}
    for row in backward:
        frames = trace.stacks.frames_of(row.stack)
        assert frames[0].filename == "<autograd>"
        assert any(frame.filename.endswith("models.py") for frame in frames)
        assert not any("gpuprobe/sampler/" in frame.filename for frame in frames)


def test_storages_resized_behind_the_dispatcher_are_found() -> None:
    tracer = CpuTrace(lambda: "forward", unexpected)
    tensor = torch.zeros(100)
    tracer.start([tensor])
    try:
        tensor.untyped_storage().resize_(4_000)
        trace = tracer.collect(0)
        assert replay(trace)[1] == 4_000
    finally:
        tracer.stop()


def test_tied_weights_sparse_gradients_and_meta_tensors() -> None:
    sink = KeepingSink()
    table = torch.nn.Embedding(50, 8, sparse=True)
    other = torch.nn.Embedding(50, 8)
    other.weight = table.weight
    model = torch.nn.ModuleList([table, other, torch.nn.Linear(2, 2, device="meta")])
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    with Recorder(sink, model=model, optimizer=optimizer, level="trace"):
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 3])).sum().backward()
            optimizer.step()
    assert sink.ends[0].gpuprobe_faults == ()
    by_category = {t.device: t.by_category for t in sink.steps[1].tensors}
    assert by_category["cpu"][Category.PARAMETER] == 50 * 8 * 4
    # indices (3 × int64) and values (3 × 8 × float32), instead of the whole table
    assert by_category["cpu"][Category.GRADIENT] == 3 * 8 + 3 * 8 * 4


def test_nothing_is_kept_alive() -> None:
    model = seeded(Mlp)
    sink = KeepingSink()
    with Recorder(sink, level="trace"):
        train(model, torch.optim.AdamW(model.parameters()), 3)
    gc.collect()
    before = truth(live_tensors())
    kept = [t for t in live_tensors() if t.shape == (8, 32)]
    assert kept == []
    del sink, model
    gc.collect()
    assert truth(live_tensors()) < before


def test_parameters_gradients_and_state_belong_to_their_module() -> None:
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, level="trace"):
        train(model, torch.optim.AdamW(model.parameters()), 2)
    trace = sink.traces[sink.steps[1].traces[0]]
    strings = trace.stacks.strings
    sums: dict[tuple[Category, str], int] = {}
    for row in trace.baseline.rows():
        key = (Category.from_code(row.category), strings[row.module])
        sums[key] = sums.get(key, 0) + row.size
    first = sum(p.nbytes for p in model.first.parameters())
    assert sums[Category.PARAMETER, "Mlp.first"] == first
    assert sums[Category.GRADIENT, "Mlp.first"] == first
    assert sums[Category.OPTIMIZER_STATE, "Mlp.first"] == 2 * first + 2 * 4
    assert sums[Category.BUFFER, "Mlp.norm"] == sum(b.nbytes for b in model.norm.buffers())


def test_torch_tensor_is_blamed_on_its_line() -> None:
    tracer = CpuTrace(lambda: "setup", unexpected)
    tracer.start([])
    try:
        keep = torch.tensor([1.0, 2.0, 3.0])
        trace = tracer.collect(0)
    finally:
        tracer.stop()
    (row,) = [row for row in trace.events.rows() if row.address == keep.data_ptr()]
    assert row.size == 12
    assert trace.stacks.frames_of(row.stack)[0].filename == __file__


def test_a_program_that_grows_is_not_drowned_in_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many new peaks are traced; the highest one always is."""
    monkeypatch.setattr(traces, "PEAK_STEPS", 4)
    sink = KeepingSink()
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = []
    with Recorder(sink, level="trace"):
        kept.append(torch.ones(100_000))
        for _ in range(12):
            kept.append(torch.ones(10))  # growth far below a percent
            optimizer.zero_grad()
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
    peaks = [step.windows[0].peak_allocated for step in sink.steps]
    assert all(isinstance(peak, Peak) for peak in peaks)
    assert peaks == sorted(peaks, key=lambda p: p.at_least)  # type: ignore[union-attr]
    traced = [step.index for step in sink.steps if step.traces]
    assert traced[-1] == 11
    assert len(traced) < 8
    highest = sink.traces[sink.steps[11].traces[0]]
    assert Peak.exactly(replay(highest)[0]) == peaks[11]


def test_windows_of_a_simulated_gpu_are_no_memory() -> None:
    """In a notebook, those of an estimate's cell are alive in the next one."""
    begin, device = 4096, torch.device("cpu")
    space = torch._C._construct_storage_from_data_pointer(begin, device, ADDRESS_SPACE - begin)
    window = torch.empty(0).set_(space, 0, (0,), (1,))
    sink = KeepingSink()
    model = seeded(Mlp)
    with Recorder(sink, level="trace"):
        train(model, torch.optim.SGD(model.parameters()), 1)
    (step,) = sink.steps
    peak = step.windows[0].peak_allocated
    assert isinstance(peak, Peak)
    assert peak.at_least < ADDRESS_SPACE // 2
    del window
