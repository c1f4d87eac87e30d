"""The predicted time of a step beside the measured one, in a diff."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from io import StringIO
from pathlib import Path

from report_builders import recording, session, step

from gpuprobe.analysis.compare.diff import diff_recordings
from gpuprobe.analysis.compare.times import MeasuredStepTime
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import Collective, Phase, SessionEnd, Step
from gpuprobe.model.run.work import Action, StepWork, Work, WorkKind, WorkPlace, pack
from gpuprobe.model.values import Bytes, Nanoseconds, Unavailable
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
    assert "clocks of the GPU, which heat and power limit, are not recorded" in text
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
        assert text.startswith("loading of data: ")
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
