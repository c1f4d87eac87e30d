"""A step played in time: what waits for what, and that every moment is counted once."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.errors import DataError
from gpuprobe.model.plans.step_time import COMPUTE, COPIES, HOST, LINKS, MEMORY, StepTime, cost_of
from gpuprobe.model.run.work import (
    AUTOGRAD,
    NO_SAMPLES,
    NOT_FOLLOWED,
    Action,
    StepWork,
    Work,
    WorkKind,
    WorkPlace,
    check_work,
    joined_work,
    pack,
    unpack,
)
from gpuprobe.model.run.work import MAIN as MAIN_THREAD
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.predict import VERSION, predict, timeline
from gpuprobe.step_time.priced import _FASTER, _SLOWER, PricedStep, priced_step, slowest, spread
from gpuprobe.step_time.prices import Prices, prices
from gpuprobe.step_time.replay import Costs, RankTasks, Resource, Task, TaskSpan, play, tasks_of

MAIN, SIDE = 0, 1
DEVICES = ("cuda:0", "cuda:0")


def kernel(stream: int = MAIN, operator: int = 1) -> Task:
    return Task(Action.KERNEL, stream, operator, None)


def event(action: Action, stream: int, number: int) -> Task:
    return Task(action, stream, 0, None, number)


def played(
    tasks: list[Task], gpu: list[float], host: list[float] | None = None, times: int = 1
) -> tuple[list[TaskSpan], float]:
    """The spans on the GPU of the last time, and its end."""
    costs = Costs(gpu, host or [0.0] * len(tasks), 0.0)
    run = play(RankTasks(tasks, DEVICES, costs), times=times)
    return [span for span in run.spans[-1] if span.resource is not Resource.HOST], run.ends[-1]


def test_a_stream_runs_in_order() -> None:
    spans, end = played([kernel(), kernel()], [2.0, 3.0])
    assert [(span.start, span.end) for span in spans] == [(0, 2), (2, 5)]
    assert end == 5


def test_a_slow_host_leaves_gaps() -> None:
    spans, end = played([kernel(), kernel()], [1.0, 1.0], [4.0, 4.0])
    assert [(span.start, span.end) for span in spans] == [(4, 5), (8, 9)]
    assert end == 9


def test_communication_runs_beside_computing_until_an_event_orders_them() -> None:
    collective = Task(Action.COLLECTIVE, SIDE, 0, None)
    spans, end = played([collective, kernel()], [5.0, 2.0])
    assert end == 5  # beside
    wait = [
        collective,
        event(Action.RECORD, SIDE, 7),
        event(Action.WAIT, MAIN, 7),
        kernel(),
    ]
    spans, end = played(wait, [5.0, 0.0, 0.0, 2.0])
    assert end == 7
    assert spans[-1].start == 5


def test_kernels_of_two_streams_share_the_gpu() -> None:
    spans, end = played([kernel(MAIN), kernel(SIDE)], [3.0, 3.0])
    assert end == 6
    assert spans[1].start == 3


def test_the_host_waits_for_a_stream_and_for_pageable_copies() -> None:
    sync = Task(Action.HOST_WAITS_STREAM, MAIN, 0, None)
    _, end = played([kernel(), sync, kernel()], [4.0, 0.0, 1.0], [1.0, 1.0, 1.0])
    assert end == 7  # 5, then a second of the host, then the kernel
    copy = Work("copy", WorkKind.COPY, "uint8", (), "pageable h2d", 0, 1 << 20, 1 << 20)
    _, end = played([Task(Action.COPY, MAIN, 0, copy), kernel()], [4.0, 1.0], [1.0, 1.0])
    assert end == 7
    pinned = replace(copy, variant="h2d")
    _, end = played([Task(Action.COPY, MAIN, 0, pinned), kernel()], [4.0, 1.0], [1.0, 1.0])
    assert end == 6


def test_the_host_runs_ahead_over_steps() -> None:
    tasks, gpu, host = [kernel()] * 3, [4.0] * 3, [1.0] * 3
    ends = play(RankTasks(tasks, DEVICES, Costs(gpu, host, 0.0)), times=3).ends
    assert [b - a for a, b in pairwise(ends)] == [12, 12]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Task], list[float], list[float]]:
    """Random steps of two streams, with events, waits and copies."""
    copy = Work("copy", WorkKind.COPY, "uint8", (), "h2d", 0, 1, 1)
    kinds = st.sampled_from(
        [Action.KERNEL, Action.COLLECTIVE, Action.COPY, Action.RECORD, Action.WAIT,
         Action.HOST_WAITS_STREAM, Action.HOST_WAITS_DEVICE, Action.HOST_WAITS_EVENT]
    )  # fmt: skip
    tasks = [
        Task(action, stream, 1, copy if action is Action.COPY else None, number)
        for action, stream, number in draw(
            st.lists(
                st.tuples(kinds, st.integers(0, 1), st.integers(1, 3)), min_size=1, max_size=40
            )
        )
    ]
    times = st.lists(st.integers(0, 8), min_size=len(tasks), max_size=len(tasks))
    return tasks, [float(t) for t in draw(times)], [float(t) for t in draw(times)]


@given(steps())
def test_order_and_exclusion_hold(step: tuple[list[Task], list[float], list[float]]) -> None:
    tasks, gpu, host = step
    run = play(RankTasks(tasks, DEVICES, Costs(gpu, host, 0.5)), times=2)
    spans, ends = run.spans, run.ends
    assert ends[0] <= ends[1]
    every = [span for one in spans for span in one]
    for stream in (MAIN, SIDE):
        mine = [s for s in every if tasks[s.task].stream == stream and s.resource != Resource.HOST]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))
    for resource in Resource:
        mine = sorted((s for s in every if s.resource is resource), key=lambda s: s.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))
    assert ends[1] >= sum(host) * 2 - 1e-9  # nothing is faster than the host


# -- predictions


def step_of(
    works: list[tuple[Work, int]], moves: Sequence[tuple[Action, Work]] = (), waits: int = 0
) -> StepWork:
    """A step with one call for each work, with so many launches, and then copies."""
    every = [work for work, _ in works] + [work for _, work in moves]
    rows = []
    for number, (_, launches) in enumerate(works, 1):
        rows.append((Action.OPERATOR, 0, number, 0))
        rows += [(Action.KERNEL, 1, number, 0)] * launches
    rows += [(action, 1, 0, len(works) + at) for at, (action, _) in enumerate(moves, 1)]
    rows += [(Action.HOST_WAITS_STREAM, 1, 0, 0)] * waits
    columns = [array(code) for code in "BHIQ"]
    for action, *rest in rows:
        for column, value in zip(columns, (action.value, *rest), strict=True):
            column.append(value)
    return StepWork(
        works=tuple(every),
        places=(WorkPlace("forward", "train.py:3 in step", "Net"),),
        streams=("host", "cuda:0/0"),
        operators=pack((array("I", range(1, len(works) + 1)), array("I", [0] * len(works)))),
        entries=pack(tuple(columns)),
        tokens=1024,
    )


def product(size: int, dtype: str = "bfloat16") -> Work:
    moved = 2 * size * size
    return Work("aten::mm", WorkKind.MATMUL, dtype, (1, size, size, size), "NT",
                2 * size**3, 2 * moved, moved)  # fmt: skip


def elements(size: int) -> Work:
    return Work("aten::add", WorkKind.ELEMENTS, "float32", read=size, written=size)


def h100() -> Prices:
    found = prices("h100-80gb")
    assert isinstance(found, Prices)
    return found


def predicted(step: StepWork) -> StepTime:
    found = predict(step, 2, h100())
    assert isinstance(found, StepTime), found
    return found


def largest(time: StepTime) -> str:
    return time.bounds[0].name


@pytest.mark.parametrize(
    ("step", "bound"),
    [
        (step_of([(product(8192), 1)] * 8), COMPUTE),
        (step_of([(elements(1 << 30), 1)] * 8), MEMORY),
        (step_of([(elements(1 << 10), 1)] * 500), HOST),
        (
            step_of(
                [(elements(1 << 20), 1)],
                [(Action.COLLECTIVE, Work("collective", WorkKind.COLLECTIVE, "", (8,),
                                          "AllReduce", read=1 << 30))],
            ),
            LINKS,
        ),
        (
            step_of(
                [(elements(1 << 20), 1)],
                [(Action.COPY, Work("copy", WorkKind.COPY, "uint8", (), "h2d", 0, 1 << 30,
                                    1 << 30))],
            ),
            COPIES,
        ),
    ],
)  # fmt: skip
def test_what_bounds_a_step_is_named(step: StepWork, bound: str) -> None:
    assert largest(predicted(step)) == bound


@given(
    st.lists(
        st.tuples(
            st.sampled_from([product(256), product(4096), elements(1 << 12), elements(1 << 28)]),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 2),
)
def test_every_table_adds_up_to_the_step(works: list[tuple[Work, int]], waits: int) -> None:
    copy = Work("copy", WorkKind.COPY, "uint8", (), "pageable h2d", 0, 1 << 22, 1 << 22)
    time = predicted(step_of(works, [(Action.COPY, copy)], waits))
    assert 0 < time.low_ns <= time.expected_ns <= time.high_ns
    for table in (time.bounds, time.by_kind, time.by_phase, time.by_module, time.by_line):
        assert sum(row.ns for row in table) == time.expected_ns
    assert 0 <= time.measured <= 1


def test_more_work_takes_longer() -> None:
    one = predicted(step_of([(product(8192), 1)]))
    two = predicted(step_of([(product(8192), 1)] * 2))
    assert two.expected_ns > 1.9 * one.expected_ns
    assert not isinstance(one.used, Unavailable)
    assert 0.5 < one.used < 1


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (Work("aten::_cudnn_rnn", WorkKind.OTHER, "float32", read=1 << 20), "_cudnn_rnn"),
        (product(4096, "float4_e2m1fn_x2"), "float4"),
        (Work("Triton kernel mm", WorkKind.OTHER, read=1 << 20), "products multiply is unknown"),
    ],
)
def test_work_without_a_price_is_refused(work: Work, reason: str) -> None:
    found = predict(step_of([(work, 1), (elements(1 << 10), 1)]), 0, h100())
    assert isinstance(found, Unavailable)
    assert reason in found.reason


def test_a_little_work_without_a_price_is_named() -> None:
    other = Work("aten::_cudnn_rnn", WorkKind.OTHER, "float32", read=1 << 10)
    time = predicted(step_of([(product(8192), 1)] * 4 + [(other, 1)]))
    assert any("_cudnn_rnn" in text for text in time.left_out)


def test_work_on_the_host_is_named() -> None:
    host = Work("aten::mul", WorkKind.HOST, read=1 << 30)
    time = predicted(step_of([(product(4096), 1), (host, 0)]))
    assert any("1 operator on tensors of the CPU (1,024 MiB)" in text for text in time.left_out)


def test_pipelines_and_unfinished_logs_are_refused() -> None:
    send = Work("collective", WorkKind.COLLECTIVE, "", (2,), "Send", read=1 << 20)
    found = predict(step_of([(product(1024), 1)], [(Action.COLLECTIVE, send)]), 0, h100())
    assert isinstance(found, Unavailable)
    assert "pipeline" in found.reason
    cut = replace(step_of([(product(1024), 1)]), complete=False)
    assert isinstance(predict(cut, 0, h100()), Unavailable)


def test_the_cost_is_that_of_all_gpus() -> None:
    time = predicted(step_of([(product(8192), 1)]))
    one, four = cost_of(time, 2.0, 1), cost_of(time, 2.0, 4)
    assert one.step_low == pytest.approx(time.low_ns * 2.0 / 3600e9)
    assert four.step_high == pytest.approx(4 * one.step_high)
    assert four.tokens_high == pytest.approx(one.tokens_high)  # each GPU has its own tokens


# -- columns


def test_work_is_joined_and_read_back() -> None:
    one = step_of([(product(64), 2)], [(Action.FILL, elements(64))])
    two = step_of([(elements(64), 1)], [(Action.FILL, elements(128))])
    both = joined_work(one, two)
    assert isinstance(both, StepWork)
    check_work(both)
    assert tasks_of(both) == [
        replace(task, operator=task.operator and task.operator + (at >= len(tasks_of(one))))
        for at, task in enumerate([*tasks_of(one), *tasks_of(two)])
    ]
    assert {task.thread for task in tasks_of(both)} == {""}  # an older recording
    assert predicted(both).by_thread == ()
    named = [with_threads(one, MAIN_THREAD), with_threads(two, AUTOGRAD)]
    both = joined_work(*named)
    assert isinstance(both, StepWork)
    check_work(both)
    assert [t.thread for t in tasks_of(both)] == [
        t.thread for part in named for t in tasks_of(part)
    ]
    assert {row.name for row in predicted(both).by_thread} == {MAIN_THREAD, AUTOGRAD}
    assert joined_work(NOT_FOLLOWED, two) == two
    assert joined_work(one, NOT_FOLLOWED) == one


@pytest.mark.parametrize(
    "damage",
    [
        {"entries": "AAAA"},
        {"operators": "nothing of the kind!"},
        {"works": ()},
        {"places": ()},
        {"streams": ()},
        {"operators": ""},
        {"threads": (MAIN_THREAD,), "issued": pack((array("H", [0]),))},
        {"threads": (), "issued": pack((array("H", [0] * 4),))},
    ],
)
def test_damaged_columns_are_refused(damage: dict[str, object]) -> None:
    step = step_of([(product(64), 1)], [(Action.FILL, elements(64))])
    with pytest.raises(DataError):
        check_work(replace(step, **damage))  # type: ignore[arg-type]


def with_threads(step: StepWork, name: str) -> StepWork:
    count = len(tasks_of(step))
    return replace(step, threads=(name,), issued=pack((array("H", [0] * count),)))


def test_samples_of_two_parts_are_added() -> None:
    def samples(one: int | Unavailable, two: int | Unavailable) -> int | Unavailable:
        step = step_of([(product(64), 1)])
        both = joined_work(replace(step, samples=one), replace(step, samples=two))
        assert isinstance(both, StepWork)
        return both.samples

    unknown = Unavailable("the model gets no tensors")
    assert samples(4, 5) == 9
    assert samples(4, NO_SAMPLES) == samples(NO_SAMPLES, 4) == 4
    assert samples(4, unknown) == samples(unknown, 4) == samples(NO_SAMPLES, unknown) == unknown


def test_columns_that_expand_without_end_are_refused() -> None:
    bomb = pack((array("I", [0] * 1_000_001), array("I", [0] * 1_000_001)))
    with pytest.raises(DataError, match="too many"):
        unpack(bomb, "operators")


def test_the_course_of_a_step_has_all_its_work() -> None:
    step = step_of([(product(4096), 2), (elements(1 << 20), 1)])
    spans = timeline(step, h100())
    assert isinstance(spans, list)
    on_gpu = [span for span in spans if span.track == "cuda:0/0"]
    assert [span.name for span in on_gpu] == ["mm", "mm", "add"]
    total = sum(span.end_ns - span.start_ns for span in on_gpu)
    assert abs(total - predicted(step).gpu_ns) < 10  # each end is rounded
    assert all(0 <= span.start_ns <= span.end_ns for span in spans)
    assert {span.place for span in spans} == {step.places[0]}
    refused = timeline(step_of([(product(64, "float4_e2m1fn_x2"), 1)]), h100())
    assert isinstance(refused, Unavailable)


def off(*works: Work) -> tuple[float, float]:
    """By how many seconds the prices may be lower and higher, without what else a program differs
    by.
    """
    prices = h100()
    priced = priced_step(step_of([(work, 1) for work in works]), prices, 8)
    assert isinstance(priced, PricedStep)
    total = sum(price.expected for price in priced.prices if price is not None)
    low, high = spread(priced, prices)
    return (
        total * math.sqrt((1 - low) ** 2 - _FASTER**2),
        total * math.sqrt((high - 1) ** 2 - _SLOWER**2),
    )


def test_prices_of_a_family_are_off_together_and_families_are_not() -> None:
    norm = replace(elements(1 << 30), operator="aten::native_layer_norm")
    softmax = replace(elements(1 << 30), operator="aten::_softmax")
    for side in (0, 1):
        one = off(norm)[side]
        assert off(norm, norm)[side] == pytest.approx(2 * one)
        assert off(norm, softmax)[side] == pytest.approx(math.hypot(one, off(softmax)[side]))


def test_multiplications_share_the_load_and_sizes_only_a_part_of_their_errors() -> None:
    large, other = product(8192), replace(product(8192), sizes=(1, 8192, 4096, 8192))
    norm = replace(elements(1 << 30), operator="aten::native_layer_norm")
    for side in (0, 1):
        one, two = off(large)[side], off(other)[side]
        assert off(large, large)[side] == pytest.approx(2 * one)
        assert math.hypot(one, two) < off(large, other)[side] < 0.98 * (one + two)
        assert off(large, norm)[side] == pytest.approx(math.hypot(one, off(norm)[side]))


def test_the_slowest_of_several_gpus_takes_longer() -> None:
    """Of 8 about 3.6% (2.5% is the deviation of one)."""
    assert slowest(1) == 1.0
    assert slowest(8) == pytest.approx(1.036, abs=0.001)
    assert 1.0 < slowest(2) < slowest(4) < slowest(8) < slowest(512) < 1.08

    def expected(ranks: int) -> list[float]:
        reduce = Work("nccl", WorkKind.COLLECTIVE, "bfloat16", (ranks,), "AllReduce", read=1 << 26)
        step = step_of([(product(4096), 1)], [(Action.COLLECTIVE, reduce)])
        priced = priced_step(step, h100(), 8)
        assert isinstance(priced, PricedStep)
        return [price.expected for price in priced.prices if price is not None]

    one, (slower, _) = expected(1)[0], expected(8)
    assert slower == pytest.approx(one * slowest(8))


def test_other_figures_are_another_version() -> None:
    """A baseline of another version is not compared. If this fails, and the change is meant, write
    a new line for the next `VERSION`.
    """
    attention = Work("attention", WorkKind.ATTENTION, "bfloat16", (8, 16, 16, 2048, 2048, 64, 64),
                     "flash causal", 2 * 8 * 16 * 2048 * 2048 * 64, 1 << 26, 1 << 25)  # fmt: skip
    convolution = Work("conv", WorkKind.CONVOLUTION, "float16", (64, 256, 256, 3136, 9, 1), "",
                       2 * 64 * 256 * 256 * 3136 * 9, 1 << 27, 1 << 27)  # fmt: skip
    copy = Work("copy", WorkKind.COPY, "uint8", (), "pageable h2d", 0, 1 << 22, 1 << 22)
    gather = Work("collective", WorkKind.COLLECTIVE, "", (8,), "AllGather", read=1 << 24)
    softmax = Work("aten::_log_softmax", WorkKind.ELEMENTS, "float32", read=1 << 28,
                   written=1 << 28)  # fmt: skip
    works = [product(8192), product(512), attention, convolution, elements(1 << 26), softmax]
    works += [
        Work(
            "aten::add",
            WorkKind.ELEMENTS,
            "bfloat16",
            sizes,
            variant,
            read=1 << 27,
            written=1 << 26,
        )
        for sizes, variant in (((), "pointwise"), ((1 << 25,), "scattered"))
    ]
    step = step_of(
        [(work, 1) for work in works],
        [(Action.COPY, copy), (Action.COLLECTIVE, gather)],
        waits=1,
    )
    figures = []
    for gpu in ("h100-80gb", "a100-40gb", "l40s", "b200-180gb"):
        of_gpu = prices(gpu)
        assert isinstance(of_gpu, Prices)
        time = predict(step, 0, of_gpu)
        assert isinstance(time, StepTime)
        figures.append((time.low_ns // 1000, time.expected_ns // 1000, time.high_ns // 1000))
    digest = hashlib.blake2b(repr(figures).encode(), digest_size=6).hexdigest()
    assert (VERSION, digest) == (6, "7319469dfd89")
