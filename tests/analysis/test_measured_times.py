"""The predicted time of a step beside the measured one, in a diff."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from io import StringIO
from pathlib import Path

from report_builders import recording, session, step

from gpuprobe.analysis.compare.diff import diff_recordings
from gpuprobe.analysis.compare.times import MeasuredClock, MeasuredStepTime
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import Collective, HostWait, Phase, SessionEnd, Step
from gpuprobe.model.run.work import Action, StepWork, Work, WorkKind, WorkPlace, pack, unpack
from gpuprobe.model.values import Bytes, Nanoseconds, ReadStatus, Unavailable
from gpuprobe.reporters.json import diff as diff_json
from gpuprobe.reporters.sections.diff import diff_sections
from gpuprobe.reporters.text import draw
from gpuprobe.step_time.recorded import step_time_of

H200 = Path(__file__).parents[1] / "recorded" / "h200" / "overhead.json"
MS = 1_000_000


def work(milliseconds: int, dtype: str = "bfloat16") -> StepWork:
    """A step of large products that take about so long on H200."""
    size, count = 8192, max(1, milliseconds // 2)
    moved = 2 * size * size
    product = Work("aten::mm", WorkKind.MATMUL, dtype, (1, size, size, size), "NT",
                   2 * size**3, 2 * moved, moved)  # fmt: skip
    rows = []
    for number in range(1, count + 1):
        rows += [(Action.OPERATOR, 0, number, 0), (Action.KERNEL, 1, number, 0)]
    columns = [array(code) for code in "BHIQ"]
    for action, *rest in rows:
        for column, value in zip(columns, (action.value, *rest), strict=True):
            column.append(value)
    return StepWork(
        works=(product,),
        places=(WorkPlace("forward", "train.py:3 in step", "Net"),),
        streams=("host", "cuda:0/0"),
        operators=pack((array("I", [1] * count), array("I", [0] * count))),
        entries=pack(tuple(columns)),
    )


def simulated(milliseconds: int = 40, dtype: str = "bfloat16") -> Recording:
    made = step(0, {"forward": 1}, work=work(milliseconds, dtype))
    return recording(
        [made],
        ended=SessionEnd(1, gpus=("NVIDIA A100-SXM4-80GB",)),
        session=session(virtual=True),
    )


def on_a_gpu(milliseconds: float, data: float = 0.0, title: str = "NVIDIA H200") -> Recording:
    """Three steps, the first of which is not counted."""

    def one(index: int) -> Step:
        phases = (
            Phase("data", 0, int(data * MS), 1),
            Phase("forward", 0, int(milliseconds * MS), 1, gpu_ns=int(milliseconds * MS)),
        )
        duration = int((milliseconds + data) * MS) * (10 if index == 0 else 1)
        return replace(
            step(index, {"forward": 1}), phases=phases, duration_ns=duration,
            gpu_ns=int(milliseconds * MS),
        )  # fmt: skip

    return recording([one(0), one(1), one(2)], ended=SessionEnd(1, gpus=(title,)))


def compared(one: Recording, two: Recording) -> MeasuredStepTime:
    found = diff_recordings(one, two).step_time
    assert isinstance(found, MeasuredStepTime)
    return found


def shown(one: Recording, two: Recording) -> str:
    stream = StringIO()
    draw.write(diff_sections(diff_recordings(one, two)), stream)
    return stream.getvalue()


def test_predicted_is_for_the_gpu_that_was_measured() -> None:
    """38.76 ms: GPT-2 small in our own run on an H200."""
    measured = json.loads(H200.read_text())["ratios"]["GPT-2 small"]["gpuprobe counters"]
    found = compared(simulated(), on_a_gpu(measured["plain_ms"]))
    assert found.predicted.gpu == "h200-141gb"
    assert found.gpu == "NVIDIA H200"
    assert (found.steps, found.measured_ns) == (2, 38_760_000)
    assert compared(on_a_gpu(measured["plain_ms"]), simulated()) == found


def test_the_gap_is_explained_by_phase_and_by_data() -> None:
    found = compared(simulated(), on_a_gpu(90.0, data=30.0))
    assert not found.inside
    assert found.data_ns == 30 * MS
    (forward,) = found.phases
    assert forward.measured_ns == 90 * MS
    assert forward.predicted_ns == found.predicted.expected_ns
    text = shown(simulated(), on_a_gpu(90.0, data=30.0))
    assert "measured 120.0 ms on NVIDIA H200 (median of 2 steps)" in text
    assert "outside of" in text
    assert "30.0 ms of a step wait for data, which is not predicted" in text
    assert ", bound by computing 100%" in text
    flat = " ".join(text.split())
    assert "clocks of the GPU, which heat and power limit: not recorded" in flat
    assert "synchronisations of the measured run: not recorded; predicted: 0 calls, 0 ns" in flat
    assert "unknown of the measured run: how long it waits for launches" in flat
    assert "collectives" not in text
    assert "forward" in text


def test_what_collectives_block_is_beside_what_is_exposed() -> None:
    (rank,) = (real := on_a_gpu(90.0)).ranks
    call = Collective("all_reduce", 1, Bytes(8), Nanoseconds(20 * MS))
    steps = tuple(replace(one, collectives=(call,)) for one in rank.steps)
    real = replace(real, ranks=(replace(rank, steps=steps),))
    assert compared(simulated(), real).collectives_ns == 20 * MS
    text = " ".join(shown(simulated(), real).split())
    assert (
        "collectives block the host for 20.0 ms of a step; predicted: 0 ns with nothing to compute"
    ) in text


def test_clocks_and_waits_of_the_host_are_beside_what_is_predicted() -> None:
    def at(step: Step, mhz: int, *slowed: str) -> Step:
        window = replace(step.windows[0], device="cuda:0", sm_clock=mhz, slowed=slowed)
        waits = (HostWait("Tensor.item()", 2, 30 * MS), HostWait("Stream.synchronize()", 1, MS))
        return replace(step, windows=(window,), host_waits=waits)

    (rank,) = (real := on_a_gpu(90.0)).ranks
    first, *steps = rank.steps
    steps = [at(steps[0], 1500, "power cap"), at(steps[1], 1600, "power cap")]
    idle = at(replace(steps[1], index=3), 345, "idle")
    real = replace(real, ranks=(replace(rank, steps=(first, *steps, idle)),))
    found = compared(simulated(), real)
    assert isinstance(found.clock, MeasuredClock)
    assert (found.clock.readings, found.clock.low, found.clock.high) == (2, 1500, 1600)
    text = " ".join(shown(simulated(), real).split())
    assert (
        "clock of the multiprocessors: 1,500 to 1,600 MHz, median 1,550 (2 readings), 78% of the "
        "data sheet's 1,983; prices assume that 82 to 94% are kept under load; limited by power "
        "cap (2)"
    ) in text
    assert (
        "the host waits for the GPU in 3 calls of a step, 31.0 ms (Tensor.item() 2, "
        "Stream.synchronize() 1), without reads such as float(tensor); predicted: 0 calls, 0 ns"
    ) in text


def test_what_the_prediction_waits_for_is_counted() -> None:
    (rank,) = simulated().ranks
    step = rank.steps[0]
    assert isinstance(step.work, StepWork)
    columns = unpack(step.work.entries, "entries")
    for column, value in zip(columns, (Action.HOST_WAITS_STREAM.value, 1, 0, 0), strict=True):
        column.append(value)
    waiting = replace(step, work=replace(step.work, entries=pack(columns)))
    time = times(replace(rank, steps=(waiting,)))
    assert (time.host_waits, times(rank).host_waits) == (1, 0)
    assert 0.9 < time.host_waits_ns / time.expected_ns <= 1
    assert times(rank).host_waits_ns == 0


def test_a_failed_reading_of_clocks_is_told() -> None:
    (rank,) = (real := on_a_gpu(90.0)).ranks
    window = replace(rank.steps[0].windows[0], sm_clock=Unavailable("NVML: lost", ReadStatus.ERROR))
    steps = tuple(replace(one, windows=(window,)) for one in rank.steps)
    real = replace(real, ranks=(replace(rank, steps=steps),))
    assert "which heat and power limit: NVML: lost" in " ".join(shown(simulated(), real).split())


def test_a_diff_says_nothing_of_times_that_cannot_be_compared() -> None:
    assert diff_recordings(simulated(), simulated()).step_time is None
    assert diff_recordings(on_a_gpu(1.0), on_a_gpu(1.0)).step_time is None
    assert diff_recordings(simulated(), on_a_gpu(1.0, title="Unknown GPU")).step_time is None


def test_what_has_no_price_is_refused_with_the_reason() -> None:
    dtype = "float4_e2m1fn_x2"
    found = diff_recordings(simulated(dtype=dtype), on_a_gpu(1.0))
    assert isinstance(found.step_time, Unavailable)
    assert "float4" in found.step_time.reason
    assert "not predicted: no price" in shown(simulated(dtype=dtype), on_a_gpu(1.0))


def test_that_a_program_waits_for_data_is_told() -> None:
    """No prediction contains it."""
    made = simulated()
    (rank,) = made.ranks
    assert not any("data" in text for text in times(rank).left_out)
    for ns, more in ((1, False), (10**12, True)):
        waiting = replace(rank.steps[0], phases=(Phase("data", 0, ns, 1),))
        (text,) = times(replace(rank, steps=(waiting,))).left_out
        assert text.startswith("loading of data")
        assert ("longer than the step" in text) == more


def times(rank: RankRecording) -> StepTime:
    found = step_time_of(rank)
    assert isinstance(found, StepTime)
    return found


def test_the_document_has_both_times() -> None:
    document = diff_json.document(diff_recordings(simulated(), on_a_gpu(50.0)))
    found = json.loads(json.dumps(document))["step_time"]
    assert found["measured_ns"] == 50 * MS
    assert found["predicted"]["gpu"] == "h200-141gb"
