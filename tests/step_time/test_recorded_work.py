"""The work of recorded steps, on simulated GPUs: nothing is lost, and sizes are those of torch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import gpuprobe
from gpuprobe.model.run.launches import LaunchKind, rows_of
from gpuprobe.model.run.session import Step
from gpuprobe.model.run.work import AUTOGRAD, MAIN, Action, StepWork, Work, WorkKind, unpack
from gpuprobe.model.values import Unavailable
from gpuprobe.sampler.tracing.work import WorkTrace
from gpuprobe.step_time.price import Price
from gpuprobe.step_time.prices import Prices, prices
from gpuprobe.step_time.replay import Task, tasks_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.simulated]


def recorded(path: Path, step: Callable[[], object], steps: int = 3) -> list[Step]:
    with gpuprobe.record(path / "run.gpuprobe", level="trace") as recorder:
        for _ in range(steps):
            with recorder.step():
                step()
    (rank,) = gpuprobe.load(path / "run.gpuprobe").ranks
    return list(rank.steps)


def watch_operators() -> Any:
    """The script's: the work of the operators that run inside."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu")
    sys.path.insert(0, folder)
    try:
        from calibrate import Watch
    finally:
        sys.path.remove(folder)
    return Watch()


def work_of(step: Step) -> StepWork:
    assert isinstance(step.work, StepWork), step.work
    return step.work


def calls(step: StepWork) -> list[Task]:
    """The launches of each call, once."""
    tasks = [task for task in tasks_of(step) if task.action is Action.KERNEL]
    return list({task.operator: task for task in tasks}.values())


def kinds(step: StepWork) -> Counter[WorkKind]:
    return Counter(task.work.kind for task in calls(step) if task.work is not None)


def test_every_launch_has_an_operator_and_flops_are_those_of_torch(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("a100-40gb"):
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 16, 3),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 30 * 30, 32),
        ).cuda()
        attention = torch.nn.MultiheadAttention(32, 4, batch_first=True).cuda()
        optimizer = torch.optim.AdamW([*model.parameters(), *attention.parameters()])

        def step() -> None:
            x = model(torch.randn(6, 3, 64, 64, device="cuda")).view(2, 3, 32)
            y, _ = attention(x, x, x, need_weights=False)
            torch.bmm(y, y.transpose(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        done = recorded(tmp_path, step)[-1]
        with FlopCounterMode(display=False) as counter:
            step()
    work = work_of(done)
    launched = [task for task in tasks_of(work) if task.action is Action.KERNEL]
    assert all(task.operator and task.work is not None for task in launched)
    assert not isinstance(done.launches, Unavailable)
    counted = sum(
        count
        for kernel, _, count in rows_of(done.launches)
        if kernel.kind in (LaunchKind.KERNEL, LaunchKind.LIBRARY)
    )
    assert len(launched) == counted
    flops = sum(task.work.flops for task in calls(work) if task.work is not None)
    assert flops == counter.get_total_flops()
    assert work.images == 6
    assert kinds(work)[WorkKind.CONVOLUTION] == 2
    assert kinds(work)[WorkKind.CONVOLUTION_BACKWARD] == 2
    places = {place.phase for place in work.places}
    assert {"forward", "backward", "optimizer"} <= places


def test_sizes_layouts_bytes_and_tokens(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("a100-40gb"):
        import torch

        embedding = torch.nn.Embedding(1000, 64).cuda()
        layer = torch.nn.Linear(64, 96, bias=False).cuda().bfloat16()

        def step() -> None:
            rows = embedding(torch.randint(1000, (4, 32), device="cuda"))
            layer(rows.bfloat16()).float().sum().backward()

        work = work_of(recorded(tmp_path, step)[-1])
    products = {
        (task.work.sizes, task.work.variant): task.work
        for task in calls(work)
        if task.work is not None and task.work.kind is WorkKind.MATMUL
    }
    assert set(products) == {((1, 128, 96, 64), "NT"), ((1, 128, 64, 96), "NN"),
                             ((1, 96, 64, 128), "TN")}  # fmt: skip
    forward = products[(1, 128, 96, 64), "NT"]
    assert forward.dtype == "bfloat16"
    assert (forward.read, forward.written) == ((128 * 64 + 96 * 64) * 2, 128 * 96 * 2)
    lookup = one(work, "aten::embedding")
    assert lookup.kind is WorkKind.INDEXED
    assert lookup.read == 128 * 8 + 128 * 64 * 4  # the indices, and as many rows
    assert lookup.written == 128 * 64 * 4
    assert work.tokens == 128


def test_samples_are_the_rows_of_the_first_input_where_that_is_known(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("a100-40gb"):
        import torch

        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)).cuda()
        other = torch.nn.Linear(8, 8).cuda()
        recurrent = torch.nn.TransformerEncoderLayer(64, 4, 64).cuda()  # the batch is second
        lookup = torch.nn.Embedding(100, 8).cuda()
        cases: dict[str, Callable[[], Any]] = {
            "one": lambda: model(torch.randn(16, 64, device="cuda")),
            "four": lambda: sum(model(torch.randn(4, 64, device="cuda")) for _ in range(4)),
            "two models": lambda: other(model(torch.randn(16, 64, device="cuda"))[:4]),
            "second": lambda: recurrent(torch.randn(16, 2, 64, device="cuda")),
            "flat": lambda: model(torch.randn(64, device="cuda")),
            "ids": lambda: lookup(torch.randint(100, (24,), device="cuda")),
        }
        found = {}
        for name, call in cases.items():
            (tmp_path / name).mkdir()

            def step(call: Callable[[], Any] = call) -> None:
                call().sum().backward()

            found[name] = work_of(recorded(tmp_path / name, step)[-1])
    assert found["one"].samples == found["four"].samples == 16
    assert (found["ids"].samples, found["ids"].tokens) == (24, 0)
    reasons = {n: w.samples.reason for n, w in found.items() if isinstance(w.samples, Unavailable)}
    assert list(reasons) == ["two models", "second", "flat"]
    assert "several models" in reasons["two models"]
    assert "batch_first=False" in reasons["second"]
    assert "one dimension" in reasons["flat"]


def test_a_compiled_graph_that_does_not_show_the_samples_is_no_error() -> None:
    import torch

    trace = WorkTrace(Mock(), Mock(), pytest.fail)
    trace.begin_step()
    trace.graph_called([torch.zeros(16, 8), torch.zeros(1, 8)], "forward")
    assert trace.on


def test_every_call_has_the_thread_that_made_it(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("a100-40gb"):
        import threading

        import torch

        layer = torch.nn.Linear(64, 64).cuda()
        x = torch.randn(8, 64, device="cuda")

        def step() -> None:
            layer(x).sum().backward()
            prefetch = threading.Thread(target=x.clone, name="prefetch")
            prefetch.start()
            prefetch.join()

        work = work_of(recorded(tmp_path, step)[-1])
    assert len(work.threads) == 3
    assert {MAIN, AUTOGRAD} < set(work.threads)
    phases = {
        (task.thread, work.places[unpack(work.operators, "operators")[1][task.operator - 1]].phase)
        for task in tasks_of(work)
        if task.operator
    }
    assert (MAIN, "forward") in phases
    assert (AUTOGRAD, "backward") in phases
    (own,) = set(work.threads) - {MAIN, AUTOGRAD}
    assert own == "thread prefetch"  # which has ended


def one(work: StepWork, operator: str) -> Work:
    (found,) = {t.work for t in calls(work) if t.work is not None and t.work.operator == operator}
    return found


def test_streams_events_copies_and_graphs(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("a100-40gb"):
        import torch

        x = torch.ones(1 << 20, device="cuda")
        pinned, pageable = torch.ones(1 << 18).pin_memory(), torch.ones(1 << 18)
        side = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        results: list[torch.Tensor] = []

        def step() -> None:
            if not results:
                with torch.cuda.graph(graph):
                    results.append(x * 2)
            with torch.cuda.stream(side):
                x.add_(1)
            torch.cuda.current_stream().wait_stream(side)
            pinned.cuda(non_blocking=True)
            pageable.cuda()
            results[0].sum().item()
            graph.replay()

        work = work_of(recorded(tmp_path, step)[-1])
    tasks = tasks_of(work)
    actions = [task.action for task in tasks]
    assert actions.index(Action.RECORD) < actions.index(Action.WAIT)
    (record,) = (task for task in tasks if task.action is Action.RECORD)
    (wait,) = (task for task in tasks if task.action is Action.WAIT)
    assert record.event == wait.event
    assert record.stream != wait.stream
    copies = [task.work for task in tasks if task.action is Action.COPY]
    assert [(w.variant, w.read) for w in copies if w is not None] == [
        ("h2d", 1 << 20),
        ("pageable h2d", 1 << 20),
        ("d2h", 4),
    ]
    replayed = actions.index(Action.GRAPH)
    assert actions[replayed + 1] is Action.KERNEL
    assert tasks[replayed + 1].work is not None  # the operator that was captured
    assert tasks[replayed + 1].work.operator == "aten::mul"


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_the_host_waits_where_it_reads_a_value(tmp_path: Path, compute: str) -> None:
    """Also for one that was not computed, which no kernel of torch would read."""
    with gpuprobe.virtual_gpu("a100-40gb", compute):
        import torch

        x = torch.ones(1024, 1024, device="cuda")
        reads: dict[str, Callable[[Any], object]] = {
            "item": lambda total: total.item(),
            "list": lambda total: total.tolist(),
            "bool": lambda total: total.bool().cpu(),
        }
        waits = {}
        for name, read in reads.items():
            (tmp_path / name).mkdir()

            def step(read: Callable[[Any], object] = read) -> None:
                read(x.sin().sum())

            work = work_of(recorded(tmp_path / name, step)[-1])
            tasks = [t for t in tasks_of(work) if t.action in (Action.COPY, *HOST_WAITS)]
            waits[name] = [t.action for t in tasks]
    assert waits == {name: [Action.COPY, Action.HOST_WAITS_STREAM] for name in reads}


HOST_WAITS = (Action.HOST_WAITS_EVENT, Action.HOST_WAITS_STREAM, Action.HOST_WAITS_DEVICE)


def test_a_step_that_is_not_traced_has_no_work(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("a100-40gb"):
        import torch

        x = torch.ones(8, device="cuda")
        steps = recorded(tmp_path, lambda: x.add_(1), steps=5)
    assert [isinstance(step.work, StepWork) for step in steps] == [True] * 3 + [False] * 2


def test_an_internal_error_does_not_reach_a_triton_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuprobe.sampler.tracing import work as tracing

    def broken(*_: object) -> Work:
        raise KeyError("broken on purpose")

    monkeypatch.setattr(tracing, "inductor_work", broken)
    with gpuprobe.virtual_gpu("a100-40gb"):
        import torch

        compiled = torch.compile(lambda x: (x * 2 + 1).relu())
        x = torch.ones(64, 64, device="cuda")
        results: list[object] = []
        recorded(tmp_path, lambda: results.append(compiled(x)))
    assert len(results) == 3  # the program went on
    (rank,) = gpuprobe.load(tmp_path / "run.gpuprobe").ranks
    assert rank.end is not None
    assert any("broken on purpose" in fault for fault in rank.end.gpuprobe_faults)


@pytest.mark.parametrize(
    ("call", "scattered"),
    [
        ("x + y", False),
        ("x.relu_()", False),
        ("torch.where(x > 0, x, y)", False),
        ("x.t() * y.t()", False),
        ("torch.cat((x, y))", False),
        ("x.clone()", False),
        ("x + row", True),
        ("x * wide", True),
        ("x.float()", True),
        ("x.t().contiguous()", True),
        ("torch.nn.functional.silu(x.chunk(2, -1)[0])", True),
        ("torch.cat((x, y), -1)", True),
        ("y.copy_(wide)", True),
    ],
)
def test_a_kernel_that_accesses_single_elements_is_scattered(call: str, scattered: bool) -> None:
    with gpuprobe.virtual_gpu("a100-40gb"):
        import torch

        x, y = (torch.ones(64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        names = {"torch": torch, "x": x, "y": y, "wide": x.float(), "row": x[0]}
        with watch_operators() as watch:
            eval(call, names)
    work = watch.works[-1]
    assert (work.variant, bool(work.sizes)) == (
        ("scattered", True) if scattered else ("pointwise", False)
    ), work


def test_rotary_embeddings_take_as_long_as_measured() -> None:
    """rope of transformers in bfloat16 on A100, forward, by tokens: milliseconds of Liger-Kernel's
    table, to which nothing was fitted.
    """
    of_gpu = prices("a100-80gb")
    assert isinstance(of_gpu, Prices)
    with gpuprobe.virtual_gpu("a100-80gb"):
        import torch

        def rotated(x: Any, cos: Any, sin: Any) -> Any:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        for tokens, measured in ((2048, 0.516), (4096, 0.995), (8192, 1.933), (16384, 3.817)):
            cos = torch.empty(1, 1, tokens, 256, device="cuda", dtype=torch.bfloat16)
            with watch_operators() as watch:
                for heads in (32, 8):
                    x = cos.new_empty(1, tokens, heads, 256).transpose(1, 2)
                    rotated(x, cos, cos)
            known = [of_gpu.of(work, 1) for work in watch.works]
            expected = sum(each.expected for each in known if isinstance(each, Price))
            assert expected * 1e3 == pytest.approx(measured, rel=0.06), tokens
